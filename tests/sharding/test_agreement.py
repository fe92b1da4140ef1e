"""The gradient norm: computed in float64 rows, each part counted once."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.sharding.agreement import ROW, is_finite, sum_of_squares


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, ROW - 1, ROW, ROW + 1, 3 * ROW + 7])
def test_sum_of_squares(numel: int, dtype: torch.dtype) -> None:
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = sum_of_squares(flat)
    assert found.dtype is torch.float64 and found.dim() == 0
    # Each row is a float32 sum of ROW squares (float64 for float64): its rounding errors add up to about
    # sqrt(ROW) * 6e-8 = 5e-6 of it.
    rel = 1e-13 if dtype is torch.float64 else 1e-5
    assert found.item() == pytest.approx(flat.double().square().sum().item(), rel=rel)


def test_many_small_numbers_do_not_stop_counting() -> None:
    flat = torch.full((20_000_000,), 1.0)
    assert sum_of_squares(flat).item() == pytest.approx(2e7, rel=1e-7)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, ROW, -1])
def test_one_value_that_is_not_finite_is_seen(value: float, where: int) -> None:
    flat = torch.ones(2 * ROW + 5)
    flat[where] = value
    assert not is_finite(sum_of_squares(flat))
    assert is_finite(sum_of_squares(torch.ones(3)))
