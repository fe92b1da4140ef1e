"""The sections that are honoured: every key, its type, its bounds and its default."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BeforeValidator, Field

from shardwise.config.fields import (
    MAX_INT,
    Bool,
    Flag,
    FreeObject,
    Integer,
    Names,
    Number,
    Rate,
    Real,
    Section,
    Size,
    Text,
    TextList,
)

DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}
AUTOCAST_DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "bf16": "bfloat16",
    "fp16": "float16",
}

Bucket = Annotated[int, BeforeValidator(Integer(1, note="elements; leave the key out for the default"))]
TypeName = Annotated[str, BeforeValidator(Text(note="the name of a class"))]


BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _steps_per_print(value: object) -> int | None:
    if isinstance(value, float) and math.isinf(value):
        return None
    return Integer(1, note="null or infinity: never print")(value)


class TopLevel(Section):
    """The keys that stand outside of any section, without the batch keys."""

    dataloader_drop_last: Bool = False
    gradient_clipping: Annotated[
        float, BeforeValidator(Number(low=0, note="the largest gradient norm; 0 turns clipping off"))
    ] = 1.0
    communication_data_type: Annotated[str | None, BeforeValidator(Text(DTYPES))] = None
    steps_per_print: Annotated[int | None, BeforeValidator(_steps_per_print)] = None
    wall_clock_breakdown: Bool = False
    zero_allow_untested_optimizer: Bool = False
    zero_force_ds_cpu_optimizer: Bool = True
    seed: Annotated[int | None, BeforeValidator(Integer(0))] = None
    gradient_normalization: Annotated[
        str, BeforeValidator(Text({"micro_steps": "micro_steps", "tokens": "tokens"}))
    ] = "micro_steps"
    communication_timeout: Annotated[float, BeforeValidator(Number(above=0, high=1e9, note="seconds"))] = 600.0


class OptimizerSection(Section):
    """`optimizer`: the class by name and its arguments."""

    type: TypeName
    params: FreeObject = Field(default_factory=dict)


class SchedulerSection(Section):
    """`scheduler`: the class by name and its arguments."""

    type: TypeName
    params: FreeObject = Field(default_factory=dict)


class FP16Section(Section):
    """`fp16`: half precision with a loss scale."""

    enabled: Bool = False
    auto_cast: Bool = False
    loss_scale: Annotated[float, BeforeValidator(Number(low=0, note="0 means dynamic"))] = 0.0
    initial_scale_power: Annotated[
        int, BeforeValidator(Integer(0, 127, note="the scale starts at 2 to this power"))
    ] = 16
    loss_scale_window: Annotated[int, BeforeValidator(Integer(1, note="clean steps before the scale doubles"))] = 1000
    hysteresis: Annotated[int, BeforeValidator(Integer(1, note="overflows before the scale halves"))] = 2
    consecutive_hysteresis: Bool = False
    min_loss_scale: Annotated[
        float, BeforeValidator(Number(above=0, note="a scale of 0 would erase the gradients"))
    ] = 1.0


class BF16Section(Section):
    """`bf16`: bfloat16 with fp32 master weights."""

    enabled: Bool = False
    check_grad_overflow: Bool = True
    immediate_grad_update: Bool = False


class TorchAutocastSection(Section):
    """`torch_autocast`: PyTorch's own mixed precision."""

    enabled: Bool = False
    dtype: Annotated[str | None, BeforeValidator(Text(AUTOCAST_DTYPES))] = None
    lower_precision_safe_modules: Annotated[list[str] | None, BeforeValidator(TextList())] = None


class LeafModuleSection(Section):
    """`zero_optimization.leaf_module`: which modules stage 3 gathers as a whole."""

    classes: Names = Field(
        default_factory=lambda: [
            "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
            "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
            "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        ]
    )
    names: Names = Field(default_factory=list)
    name_suffixes: Names = Field(default_factory=list)


class ZeroSection(Section):
    """`zero_optimization`: what is sharded, and in how large pieces."""

    stage: Annotated[int, BeforeValidator(Integer(0, 3))] = 0
    contiguous_gradients: Bool = True
    reduce_scatter: Bool = True
    reduce_bucket_size: Bucket = 500_000_000
    allgather_partitions: Bool = True
    allgather_bucket_size: Bucket = 500_000_000
    overlap_comm: Annotated[bool | None, BeforeValidator(Flag("leave the key out for the default, which is true"))] = (
        None
    )
    sub_group_size: Bucket = 1_000_000_000
    stage3_prefetch_bucket_size: Size = 50_000_000
    stage3_param_persistence_threshold: Size = 100_000
    stage3_model_persistence_threshold: Size = MAX_INT
    stage3_max_live_parameters: Size = 1_000_000_000
    stage3_max_reuse_distance: Size = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: Bool = False
    ignore_unused_parameters: Bool = True
    mics_shard_size: Annotated[
        int,
        BeforeValidator(Integer(1, also=(-1,), note="ranks that share one copy of the model; -1 means off")),
    ] = -1
    zero_hpz_partition_size: Annotated[
        int, BeforeValidator(Integer(1, note="ranks that share a second copy; 1 means off"))
    ] = 1
    leaf_module: LeafModuleSection = Field(default_factory=LeafModuleSection)


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
    """Arguments of `WarmupDecayLR`."""

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

SECTIONS: dict[str, type[Section]] = {
    "optimizer": OptimizerSection,
    "scheduler": SchedulerSection,
    "fp16": FP16Section,
    "bf16": BF16Section,
    "torch_autocast": TorchAutocastSection,
    "zero_optimization": ZeroSection,
}

# Names that `optimizer.params` commonly holds, to say where a misplaced one belongs.
COMMON_OPTIMIZER_PARAMS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "momentum",
    "amsgrad",
    "torch_adam",
    "adam_w_mode",
)
