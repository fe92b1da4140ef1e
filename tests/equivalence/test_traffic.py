"""Bytes that a rank sends in a step, counted where they are sent, against the ZeRO paper's volumes.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 7: 2 x parameters
for plain data parallelism and stages 1 and 2, 3 x for stage 3, each times (N - 1) / N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

import shardwise
from tests.equivalence.model import GLOBAL_BATCH, TinyGPT, batch

EVERYTHING = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
}


@dataclass
class Sent:
    """What one step sent on this rank: elements by axis, bytes of small messages; and the units' sizes."""

    elements: dict[str, float]
    small: int
    parameters: int
    units: list[int]
    slots: list[list[int]]

    @property
    def padded(self) -> int:
        return sum(self.units)

    @property
    def total(self) -> float:
        return sum(self.elements.values())


def one_step(cases: list[tuple[int, int, dict[str, Any]]]) -> list[Sent]:
    """The second window of each ``(stage, gas, more of zero_optimization)``."""
    return [_one_step(*case) for case in cases]


def _one_step(stage: int, gas: int, zero: dict[str, Any]) -> Sent:
    model = TinyGPT(width=64, vocabulary=101, blocks=3)
    engine, *_ = shardwise.initialize(
        model=model,
        config={
            "train_batch_size": GLOBAL_BATCH,
            "gradient_accumulation_steps": gas,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": stage, **EVERYTHING, **zero},
        },
    )
    try:
        before: dict[tuple[str, str], int] = {}
        for step in range(2):  # the first agrees on the order of reductions, once
            if step == 1:
                before = _counters(engine)
            tokens, targets = (t.chunk(dist.get_world_size() * gas) for t in batch(0, step))
            for micro in range(gas):
                engine.backward(engine(tokens[micro], targets[micro]))
                engine.step()
        after = _counters(engine)
        spent = {key: after[key] - before.get(key, 0) for key in after}
        elements: dict[str, float] = {}
        for (axis, op), sent in spent.items():
            if op != "small":
                elements[axis] = elements.get(axis, 0.0) + sent / 4
        units = engine._sharded.units
        return Sent(
            {axis: n for axis, n in elements.items() if n},
            sum(sent for (_, op), sent in spent.items() if op == "small"),
            sum(p.numel() for p in model.parameters()),
            [u.numel for u in units],
            [[s.numel for s in u.slots] for u in units],
        )
    finally:
        engine.destroy()


def _counters(engine: Any) -> dict[tuple[str, str], int]:
    return {(axis.name, op): t.bytes_sent for axis in engine.mesh.axes() for op, t in axis.traffic.items()}


def padding(sent: Sent, world_size: int) -> int:
    """Elements that are sent besides the parameters, computed anew: 64 bytes for each parameter to begin on, then the
    unit's length a multiple of 64 bytes for each rank."""
    total = 0
    for sizes in sent.slots:
        aligned = sum(-(-n // 16) * 16 for n in sizes)
        total += -(-aligned // (16 * world_size)) * 16 * world_size - sum(sizes)
    return total


def assert_sends(results: list[Sent], world_size: int, factor: int, what: str) -> None:
    share = (world_size - 1) / world_size
    for sent in results:
        assert sent.parameters > 130_000
        assert sent.padded - sent.parameters == padding(sent, world_size), what
        assert sent.total == factor * sent.padded * share, what
        formula = factor * sent.parameters * share
        assert sent.total <= 1.01 * formula + factor * padding(sent, world_size) * share, what
        # The norm, the flags of used parameters and the like: eight bytes a parameter tensor, not an element.
        assert sent.small <= 0.01 * 4 * formula, what


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_sends_twice_the_parameters_and_three_times_at_stage_3(ranks: Any, world_size: int) -> None:
    cases: list[tuple[int, int, dict[str, Any]]] = [(stage, 1, {}) for stage in (0, 1, 2, 3)]
    cases += [
        (3, 1, {"stage3_prefetch_bucket_size": 0}),
        (2, 1, {"reduce_bucket_size": 5000, "allgather_bucket_size": 5000}),
        (3, 1, {"reduce_bucket_size": 5000}),
    ]
    by_rank = ranks(world_size).run(one_step, cases)
    for i, (stage, gas, zero) in enumerate(cases):
        results = [sent[i] for sent in by_rank]
        assert_sends(results, world_size, 3 if stage == 3 else 2, f"stage {stage}, gas {gas}, {zero}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_accumulation_costs_what_the_policy_table_says(ranks: Any, world_size: int) -> None:
    """Stages 0 and 1 reduce once a window, 2 and 3 in every micro-step; stage 3 also gathers twice in each."""
    factors = {0: 2, 1: 2, 2: 4 + 1, 3: 4 * 3}
    by_rank = ranks(world_size).run(one_step, [(stage, 4, {}) for stage in factors])
    for i, (stage, factor) in enumerate(factors.items()):
        assert_sends([sent[i] for sent in by_rank], world_size, factor, f"stage {stage}, gas 4")


def test_keeping_units_for_the_backward_saves_gathers(ranks: Any) -> None:
    by_rank = ranks(2).run(one_step, [(3, 1, {}), (3, 1, {"stage3_max_reuse_distance": 10**9})])
    for released, kept in by_rank:
        # From the second iteration on the order is known, and every unit stays from forward to backward.
        assert kept.total == pytest.approx(released.total * 2 / 3, rel=0.01)


def test_hybrid_sharding_sends_most_inside_the_group(ranks: Any) -> None:
    cases = [(3, 1, {"mics_shard_size": 2}), (1, 1, {"mics_shard_size": 2}), (3, 1, {"zero_hpz_partition_size": 2})]
    for mics3, mics1, hpz in ranks(4).run(one_step, cases):
        n = mics3.padded
        # Two gathers and one reduction in the group of two; then each rank's half is all-reduced with its one replica.
        assert mics3.elements == {"shard": 3 * n / 2, "replicate": 2 * (n / 2) / 2}
        n = mics1.padded
        assert mics1.elements == {"shard": 2 * n / 2, "replicate": 2 * (n / 2) / 2}
        n = hpz.padded
        # One gather and one reduction over all four; the backward's gather stays in the group of two.
        assert hpz.elements == {"world": 2 * n * 3 / 4, "secondary": n / 2}
