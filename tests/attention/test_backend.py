"""The one call, against the softmax written out; and which masks are proved to be causal."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.attention import switch_attention
from shardwise.attention.backend import Unsuitable, attend
from tests.attention.models import Built, NanoGPT, Section, batch

L, S, D, E = 4, 6, 8, 5
LOWER = torch.ones(L, S, dtype=torch.bool).tril()
SHAPES = {
    "matrix": ((), (), ()),
    "batch": ((2,), (2,), (2,)),
    "heads": ((2, 3), (2, 3), (2, 3)),
    "one key head": ((2, 3), (2, 1), (1, 1)),
    "groups": ((2, 1, 3), (2, 4, 1), (2, 4, 3)),
}
STEPS = {
    "none": [],
    "scaled": [("scale", 0.5), ("divide", math.sqrt(D))],
    "bias before the scale": [("add", torch.randn(L, S).double()), ("scale", 0.5), ("add", 3.0)],
    "less": [("subtract", torch.rand(S).double())],
    "hidden": [("scale", 0.3), ("fill", ~LOWER, -math.inf)],
    "hidden by much": [("keep", LOWER, -1e9), ("scale", 0.25)],
    "both": [("add", torch.randn(L, 1).double()), ("fill", ~LOWER, -math.inf), ("keep", LOWER[:1] | LOWER, -1e4)],
    "causal": [("scale", 0.5), ("causal", ("keep", LOWER, -math.inf))],
    "tempered": [("scale", torch.tensor([[0.7]]).double())],
}


def written_out(q, k_t, v, steps):
    scores = q @ k_t
    for step in steps:
        if step[0] == "causal":
            step = step[1]
        match step:
            case ("scale", s):
                scores = scores * s
            case ("divide", s):
                scores = scores / s
            case ("add", b):
                scores = scores + b
            case ("subtract", b):
                scores = scores - b
            case ("fill", mask, value):
                scores = scores.masked_fill(mask, value)
            case ("keep", mask, value):
                scores = scores.masked_fill(~mask, value)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", STEPS)
def test_output_and_gradients(shape, steps):
    a, b, c = SHAPES[shape]
    inputs = [torch.randn(*s).double().requires_grad_() for s in ((*a, L, D), (*b, D, S), (*c, S, E))]
    wanted = written_out(*inputs, STEPS[steps])
    got = attend(*inputs, STEPS[steps], 0.0, -1)
    torch.testing.assert_close(got, wanted)
    grads = [torch.autograd.grad(out.square().sum(), inputs) for out in (got, wanted)]
    torch.testing.assert_close(*grads)


def test_a_query_that_sees_nothing_sees_everything_alike_if_the_value_is_finite():
    q, k_t, v = torch.randn(2, 2, L, D), torch.randn(2, 2, D, S), torch.randn(2, 2, S, E)
    steps = [("fill", torch.ones(L, S, dtype=torch.bool), -1e9)]
    torch.testing.assert_close(attend(q, k_t, v, steps, 0.0, -1), v.mean(-2, keepdim=True).expand(2, 2, L, E))


@pytest.mark.parametrize(
    ("steps", "dim", "reason"),
    [
        ([("fill", LOWER, 0.0)], -1, "hides nothing"),
        ([("scale", torch.ones(S))], -1, "key by key"),
        ([], 1, "dimension 1"),
    ],
)
def test_what_is_no_attention(steps, dim, reason):
    with pytest.raises(Unsuitable, match=reason):
        attend(torch.randn(2, 2, L, D), torch.randn(2, 2, D, S), torch.randn(2, 2, S, E), steps, 0.0, dim)


# ---------------------------------------------------------------------------------------------- causal masks


class Additive(NanoGPT):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hides", torch.full((32, 32), -torch.inf).triu(1))

    def forward(self, x):
        T = x.shape[1]
        return F.softmax(self.c_proj(x) @ x.mT + self.hides[:T, :T], -1) @ x


class Inverted(NanoGPT):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(32, 32, dtype=torch.bool).tril())

    def forward(self, x):
        T = x.shape[1]
        scores = self.c_proj(x) @ x.mT
        return F.softmax(scores.masked_fill(~self.seen[None, :T, :T], -1e9), -1) @ x


class Where(NanoGPT):
    def forward(self, x):
        T = x.shape[1]
        scores = self.c_proj(x) @ x.mT
        return F.softmax(torch.where(self.bias[0, 0, :T, :T] > 0, scores, -1e9), -1) @ x


class Shifted(Inverted):
    """A corner that does not begin at the first key."""

    def forward(self, x):
        T = x.shape[1]
        scores = self.c_proj(x) @ x.mT
        return F.softmax(scores.masked_fill(~self.seen[1 : T + 1, :T], -1e9), -1) @ x


class Calls(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.masks: list[tuple[bool, bool]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.masks.append((kwargs["is_causal"], kwargs["attn_mask"] is not None))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("make", "causal"),
    [
        (NanoGPT, True),
        (Built, True),
        (Additive, True),
        (Inverted, True),
        (lambda: NanoGPT(window=3), False),
        (Shifted, False),
        (Where, False),  # a comparison that is not looked through: the mask is handed over
    ],
)
def test_only_a_mask_that_is_proved_to_be_causal_is_left_out(make, causal):
    torch.manual_seed(0)
    module: nn.Module = make().double()
    x = batch().double()
    wanted = module(x)
    switched = switch_attention(module, Section(), main=False)
    with Calls() as calls:
        torch.testing.assert_close(module(x), wanted, rtol=1e-6, atol=1e-6)
    assert calls.masks == [(causal, not causal)]
    switched.undo()
