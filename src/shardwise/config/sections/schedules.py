"""`scheduler.params` of the schedules that ds_config knows by name."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from shardwise.config.fields import Bool, Integer, Number, Rate, Real, Section, Size, Text


class _SchedulerParams(Section):
    last_batch_iteration: Annotated[int, BeforeValidator(Integer(0, also=(-1,)))] = -1


_Steps = Annotated[int, BeforeValidator(Integer(0, note="optimizer steps"))]
_SomeSteps = Annotated[int, BeforeValidator(Integer(1, note="optimizer steps"))]
_Warmup = Annotated[str, BeforeValidator(Text({"log": "log", "linear": "linear"}))]
_Ratio = Annotated[float, BeforeValidator(Number(low=0, high=1))]


class LRRangeTestParams(_SchedulerParams):
    """Arguments of `LRRangeTest`."""

    lr_range_test_min_lr: Rate = 1e-3
    lr_range_test_step_size: _SomeSteps = 2000
    lr_range_test_step_rate: Rate = 1.0
    lr_range_test_staircase: Bool = False


class OneCycleParams(_SchedulerParams):
    """Arguments of `OneCycle`."""

    cycle_min_lr: Rate
    cycle_max_lr: Rate
    decay_lr_rate: Rate = 0.0
    cycle_first_step_size: _SomeSteps = 2000
    cycle_second_step_size: Annotated[int | None, BeforeValidator(Integer(1, note="optimizer steps"))] = None
    cycle_first_stair_count: Size = 0
    cycle_second_stair_count: Annotated[int | None, BeforeValidator(Integer(0))] = None
    decay_step_size: _Steps = 0
    cycle_momentum: Bool = True
    cycle_min_mom: _Ratio = 0.8
    cycle_max_mom: _Ratio = 0.9
    decay_mom_rate: Real = 0.0


class WarmupLRParams(_SchedulerParams):
    """Arguments of `WarmupLR`."""

    warmup_min_lr: Rate = 0.0
    warmup_max_lr: Annotated[float | None, BeforeValidator(Number(low=0))] = None
    warmup_num_steps: _Steps = 1000
    warmup_type: _Warmup = "log"


class WarmupDecayLRParams(WarmupLRParams):
    """Arguments of `WarmupDecayLR`, which unlike `WarmupLR` has a top rate of its own."""

    warmup_max_lr: Annotated[float | None, BeforeValidator(Number(low=0))] = 0.001
    total_num_steps: _SomeSteps


class WarmupCosineLRParams(_SchedulerParams):
    """Arguments of `WarmupCosineLR`."""

    total_num_steps: _SomeSteps
    warmup_min_ratio: _Ratio = 0.0
    warmup_num_steps: _Steps = 1000
    cos_min_ratio: _Ratio = 1e-4
    warmup_type: _Warmup = "log"


SCHEDULER_PARAMS: dict[str, type[Section]] = {
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
}
