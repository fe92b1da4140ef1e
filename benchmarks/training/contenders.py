"""How each contender builds its training step. Libraries are imported here, each in its own processes only."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .spec import Contender, Workload

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Training:
    """A contender that is ready.

    Attributes:
        step: one whole training step on a rank's batch (tokens, targets); returns the rank's loss.
        bytes_sent: what the library itself has counted so far, if it counts.
    """

    step: Step
    bytes_sent: Callable[[], int] | None = None


def import_library(contender: Contender) -> None:
    """Import what the contender needs, so that the memory this takes can be told from the memory of training."""
    if contender.library == "deepspeed":
        import deepspeed

        # Building its operator for inference on one machine takes a minute and a C++ compiler; training never calls it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    elif contender.library == "shardwise":
        import shardwise  # noqa: F401
    elif contender.library == "fsdp2":
        import torch.distributed.fsdp  # noqa: F401


def start_group(contender: Contender) -> None:
    """Start the process group, unless the contender computes alone."""
    if contender.library == "compute":
        return
    if contender.library == "deepspeed":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    else:
        dist.init_process_group("gloo")


def build(contender: Contender, model: nn.Module, w: Workload) -> Training:
    """Make the contender's training step of the model."""
    if contender.library == "shardwise":
        return _shardwise(contender, model, w)
    if contender.library == "deepspeed":
        return _deepspeed(contender, model, w)
    if contender.library == "fsdp2":
        _fully_shard(model, reshard=contender.stage == 3)
    module = nn.parallel.DistributedDataParallel(model) if contender.library == "ddp" else model
    optimizer = torch.optim.AdamW(model.parameters(), **w.adamw)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = module(tokens, targets)
        loss.backward()
        if w.clip:
            nn.utils.clip_grad_norm_(model.parameters(), w.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(step)


def _fully_shard(model: nn.Module, *, reshard: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def _shardwise(contender: Contender, model: nn.Module, w: Workload) -> Training:
    import shardwise

    engine, *_ = shardwise.initialize(model=model, config=w.ds_config(contender.stage or 0))

    def sent() -> int:
        return sum(t.bytes_sent for axis in engine.mesh.axes() for t in axis.traffic.values())

    return Training(_engine_step(engine), sent)


def _deepspeed(contender: Contender, model: nn.Module, w: Workload) -> Training:
    import deepspeed

    config = w.ds_config(contender.stage or 0)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return Training(_engine_step(engine))


def _engine_step(engine: nn.Module) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)  # type: ignore[operator]
        engine.step()  # type: ignore[operator]
        return loss

    return step
