"""Every step of every layout gives the loss and the gradient norm of plain torch in one process on the global batch.

Tolerances. In float64 and float32 the only difference to plain torch is the order of sums: over the samples of a batch
(cut by ranks and micro-steps) and inside fused optimizer kernels. Each is wrong by a few units of rounding, 1.1e-16 or
6e-8 relative, and 20 steps of a smooth model multiply that by at most some hundreds; 1e-10 and 1e-5 leave room for it
and none for a wrong weight of a rank or micro-step (an error of 1e-2 and more), a missing clip or a late parameter.
Adam and its kin divide a gradient by its own size: an element within rounding of zero is stepped by rounding alone,
unless ``eps`` is far above that rounding. The chance of such an element in a drawn batch grows as 1 / ``eps``, so
``eps`` is 1e-5 in float64 and 1e-3 in float32; gradients here are 1e-3 to 1e-1. Plain torch differs from itself, with
the same batch in 3 or 8 parts, by 1e-13 and 1e-6 at most over 120 and more seeds (docs/log.md).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.equivalence.harness import Tolerance, check
from tests.equivalence.recipe import Layout, Recipe

RTOL = {"float64": Tolerance(1e-10), "float32": Tolerance(1e-5)}
EPS = {"float64": 1e-5, "float32": 1e-3}

# Stage 3 with everything released at once; and with small parameters resting whole, units kept for reuse, or both.
RELEASE_ALL = (("stage3_param_persistence_threshold", 0), ("stage3_max_reuse_distance", 0))
RELEASE_LESS = [
    (("stage3_param_persistence_threshold", 0),),
    (("stage3_param_persistence_threshold", 50), ("stage3_max_reuse_distance", 0)),
    (("stage3_param_persistence_threshold", 50),),
]


def optimizer_of(name: str, dtype: str) -> dict[str, Any]:
    if name == "AdamW":
        return {
            "optimizer": "AdamW",
            "params": (("lr", 0.01), ("weight_decay", 0.1), ("eps", EPS[dtype])),
        }
    return {"optimizer": "SGD", "params": (("lr", 0.01), ("momentum", 0.9), ("weight_decay", 0.01))}


# -- the matrix --


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_stage_and_accumulation_gives_the_losses_of_one_process(
    ranks: Any, world_size: int, dtype: str, optimizer: str
) -> None:
    layouts = [Layout(stage, gas) for stage in (0, 1, 2) for gas in (1, 4)]
    # The three milder ways to release take turns over the matrix.
    turn = world_size + 2 * (optimizer == "SGD") + (dtype == "float32")
    layouts += [Layout(3, gas, zero) for gas in (1, 4) for zero in (RELEASE_ALL, RELEASE_LESS[(turn + gas // 4) % 3])]
    cases = [
        (Recipe(dtype=dtype, tied=(i + world_size) % 2 == 0, **optimizer_of(optimizer, dtype)), layout)
        for i, layout in enumerate(layouts)
    ]
    results = check(ranks, world_size, cases, RTOL[dtype])
    norms, clip = results[0][0].norms, cases[0][0].clip
    assert min(norms) < 0.9 * clip, "no step was left unclipped"
    assert max(norms) > 1.1 * clip, "no step was clipped"


# -- keys that change how, not what --

ADAMW = optimizer_of("AdamW", "float64")
ALL = ("stage3_param_persistence_threshold", 0)


def zero(stage: int, *keys: tuple[str, Any], gas: int = 2, top: tuple[tuple[str, Any], ...] = ()) -> Layout:
    """A layout in which stage 3 releases everything."""
    return Layout(stage, gas, (ALL, *keys) if stage == 3 else keys, top)


def test_bucket_and_overlap_keys_do_not_change_the_losses(ranks: Any) -> None:
    layouts = [
        zero(stage, key)
        for key in (
            ("overlap_comm", True),
            ("overlap_comm", False),
            ("contiguous_gradients", False),
            ("reduce_scatter", False),
            ("allgather_partitions", False),
            ("reduce_bucket_size", 50),
            ("reduce_bucket_size", 400),  # exactly an attention matrix
            ("reduce_bucket_size", 10**9),
            ("allgather_bucket_size", 50),
            ("sub_group_size", 10),
        )
        for stage in (0, 1, 2, 3)
    ]
    check(ranks, 2, [(Recipe(steps=5, **ADAMW), layout) for layout in layouts], RTOL["float64"])


def test_keys_of_stage_3_and_combinations_do_not_change_the_losses(ranks: Any) -> None:
    rough = (
        ("overlap_comm", False),
        ("contiguous_gradients", False),
        ("reduce_scatter", False),
        ("allgather_partitions", False),
        ("reduce_bucket_size", 400),
        ("sub_group_size", 300),
    )
    layouts = [zero(stage, *rough) for stage in (0, 1, 2, 3)]
    layouts += [
        Layout(3, 2),  # the default threshold: every parameter of so small a model rests whole
        Layout(3, 2, (("stage3_param_persistence_threshold", 50), ("stage3_model_persistence_threshold", 100))),
        zero(3, ("stage3_prefetch_bucket_size", 0)),
        zero(3, ("stage3_prefetch_bucket_size", 4000)),
        zero(3, ("stage3_prefetch_bucket_size", 10**9), ("stage3_max_reuse_distance", 0)),
        zero(3, ("stage3_max_live_parameters", 0)),
        zero(3, ("stage3_max_live_parameters", 4000), ("stage3_max_reuse_distance", 4000)),
        zero(3, ("leaf_module", {"classes": ["TinyGPT"]})),
        zero(3, ("leaf_module", {"names": ["blocks"]})),
    ]
    cases = [(Recipe(steps=5, tied=i % 2 == 0, **ADAMW), layout) for i, layout in enumerate(layouts)]
    check(ranks, 2, cases, RTOL["float64"])


def test_hybrid_sharding_gives_the_losses_of_one_process(ranks: Any) -> None:
    layouts = [zero(stage, ("mics_shard_size", 2)) for stage in (1, 2, 3)]
    layouts += [zero(stage, ("mics_shard_size", 1)) for stage in (1, 2, 3)]
    layouts += [
        zero(stage, ("mics_shard_size", 2), ("reduce_scatter", False), ("allgather_partitions", False))
        for stage in (1, 2, 3)
    ]
    layouts += [
        zero(3, ("zero_hpz_partition_size", 2)),
        zero(3, ("zero_hpz_partition_size", 2), ("stage3_max_reuse_distance", 0)),
        zero(3, ("zero_hpz_partition_size", 4)),
        *(zero(stage) for stage in (0, 1, 2, 3)),
    ]
    check(ranks, 4, [(Recipe(steps=5, **ADAMW), layout) for layout in layouts], RTOL["float64"])


# -- tokens --


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ragged_accumulation_normalized_by_tokens_is_one_large_batch(ranks: Any, world_size: int) -> None:
    layouts = [Layout(stage, gas, (ALL,)) for stage in (0, 1, 2, 3) for gas in (1, 4)]
    recipe = Recipe(steps=8, ragged=True, **ADAMW)
    check(ranks, world_size, [(recipe, layout) for layout in layouts], RTOL["float64"])


# -- optimizers and schedules --


def test_every_way_to_give_an_optimizer_and_a_schedule(ranks: Any) -> None:
    sgd = optimizer_of("SGD", "float64")
    recipes = [
        Recipe(given=given, schedule=schedule, steps=8, **options)
        for given, schedule, options in (
            ("instance", "", ADAMW),
            ("callable", "", ADAMW),
            ("groups", "", ADAMW),
            ("groups", "", sgd),
            ("used", "", ADAMW),
            ("used", "", sgd),
            ("config", "callable", ADAMW),
            ("callable", "callable", ADAMW),
            ("groups", "callable", ADAMW),
            ("groups", "instance", ADAMW),
            ("instance", "instance", sgd),
        )
    ]
    cases = [(recipe, zero(stage)) for recipe in recipes for stage in (0, 1, 2, 3)]
    check(ranks, 2, cases, RTOL["float64"])


def test_every_elementwise_optimizer_of_torch_can_step_shards(ranks: Any) -> None:
    eps = ("eps", EPS["float64"])
    classes: dict[str, tuple[tuple[str, Any], ...]] = {
        "ASGD": (("lr", 0.05), ("t0", 3.0)),
        "Adadelta": (("lr", 1.0),),
        "Adagrad": (("lr", 0.02), ("lr_decay", 0.1), eps),
        "Adam": (("lr", 0.01), ("amsgrad", True), eps),
        "Adamax": (("lr", 0.01), ("weight_decay", 0.1), eps),
        "NAdam": (("lr", 0.01), ("decoupled_weight_decay", True), ("weight_decay", 0.1), eps),
        "RAdam": (("lr", 0.01), eps),
        # Its first step is 1 / sqrt(1 - alpha) = 10 times `lr`.
        "RMSprop": (("lr", 0.001), ("momentum", 0.5), ("centered", True), eps),
        "Rprop": (("lr", 0.01),),
        "SGD": (("lr", 0.05), ("momentum", 0.9), ("nesterov", True)),
    }
    # "Adam" in a configuration means AdamW.
    cases = [
        (Recipe(optimizer=name, params=params, steps=8, given="config" if name != "Adam" else "callable"), zero(stage))
        for name, params in classes.items()
        for stage in (1, 3)
    ]
    check(ranks, 2, cases, RTOL["float64"])


# -- 16 bits --
#
# Against mixed precision by hand that rounds where shardwise does (each micro-batch's gradient to 16 bits, the sum in
# fp32 because `communication_data_type` says so, and with one micro-step the mean to the 16 bits in which it is kept;
# halving for two ranks is exact): the first step agrees to fp32 rounding. Later, a master weight that differs in its
# last bit now and then falls on the other side of a rounding to 16 bits, and one weight moves by one unit in the last
# place (2^-8 for bf16, 2^-11 for fp16, relative). Nothing else may pile up over 20 steps: losses within one unit,
# norms, whose 16-bit summands are noisier, within four, weights within eight.
#
# Against the one-process run on the whole batch every gradient is rounded at other places, by up to half a unit each
# time: once a micro-batch, once for the division by three ranks, once or twice in the reduction. That is noise of both
# signs in each of 10,000 elements: the first norm is within one unit; after ten steps with weights that drifted apart
# losses are within four and norms within ten (bf16: 4 %). A wrong weight of a rank or a lost micro-batch changes norms
# by a twelfth at least, and by a quarter or more in most layouts.

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def sixteen_bits(dtype: str, optimizer: str = "AdamW", **more: Any) -> Recipe:
    return Recipe(dtype=dtype, scale_power=8 if dtype == "float16" else 0, **optimizer_of(optimizer, "float32"), **more)


def same_parts(world_size: int, layout: Layout) -> tuple[int, bool]:
    return world_size * layout.gas, layout.gas == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_with_fp32_reduction_round_where_mixed_precision_by_hand_does(ranks: Any, dtype: str) -> None:
    wire = (("communication_data_type", "fp32"),)
    cases = [
        (sixteen_bits(dtype, optimizer), Layout(stage, gas, (ALL,), wire))
        for stage in (0, 1, 2, 3)
        for gas, optimizer in ((1, "SGD"), (4, "AdamW"))
    ]
    unit = UNIT[dtype]
    tolerance = Tolerance(unit, norm=4 * unit, state=8 * unit, first=1e-5, floor=True)
    check(ranks, 2, cases, tolerance, parts=same_parts)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_follow_the_run_of_one_process(ranks: Any, dtype: str, world_size: int) -> None:
    unit = UNIT[dtype]
    cases = [(sixteen_bits(dtype, steps=10), Layout(stage, gas, (ALL,))) for stage in (0, 1, 2, 3) for gas in (1, 4)]
    wires = ("bf16", "fp32") if dtype == "bfloat16" else ("fp16",)
    cases += [
        (sixteen_bits(dtype, steps=10), Layout(stage, 4, (ALL,), (("communication_data_type", wire),)))
        for stage in (0, 1, 2, 3)
        for wire in wires
        if world_size == 3
    ]
    # Weights are not compared: biases start at zero and after ten steps are hardly larger than the noise.
    check(ranks, world_size, cases, Tolerance(4 * unit, norm=10 * unit, state=1.0, first=unit, floor=True))


def test_an_fp16_overflow_on_one_rank_skips_the_step_on_all(ranks: Any) -> None:
    rules = [
        (("hysteresis", 1), ("loss_scale_window", 3)),
        (("hysteresis", 2), ("loss_scale_window", 1000)),
    ]
    wire = (("communication_data_type", "fp32"),)
    cases = [
        (
            sixteen_bits("float16", steps=18, overflows=(3, 4, 9), scale_rule=rule, schedule="callable"),
            Layout(stage, 4, (ALL,), wire),
        )
        for rule in rules
        for stage in (0, 1, 2, 3)
    ]
    unit = UNIT["float16"]
    runs = check(
        ranks, 2, cases, Tolerance(unit, norm=4 * unit, state=8 * unit, first=1e-5, floor=True), parts=same_parts
    )
    first = runs[0][0]
    assert first.skipped == 3
    assert first.scales[3:6] == [256.0, 128.0, 64.0], "one halving for each overflow without hysteresis"
    assert first.scales[8:11] == [64.0, 128.0, 64.0], "doubled after three clean steps, halved again by the overflow"
    assert runs[4][0].scales[3:6] == [256.0, 256.0, 128.0], "hysteresis 2 forgives the first overflow"
