"""What a seasoned engineer would say about a configuration that is not wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.cli.model_facts import ModelFacts
from shardwise.config.explain import clipped_by_the_optimizer
from shardwise.config.says import low_precision, world_size

if TYPE_CHECKING:
    from shardwise.config import Config

GIB = 2**30
# An accelerator is assumed to have this much where there is none to ask.
USUAL_DEVICE_BYTES = 80 * GIB
# Model state may take this share of a device: activations, buffers and the allocator want the rest.
STATE_SHARE = 0.5


@dataclass(frozen=True)
class Machine:
    """What a rank runs on.

    Attributes:
        memory: bytes of one device.
        assumed: whether they were assumed.
        bf16: whether it has bf16; None when there is no accelerator to ask.
    """

    memory: int = USUAL_DEVICE_BYTES
    assumed: bool = True
    bf16: bool | None = None


def this_machine(memory: int | None = None) -> Machine:
    """The machine that this runs on, with ``memory`` bytes a device if given."""
    import torch

    if not torch.cuda.is_available():
        return Machine() if memory is None else Machine(memory, assumed=False)
    found = torch.cuda.get_device_properties(0).total_memory
    return Machine(memory or found, assumed=False, bf16=torch.cuda.is_bf16_supported())


def advise(config: Config, machine: Machine, model: ModelFacts | None = None) -> list[str]:
    """Warnings, each a sentence that begins with the JSON path that it is about."""
    return [*_precision(config, machine), *_sizes(config, machine, model), *_rates(config), *_habits(config)]


def _precision(config: Config, machine: Machine) -> Iterator[str]:
    if config.fp16.enabled and machine.bf16 is not False:
        where = "this GPU has it" if machine.bf16 else "GPUs since 2020 and CPUs have it"
        yield f'fp16.enabled: bf16 needs no loss scale and never overflows; {where}: "bf16": {{"enabled": true}}'
    if config.bf16.enabled and machine.bf16 is False:
        yield 'bf16.enabled: this GPU has no bf16 and emulates it; write "fp16": {"enabled": true}'
    if config.fp16.enabled and not config.fp16.loss_scale and config.fp16.initial_scale_power > 24:
        yield (
            f"fp16.initial_scale_power: from 2^{config.fp16.initial_scale_power} the first steps overflow and are "
            "skipped until the scale has come down; 16 is usual"
        )


def _sizes(config: Config, machine: Machine, model: ModelFacts | None) -> Iterator[str]:
    zero, ranks = config.zero_optimization, world_size(config)
    if zero.stage > 0 and ranks == 1:
        yield f"zero_optimization.stage: {zero.stage} shards nothing over one rank (--world-size says how many)"
    if model is None:
        return
    if zero.stage == 3:
        at_1 = _state_bytes(config, model.params, ranks, 1)
        assumed = "an assumed device" if machine.assumed else "the device"
        if at_1 < STATE_SHARE * machine.memory:
            yield (
                f"zero_optimization.stage: 3, but at stage 1 the model's state takes {at_1 / GIB:.3g} GiB of "
                f"{assumed}'s {machine.memory / GIB:.3g} GiB a rank; stage 1 or 2 sends a third less"
            )
    for name in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"):
        size, key = getattr(zero, name), f"zero_optimization.{name}"
        if key in config.written and size > model.params:
            yield (
                f"{key}: {size:,} elements is more than the whole model ({model.params:,}); it is an upper bound only: "
                + ("at stage 3 units follow the model's blocks" if zero.stage == 3 else "units are cut at 4,194,304")
            )


def _state_bytes(config: Config, params: int, ranks: int, stage: int) -> int:
    from shardwise.sharding.policy import model_state_bytes

    low = low_precision(config)
    return model_state_bytes(params, ranks, stage, param_bytes=2 if low else 4, mixed=low)


def _rates(config: Config) -> Iterator[str]:
    if config.scheduler is None:
        return
    params, kind = config.scheduler.params, config.scheduler.type
    lr = None if config.optimizer is None else config.optimizer.params.get("lr", _default_lr(config.optimizer.type))
    top = params.get("warmup_max_lr", 0.001 if kind == "WarmupDecayLR" else None)
    if kind in ("WarmupLR", "WarmupDecayLR") and top is not None and lr is not None and top != lr:
        written = "" if "warmup_max_lr" in params else ", its default,"
        yield f"scheduler.params.warmup_max_lr: {top:g}{written} overrides optimizer.params.lr {lr:g}"
    warmup, total = params.get("warmup_num_steps", 1000), params.get("total_num_steps")
    if kind in ("WarmupDecayLR", "WarmupCosineLR") and total is not None and warmup >= total:
        yield f"scheduler.params.warmup_num_steps: {warmup} of {total} steps are warm-up; the rate never comes down"


def _default_lr(optimizer: str) -> float:
    """The rate of an optimizer whose arguments name none."""
    import inspect

    import torch

    parameter = inspect.signature(getattr(torch.optim, optimizer, torch.optim.AdamW)).parameters["lr"]
    return float(parameter.default)


def _habits(config: Config) -> Iterator[str]:
    if "gradient_clipping" not in config.written and not clipped_by_the_optimizer(config):
        yield (
            "gradient_clipping: absent; gradients are clipped to a norm of 1 (DeepSpeed's default since June 2026; "
            "before, it did not clip). Write the value that you mean, 0 for none"
        )
    elif not config.gradient_clipping:
        yield "gradient_clipping: 0 clips nothing; one bad batch can end a run of a transformer"
    if config.optimizer is None:
        yield "optimizer: absent; the script has to give one to shardwise.initialize"
    if config.steps_per_print is None and not config.wall_clock_breakdown:
        yield "steps_per_print: absent; there will be no log lines"
    if config.steps_per_print is not None and config.log_level in ("warning", "error", "critical"):
        yield f"log_level: {config.log_level} hides the log lines that steps_per_print asks for"
    if config.zero_optimization.stage >= 2 and config.gradient_accumulation_steps > 1 and world_size(config) > 1:
        yield (
            f"gradient_accumulation_steps: stage {config.zero_optimization.stage} reduces in each of the "
            f"{config.gradient_accumulation_steps} micro-steps; stage 1 would reduce once"
        )
    if config.comet.api_key is not None:
        yield "comet.api_key: a secret in a file that people share; set it where Comet looks for it instead"
