"""What the tests of ``flashattention`` share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import ConfigError
from shardwise.attention import switch_attention
from tests.attention.models import Section

# Everything runs in float64. What the modules compute themselves in float32 (the softmax of "built") is good to 1e-7.
LIMIT = {"built": 1e-6}


def gradients(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(found: tuple, expected: tuple, limit: float) -> None:
    assert found[1].keys() == expected[1].keys()
    for got, want in [(found[0], expected[0]), *((found[1][n], g) for n, g in expected[1].items())]:
        assert float((got - want).abs().max()) <= limit * max(float(want.abs().max()), 1e-3)


def replaced(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if "forward" in m.__dict__]


def found_nothing(model: nn.Module, match: str, **keys: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        switch_attention(model, Section(**keys), main=False)
    assert not replaced(model)


class Watched(torch.overrides.TorchFunctionMode):
    """Notes the probabilities with which attention drops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.seen.append(round((kwargs or {}).get("dropout_p", args[4] if len(args) > 4 else 0.0), 6))
        if func is F.multi_head_attention_forward:  # what it calls inside is not seen here
            self.seen.append(args[10] if kwargs["training"] else 0.0)
        return func(*args, **(kwargs or {}))
