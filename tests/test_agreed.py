"""What goes into ``initialize`` and around it: the same configuration on all ranks, "auto", warnings said once."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import Config, ConfigError
from tests.ranks import RankPools

ADAMW = {"type": "AdamW", "params": {"lr": 0.01}}


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def started(config: Any, model: nn.Module | None = None, **arguments: Any) -> Any:
    if not isinstance(config, Config):
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAMW, **config}
    return shardwise.initialize(model=model or tiny(), config=config, **arguments)[0]


def with_another_config(keys: dict[str, Any]) -> str:
    model = tiny()
    with pytest.raises(ConfigError) as error:
        started(keys if dist.get_rank() else {}, model)
    started({}, model).destroy()  # nothing has been changed, and no collective is left over
    return str(error.value)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"csv_monitor": {"enabled": True}}, "csv_monitor.enabled"),
        ({"sparse_gradients": True, "zero_optimization": {"stage": 2}}, "sparse_gradients, zero_optimization.stage"),
        ({"gradient_clipping": 0.5}, "gradient_clipping"),
    ],
)
def test_a_rank_with_another_configuration_is_told_which_keys_differ(
    ranks: RankPools, keys: dict[str, Any], named: str
) -> None:
    first, second = ranks(2).run(with_another_config, keys)
    assert first.startswith("rank 1 was given another configuration than rank 0")
    assert f"than rank 0: {named}. Give all ranks the same" in second


def warned() -> list[tuple[str, bool]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decay = {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}
        started({"zero_optimization": {"cpu_offload": False}, "scheduler": decay}).destroy()
    return [(str(w.message), w.filename == __file__) for w in caught]


def test_the_first_rank_warns_and_blames_the_script(ranks: RankPools) -> None:
    first, second = ranks(2).run(warned)
    assert len(first) == 2 and all(here for _, here in first), first
    assert second == []


def test_auto_is_filled_from_arguments_and_from_the_models_width() -> None:
    model = tiny()
    model.config = SimpleNamespace(hidden_size=32)  # as Hugging Face's models have
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    config = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "zero_optimization": zero}
    engine = started(config, model, auto={"optimizer.params.lr": 0.5})
    try:
        assert engine.get_lr() == [0.5]
        assert engine.config.filled == {
            "optimizer.params.lr": 0.5,
            "zero_optimization.reduce_bucket_size": 1024,
            "zero_optimization.stage3_param_persistence_threshold": 320,
        }
    finally:
        engine.destroy()


def test_a_config_object_says_no_more_than_what_was_written(caplog: pytest.LogCaptureFixture) -> None:
    source = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAMW, "bf16": {"enabled": "auto"}}
    loaded = Config.load(source, auto={"bf16.enabled": True})
    with caplog.at_level("INFO", logger="shardwise"):
        engine = started(loaded)
    try:
        said = [record.getMessage() for record in caplog.records]
        assert said == ['bf16.enabled is "auto": True']
        assert engine.config == loaded and engine.config.written == loaded.written
    finally:
        engine.destroy()


def one_step(config: dict[str, Any]) -> list[float]:
    engine = started({**config, "gradient_clipping": 0})
    try:
        norms = []
        for step in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            engine.backward(engine(x).square().mean())
            engine.step()
            norms.append(engine.get_global_grad_norm())
        return norms
    finally:
        engine.destroy()


@pytest.mark.parametrize(
    "keys",
    [
        {"communication_data_type": "fp16"},
        {"sparse_gradients": True},
        {"torch_autocast": {"enabled": False, "lower_precision_safe_modules": ["torch.nn.Linear"]}},
    ],
)
def test_what_is_for_several_ranks_changes_nothing_on_one(keys: dict[str, Any]) -> None:
    assert one_step(keys) == one_step({})
