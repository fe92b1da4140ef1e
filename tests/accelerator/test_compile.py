"""`dynamo_plugin`: what is compiled, and that hooks stand outside of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import Accelerator, ConfigError, DeepSpeedPlugin
from shardwise.accelerator import TorchDynamoPlugin, current
from tests.ranks import RankPools


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])


def trains(stage: int | None, compiled: bool, regional: bool) -> tuple[list[float], list[str], str]:
    plugin = None
    if stage is not None:
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
        plugin = DeepSpeedPlugin(hf_ds_config=config)
    dynamo = TorchDynamoPlugin(backend="eager" if compiled else "no", use_regional_compilation=regional)
    accelerator = Accelerator(deepspeed_plugin=plugin, dynamo_plugin=dynamo)
    given = blocks()
    model, optimizer = accelerator.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1))
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    losses = []
    for _ in range(3):
        x = torch.randn(4, 8)
        loss = (model(x) - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    names = sorted(accelerator.get_state_dict(model))
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    accelerator.free_memory()
    current.forget()
    return losses, names, type(plain).__name__


@pytest.mark.parametrize("stage", [None, 0, 3])
@pytest.mark.parametrize("regional", [False, True])
def test_a_compiled_run_has_the_losses_of_the_other(ranks: RankPools, stage: int | None, regional: bool) -> None:
    wanted, names, kind = ranks(2).run(trains, stage, False, False)[0]
    for losses, found, inner in ranks(2).run(trains, stage, True, regional):
        # The backend "eager" runs the same operations.
        assert losses == pytest.approx(wanted, rel=1e-6)
        assert (found, inner) == (names, kind)


def test_the_blocks_are_compiled_and_put_back() -> None:
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=True), cpu=True)
    given = blocks()
    model = accelerator.prepare(given)
    assert model is given and any("forward" in vars(m) for m in given.modules())
    accelerator.free_memory()
    assert not any("forward" in vars(m) for m in given.modules())
    current.forget()


def test_an_unknown_backend_is_refused() -> None:
    accelerator = Accelerator(
        dynamo_plugin=TorchDynamoPlugin(backend="inductr", use_regional_compilation=True), cpu=True
    )
    with pytest.raises(ConfigError, match="inductr"):
        accelerator.prepare(blocks())
    accelerator.free_memory()
    current.forget()
