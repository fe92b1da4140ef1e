"""The table of stages, and the bytes it promises."""

from __future__ import annotations

import pytest

from shardwise.sharding import POLICIES, model_state_bytes


def test_each_stage_shards_one_thing_more() -> None:
    assert [p.stage for p in POLICIES] == [0, 1, 2, 3]
    assert [p.shard_optimizer for p in POLICIES] == [False, True, True, True]
    assert [p.shard_grads for p in POLICIES] == [False, False, True, True]
    assert [p.reduce_each_micro_step for p in POLICIES] == [False, False, True, True]
    assert [p.release_params for p in POLICIES] == [False, False, False, True]


@pytest.mark.parametrize(
    ("stage", "gigabytes"),
    # The table of the ZeRO paper's figure 1: 7.5e9 parameters on 64 ranks, mixed precision.
    [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)],
)
def test_the_papers_table(stage: int, gigabytes: float) -> None:
    found = model_state_bytes(7_500_000_000, 64, stage, param_bytes=2, mixed=True)
    assert found / 1e9 == pytest.approx(gigabytes, abs=0.06)


@pytest.mark.parametrize("stage", range(4))
def test_one_rank_holds_everything(stage: int) -> None:
    assert model_state_bytes(1000, 1, stage, param_bytes=2, mixed=True) == 16_000
    assert model_state_bytes(1000, 1, stage, param_bytes=4, mixed=False) == 16_000
