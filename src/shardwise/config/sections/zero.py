"""`zero_optimization`: what is sharded, and in how large pieces."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from shardwise.config.fields import MAX_INT, Bool, Flag, Integer, Names, Section, Size
from shardwise.config.says import SEVERAL_RANKS, SHARDED, STAGE_3, Says, world_size

Bucket = Annotated[int, BeforeValidator(Integer(1, note="elements; leave the key out for the default"))]

_STAGES = {
    0: "nothing is sharded; gradients are all-reduced at the boundary",
    1: "optimizer state is sharded; gradients are reduce-scattered at the boundary",
    2: "optimizer state and gradients are sharded; gradients are reduce-scattered every micro-step",
    3: "parameters, gradients and optimizer state are sharded; parameters are gathered around use",
}


def _stage(stage: int, config: Any) -> str:
    line = _STAGES[stage]
    return line if config.zero_optimization.reduce_scatter else line.replace("reduce-scattered", "all-reduced")


class LeafModuleSection(Section):
    """`zero_optimization.leaf_module`: which modules stage 3 gathers as a whole."""

    classes: Annotated[Names, Says("modules of these classes are gathered as a whole", STAGE_3)] = Field(
        default_factory=lambda: [
            "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
            "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
            "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        ]
    )
    names: Annotated[Names, Says("modules of these names are gathered as a whole", STAGE_3)] = Field(
        default_factory=list
    )
    name_suffixes: Annotated[Names, Says("modules whose names end so are gathered as a whole", STAGE_3)] = Field(
        default_factory=list
    )


def _group(size: int, config: object) -> str:
    return f"{size} ranks share one copy" if size > 1 else f"all {world_size(config)} ranks share one copy"


class ZeroSection(Section):
    """`zero_optimization`: what is sharded, and in how large pieces."""

    stage: Annotated[int, BeforeValidator(Integer(0, 3)), Says(_stage)] = 0
    contiguous_gradients: Annotated[
        Bool,
        Says(
            {
                True: "gradients are copied into their buffer as they arrive",
                False: "gradients are copied into their buffer when it is reduced",
            }
        ),
    ] = True
    reduce_scatter: Annotated[
        Bool,
        Says(
            {True: "each rank gets its slice of the sum", False: "each rank gets the whole sum, and keeps a slice"},
            SHARDED,
        ),
    ] = True
    reduce_bucket_size: Annotated[Bucket, Says("at most {} elements are reduced at once (4,194,304 below stage 3)")] = (
        500_000_000
    )
    allgather_partitions: Annotated[
        Bool,
        Says(
            {
                True: "updated parameters that rest whole are all-gathered",
                False: "updated parameters that rest whole are broadcast by their owners",
            },
            SHARDED,
        ),
    ] = True
    allgather_bucket_size: Annotated[Bucket, Says("at most {} elements are gathered at once", SHARDED)] = 500_000_000
    overlap_comm: Annotated[
        bool | None,
        BeforeValidator(Flag("leave the key out for the default, which is true")),
        Says(
            {
                None: "gradients travel while the backward goes on (the default)",
                True: "gradients travel while the backward goes on",
                False: "the backward waits for each reduction",
            },
            SEVERAL_RANKS,
        ),
    ] = None
    sub_group_size: Annotated[Bucket, Says("at most {} elements are stepped at once (16,777,216 at the most)")] = (
        1_000_000_000
    )
    stage3_prefetch_bucket_size: Annotated[Size, Says("up to {} elements are gathered ahead", STAGE_3)] = 50_000_000
    stage3_param_persistence_threshold: Annotated[Size, Says("parameters of up to {} elements stay whole", STAGE_3)] = (
        100_000
    )
    stage3_model_persistence_threshold: Annotated[
        Size,
        Says(
            lambda v, c: "no limit to what stays whole" if v == MAX_INT else f"at most {v:,} elements stay whole",
            STAGE_3,
        ),
    ] = MAX_INT
    stage3_max_live_parameters: Annotated[Size, Says("at most {} elements are whole at once", STAGE_3)] = 1_000_000_000
    stage3_max_reuse_distance: Annotated[
        Size, Says("what is used again within {} elements is not released between", STAGE_3)
    ] = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: Annotated[
        Bool, Says("state_dict() is whole at every stage", no_effect=True)
    ] = False
    stage3_module_granularity_threshold: Annotated[
        Size,
        Says(
            lambda v, c: (
                f"modules with up to {v:,} parameters a submodule are gathered as a whole"
                if v
                else "only leaf_module counts"
            ),
            STAGE_3,
        ),
    ] = 0
    ignore_unused_parameters: Annotated[
        Bool, Says("a parameter that no rank used is never stepped", no_effect=True)
    ] = True
    mics_shard_size: Annotated[
        int,
        BeforeValidator(Integer(1, also=(-1,), note="ranks that share one copy of the model; -1 means off")),
        Says(_group, SHARDED),
    ] = -1
    zero_hpz_partition_size: Annotated[
        int,
        BeforeValidator(Integer(1, note="ranks that share a second copy; 1 means off")),
        Says(lambda v, c: f"a second copy a {v} ranks, for the backward" if v > 1 else "no second copy", STAGE_3),
    ] = 1
    leaf_module: LeafModuleSection = Field(default_factory=LeafModuleSection)
