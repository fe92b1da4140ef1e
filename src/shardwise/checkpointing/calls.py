"""Checkpointing by hand, under the names that scripts written for upstream use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise import _torch
from shardwise.checkpointing.process import PROCESS
from shardwise.checkpointing.recompute import Checkpointer
from shardwise.checkpointing.rng import MODEL_PARALLEL, RngTracker, seed_device
from shardwise.dist.mesh import default_device
from shardwise.errors import NotYetSupported
from shardwise.messages import logger
from shardwise.meter import Stopwatch

# Between the seeds of the default generator and of the model-parallel one, as Megatron has it.
MODEL_PARALLEL_OFFSET = 2718


@_torch.outside_compiled_code
def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, of which only the arguments are kept until the backward pass calls it again.

    Both calls draw the same random numbers from torch. Without gradients, and inside another checkpoint, it is a plain
    call. Gradients flow to arguments, parameters and whatever else the function reads. What :func:`configure` asked
    for is in force; without it nothing is moved or timed.

    Args:
        function: called twice; must give the same both times. Of a module or its method, the second call finds the
            training flags of the first, and leaves the module's buffers alone.
        args, kwargs: its arguments; tensors may lie in tuples, lists and dicts.

    Returns:
        What the function returns.
    """
    checkpointer = PROCESS.configured or Checkpointer(rng=PROCESS.rng)
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return checkpointer(function, args, kwargs, module=owner if isinstance(owner, nn.Module) else None)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same as :func:`checkpoint`, which never is re-entrant."""
    return checkpoint(function, *args)


class CheckpointFunction:
    """For scripts that call upstream's autograd function itself."""

    @staticmethod
    def apply(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """:func:`checkpoint`; the outputs are also appended to ``all_outputs``."""
        out = checkpoint(function, *args)
        all_outputs.extend(out if isinstance(out, tuple | list) else [out])
        return out


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how :func:`checkpoint` works from now on in this process. Each call starts anew.

    The blocks that ``shardwise.initialize`` checkpoints go by their engine's configuration instead.

    Args:
        mpu_: model-parallel groups, or None; of one tensor-parallel rank.
        deepspeed_config: path, dict or base64 of a ds_config whose ``activation_checkpointing`` is taken.
        partition_activations: no effect: one rank has a whole activation.
        contiguous_checkpointing: no effect: torch's allocator keeps what is saved from scattering.
        num_checkpoints: no effect: it sizes upstream's contiguous buffers.
        checkpoint_in_cpu: keep arguments that carry gradients in host memory.
        synchronize: wait for the device at the ends of each call.
        profile: log the time of each call and of each recomputation.

    Raises:
        ConfigError: a wrong configuration.
        NotYetSupported: ``mpu_`` has several tensor-parallel ranks.
    """
    if _tensor_ranks(mpu_) > 1:
        raise NotYetSupported(
            "checkpointing.configure: mpu_ has several tensor-parallel ranks, which have not landed yet; pass None."
        )
    cpu = wait = timed = False
    if deepspeed_config is not None:
        from shardwise.config import Config  # not at import time: pydantic costs more than all the rest

        world_size = dist.get_world_size() if dist.is_initialized() else 1
        section = Config.load(deepspeed_config, world_size=world_size).activation_checkpointing
        cpu, wait, timed = section.cpu_checkpointing, section.synchronize_checkpoint_boundary, section.profile
    ignored = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
    }
    _say_no_effect([name for name, value in ignored.items() if value])
    PROCESS.configured = Checkpointer(
        cpu=cpu if checkpoint_in_cpu is None else checkpoint_in_cpu,
        synchronize=wait if synchronize is None else synchronize,
        times=LoggedTimes() if (timed if profile is None else profile) else None,
        rng=PROCESS.rng,
    )


class LoggedTimes:
    """Logs each time as soon as it is known."""

    def __init__(self) -> None:
        self.watch = Stopwatch(default_device())

    def add(self, name: str, seconds: float) -> None:
        """Log it."""
        logger.info("%s: %.2f ms", name, seconds * 1e3)


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return PROCESS.configured is not None


def reset() -> None:
    """For scripts that call it between evaluations: there are no buffers to empty."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """No effect: one rank has a whole activation."""
    _say_no_effect(["partition_activations"] if partition_activation else [])


def set_num_layers(nlayers: int) -> None:
    """No effect: it sizes upstream's contiguous buffers."""


def get_cuda_rng_tracker() -> RngTracker:
    """The process's named random generators; :func:`checkpoint` puts them back for the recomputation."""
    return PROCESS.rng


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's default generator, and one named ``model-parallel-rng`` with ``seed + 2718 + tensor rank``.

    Args:
        seed: the same on all tensor-parallel ranks (there is one).
    """
    PROCESS.rng.reset()
    seed_device(seed)
    PROCESS.rng.add(MODEL_PARALLEL, seed + MODEL_PARALLEL_OFFSET)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the generator named ``model-parallel-rng`` anew."""
    with PROCESS.rng.fork():
        seed_device(seed + MODEL_PARALLEL_OFFSET)


def _say_no_effect(names: list[str]) -> None:
    if names and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.info("checkpointing: no effect: %s (one tensor-parallel rank, torch's own allocator)", ", ".join(names))


def _tensor_ranks(mpu: Any) -> int:
    for name in ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size"):
        size = getattr(mpu, name, None)
        if size is not None:
            return int(size())
    return 1
