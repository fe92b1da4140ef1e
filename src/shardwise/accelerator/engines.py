"""From what `prepare` was given and a ds_config to an engine."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.accelerator.deepspeed import (
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    auto_values,
    micro_batch,
    write_precision,
)
from shardwise.engine import Engine
from shardwise.errors import ConfigError
from shardwise.setup import initialize


@dataclass(frozen=True)
class Facts:
    """What an Accelerator knows that a ds_config may have left open.

    Attributes:
        gradient_accumulation_steps: of the Accelerator.
        gradient_normalization: likewise.
        mixed_precision: "no", "fp16" or "bf16".
        processes: how many.
        split_batches: whether loaders' batch sizes are those of all processes together.
    """

    gradient_accumulation_steps: int
    gradient_normalization: str
    mixed_precision: str
    processes: int
    split_batches: bool


def resolve(
    plugin: DeepSpeedPlugin,
    facts: Facts,
    optimizer: Optimizer | DummyOptim | None,
    scheduler: Any,
    batch_sizes: Sequence[int | None],
) -> tuple[dict[str, Any], dict[str, object]]:
    """The ds_config of one engine, and what its "auto" values become, by JSON path.

    Raises:
        ConfigError: the script and the ds_config contradict each other.
    """
    config = copy.deepcopy(plugin.deepspeed_config)
    write_precision(config, facts.mixed_precision)
    _check_pairs(config, optimizer, scheduler)
    auto: dict[str, object] = {
        "bf16.enabled": facts.mixed_precision == "bf16",
        "fp16.enabled": facts.mixed_precision == "fp16",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": bool(plugin.zero3_save_16bit_model),
    }
    steps = plugin.gradient_accumulation_steps
    steps = facts.gradient_accumulation_steps if steps in (None, "auto") else int(steps)
    if config.get("gradient_accumulation_steps") is None:
        # Not where the two other batch sizes say it.
        if not all(isinstance(config.get(k), int) for k in ("train_batch_size", "train_micro_batch_size_per_gpu")):
            config["gradient_accumulation_steps"] = steps
    elif config["gradient_accumulation_steps"] == "auto":
        auto["gradient_accumulation_steps"] = steps
    micro = config.get("train_micro_batch_size_per_gpu", "auto")
    if micro == "auto" and not _follows(config):
        shares = facts.processes if facts.split_batches else 1
        config["train_micro_batch_size_per_gpu"] = "auto"
        auto["train_micro_batch_size_per_gpu"] = micro_batch(batch_sizes, plugin.is_train_batch_min, shares)
    clipping = plugin.gradient_clipping
    auto["gradient_clipping"] = 1.0 if clipping in (None, "auto") else float(clipping)
    if config.get("gradient_clipping") is None and not _own_clipping(config):
        # The engine's default would clip at 1.0. Here nothing is clipped that nobody asked for.
        config["gradient_clipping"] = 0.0 if clipping in (None, "auto") else float(clipping)
    auto["zero_optimization.stage"] = 2 if plugin.zero_stage is None else plugin.zero_stage
    stand_in = optimizer if isinstance(optimizer, DummyOptim) else None
    planned = scheduler if isinstance(scheduler, DummyScheduler) else None
    auto.update(auto_values(stand_in, planned, config, 1 if facts.split_batches else facts.processes))
    if facts.gradient_normalization != "micro_steps":
        config["gradient_normalization"] = "tokens"
    config.setdefault("steps_per_print", None)  # silent unless it is asked for
    if isinstance(optimizer, Optimizer):
        config["zero_allow_untested_optimizer"] = True
    return config, auto


def build(
    model: nn.Module,
    optimizer: Optimizer | DummyOptim | None,
    scheduler: Any,
    config: dict[str, Any],
    auto: Mapping[str, object],
) -> Engine:
    """The engine. All processes must call this.

    Args:
        model: to be sharded.
        optimizer: the script's, a stand-in, or None.
        scheduler: a stand-in, or None. A schedule of the script's is not the engine's business.
        config: from :func:`resolve`.
        auto: likewise.
    """
    maker = scheduler.lr_scheduler_callable if isinstance(scheduler, DummyScheduler) else None
    engine, _, _, _ = initialize(
        model=model,
        optimizer=optimizer if isinstance(optimizer, Optimizer) else None,
        model_parameters=optimizer.params if isinstance(optimizer, DummyOptim) else None,
        lr_scheduler=maker,
        config=config,
        auto=auto,
    )
    return engine


def _own_clipping(config: Mapping[str, Any]) -> bool:
    """Whether the ds_config's optimizer says how gradients are clipped."""
    section = config.get("optimizer")
    params = section.get("params") if isinstance(section, Mapping) else None
    return isinstance(params, Mapping) and bool(params.get("max_grad_norm"))


def _follows(config: Mapping[str, Any]) -> bool:
    """Whether the micro-batch follows from the other two batch sizes."""
    return all(isinstance(config.get(k), int) for k in ("train_batch_size", "gradient_accumulation_steps"))


def _check_pairs(config: Mapping[str, Any], optimizer: Any, scheduler: Any) -> None:
    has = {name: isinstance(config.get(name), Mapping) for name in ("optimizer", "scheduler")}
    if has["optimizer"] and optimizer is not None and not isinstance(optimizer, DummyOptim):
        raise ConfigError(
            f"optimizer: the ds_config has one, and so has the script ({type(optimizer).__name__}). Take one away; "
            "DummyOptim in the script stands for that of the ds_config."
        )
    if isinstance(optimizer, DummyOptim) and not has["optimizer"]:
        raise ConfigError("optimizer: DummyOptim stands for that of the ds_config, which has none. Write one there.")
    stands = isinstance(scheduler, DummyScheduler)
    if has["scheduler"] and scheduler is not None and not stands:
        raise ConfigError(
            f"scheduler: the ds_config has one, and so has the script ({type(scheduler).__name__}). Take one away; "
            "DummyScheduler in the script stands for that of the ds_config."
        )
    if stands and not has["scheduler"] and scheduler.lr_scheduler_callable is None:
        raise ConfigError(
            "scheduler: DummyScheduler stands for that of the ds_config, which has none. Write one there, or give it "
            "lr_scheduler_callable."
        )
    if isinstance(optimizer, DummyOptim) and scheduler is not None and not stands:
        raise ConfigError("scheduler: with DummyOptim there is no optimizer to schedule yet; use DummyScheduler.")
