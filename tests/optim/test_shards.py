"""Gradients on their way to the optimizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.optim.shards import Shards, Window
from shardwise.sharding import Piece
from shardwise.sharding.unit import Slot


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_are_scaled_by_the_factor_itself(dtype: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.ones(1000, dtype=dtype))
    piece = Piece(Slot("w", param, param.shape, 0), 0, 0, 1000)
    unit: Any = SimpleNamespace(master=None, shard=param.detach().clone(), pieces=lambda: [piece])
    model: Any = SimpleNamespace(units=[unit])
    grad: Any = SimpleNamespace(total=torch.randn(1000).to(dtype))
    factor = torch.tensor(0.3712345)
    expected = (grad.total.float() * factor).to(dtype)
    assert not torch.equal(expected, grad.total * factor.to(dtype))
    shards = Shards(model)
    shards.bind([unit], Window({id(unit): grad}, factor, {id(param): True}))
    ((_, tensor),) = shards.pieces[id(unit)]
    assert tensor.grad is not None and tensor.grad.dtype == dtype
    assert torch.equal(tensor.grad, expected)
