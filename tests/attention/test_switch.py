"""``flashattention``: what is found, what is left, and that nothing else changes."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from shardwise import ConfigError
from shardwise.attention import switch_attention
from shardwise.attention.switch import ALREADY, MHA, PLAIN, shorten
from tests.attention.models import (
    KINDS,
    WIDTH,
    Block,
    Model,
    NanoGPT,
    Native,
    Paired,
    Section,
    SelfMHA,
    batch,
    built,
)
from tests.attention.tools import LIMIT, found_nothing, gradients, replaced, same

KIND = {"native": ALREADY, "mha": MHA, "nanogpt": PLAIN}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_stay_and_the_fast_kernel_runs(kind):
    model, x = built(kind).double(), batch().double()
    expected, state = gradients(model, x), {n: id(v) for n, v in model.state_dict(keep_vars=True).items()}
    switched = switch_attention(model, Section(), main=False)
    try:
        assert list(switched.modules) == [KIND.get(kind, PLAIN)] and not switched.left
        assert replaced(model) == switched.modules[KIND.get(kind, PLAIN)] and len(replaced(model)) == 2
        assert {n: id(v) for n, v in model.state_dict(keep_vars=True).items()} == state
        with profile(activities=[ProfilerActivity.CPU]) as events:
            same(gradients(model, x), expected, LIMIT.get(kind, 1e-12))
        ran = {e.key for e in events.key_averages()}
        # A mask with a gradient is for the math back-end.
        assert kind == "biased" or any("_scaled_dot_product_flash_attention" in name for name in ran)
        shorter = batch(rows=3).double()[:, :7]
        same(gradients(model, shorter), gradients(built(kind).double(), shorter), LIMIT.get(kind, 1e-12))
    finally:
        switched.undo()
    assert not replaced(model)


@pytest.mark.parametrize("kind", ["native", "mha", "nanogpt", "einsum"])
def test_a_copy_is_switched_and_its_own(kind):
    model, x = built(kind).double(), batch().double()
    expected = gradients(model, x)
    switched = switch_attention(model, Section(), main=False)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    switched.undo()
    assert not replaced(model) and len(replaced(twin)) == 2
    same(gradients(twin, x), expected, 1e-12)
    for module in twin.modules():
        forward = module.__dict__.get("forward")
        assert forward is None or forward.__self__ is module


class Spy(nn.Module):
    """Notes the order of the back-ends in which it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append([SDPBackend(b) for b in torch._C._get_sdp_priority_order()])
        q = self.qkv(x)[:, None]
        return F.scaled_dot_product_attention(q, q, q)[:, 0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_order_holds_in_a_recomputation(reentrant):
    spy, before = Spy(), torch._C._get_sdp_priority_order()
    switched = switch_attention(nn.ModuleList([spy]), Section(), main=False)
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    checkpoint(spy, x, use_reentrant=reentrant).sum().backward()
    switched.undo()
    wanted = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    assert [order[:4] for order in spy.seen] == [wanted, wanted]
    assert torch._C._get_sdp_priority_order() == before


# ---------------------------------------------------------------------------------------------- what is left


def test_nothing_to_switch():
    found_nothing(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), r"flashattention\.enable: found nothing to switch")
    assert not switch_attention(Native(), Section(enable=False), main=False).modules


class Keeps(NanoGPT):
    def forward(self, x):
        att = F.softmax(x @ x.transpose(1, 2), dim=-1)
        self.last = att
        return att @ x


class Returns(nn.Module):
    def forward(self, x):
        att = F.softmax(x @ x.transpose(1, 2), dim=-1)
        return att @ x, att


class Capped(nn.Module):
    def forward(self, x):
        return F.softmax(torch.tanh(x @ x.transpose(1, 2)), dim=-1) @ x


class Shown(nn.Module):
    """Fills with a value that does not hide."""

    def forward(self, x):
        scores = (x @ x.transpose(1, 2)).masked_fill(x[..., :1] > 0, 0.0)
        return F.softmax(scores, dim=-1) @ x


class Columns(nn.Module):
    """The softmax over the queries; as dimension 1, which is the last of two, but not of three."""

    def forward(self, x):
        return F.softmax(x @ x.transpose(-2, -1), dim=1) @ x


class Branches(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return F.softmax(x @ x.transpose(1, 2), dim=-1) @ x
        return x


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Keeps, r"keeps something in self\.last"),
        (Returns, "returns its weights"),
        (Capped, "does tanh to its scores"),
        (Shown, "filled with 0, which hides nothing"),
        (Columns, "softmax is taken over dimension 1"),
        (Branches, "cannot be traced"),
    ],
)
def test_what_cannot_be_switched_is_named_with_the_reason(kind, reason):
    found_nothing(nn.ModuleDict({"odd": kind()}), f"odd: .*{reason}")
    model = nn.ModuleDict({"odd": kind(), "even": NanoGPT()})
    switched = switch_attention(model, Section(), main=False)
    assert switched.modules == {PLAIN: ["even"]} and list(switched.left) == ["odd"]
    assert any("odd" in line for line in switched.lines)
    switched.undo()


class Elsewhere(nn.Module):
    """Has a call of the function that it does not make."""

    fast = False

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x) if self.fast else x


def test_a_call_that_is_never_made_is_said(caplog):
    model = Elsewhere()
    switched = switch_attention(model, Section(), main=True)
    with caplog.at_level(logging.WARNING, "shardwise"):
        model(batch())
        model(batch())
    switched.undo()
    assert [r.message for r in caplog.records] == [
        "flashattention: the model: its code has a call of scaled_dot_product_attention, but did not get there"
    ]


def test_a_replaced_forward_is_left():
    model = NanoGPT()
    model.forward = lambda x: x
    with pytest.raises(ConfigError, match="replaced already"):
        switch_attention(model, Section(), main=False)


class Wrong(NanoGPT):
    """Depends on being traced: the trace has another scale."""

    def forward(self, x):
        scale = 2.0 if isinstance(x, torch.Tensor) else 1.0
        return torch.softmax(self.c_proj(x) @ x.transpose(-2, -1) * scale, -1) @ x


def test_other_outputs_are_refused_and_all_is_as_it_was():
    model = nn.ModuleDict({"good": NanoGPT(), "bad": Wrong()})
    found_nothing(model, r"flashattention\.enable: bad gives another output .* of the largest output")


class PairedWrong(NanoGPT):
    def forward(self, pair):
        x, scale = pair["x"], pair["scale"]
        factor = 2.0 if isinstance(x, torch.Tensor) else 1.0
        return torch.softmax(self.c_proj(x) @ x.transpose(-2, -1) * scale * factor, -1) @ x


def test_what_cannot_be_called_is_checked_in_the_first_forward():
    x = batch()
    model = nn.ModuleDict({"pair": Paired(), "other": Native()})
    wanted = model["pair"]({"x": x, "scale": 0.5})
    switched = switch_attention(model, Section(), main=False)
    assert any("compared with their own code in the first forward: pair" in line for line in switched.lines)
    torch.testing.assert_close(model["pair"]({"x": x, "scale": 0.5}), wanted)
    switched.undo()
    model = nn.ModuleDict({"pair": PairedWrong()})
    switched = switch_attention(model, Section(), main=False)
    with pytest.raises(ConfigError, match="pair gives another output"):
        model["pair"]({"x": x, "scale": 0.5})
    switched.undo()


def test_a_call_that_turns_out_to_be_another_thing_runs_as_it_did_and_says_so(caplog):
    class Sometimes(NanoGPT):
        def forward(self, x, weights=False):
            att = torch.softmax(self.c_proj(x) @ x.transpose(-2, -1), -1)
            return (att @ x, att) if weights else att @ x

    model = Sometimes()
    switched = switch_attention(model, Section(), main=True)
    with caplog.at_level(logging.WARNING, "shardwise"):
        for _ in range(2):
            assert len(model(batch(), weights=True)) == 2
    switched.undo()
    assert [r.message for r in caplog.records] == [
        "flashattention: the model: it returns its weights, or uses them twice; such calls run as they did"
    ]


def test_it_says_what_it_did(caplog):
    model = nn.ModuleDict({"a": Model(NanoGPT), "b": Model(SelfMHA), "c": Native(), "d": Capped()})
    with caplog.at_level(logging.INFO, "shardwise"):
        switch_attention(model, Section(attention_dropout=0.1), main=True).undo()
    said = [r.message for r in caplog.records]
    assert said[:3] == [
        f"flashattention: 2 {PLAIN}: a.blocks.*.attn",
        f"flashattention: 2 {MHA}: b.blocks.*.attn.attn",
        f"flashattention: 1 {ALREADY}: c",
    ]
    assert "dropout is 0.1 in training" in said[3] and "d: it does tanh" in said[4]
    assert said[5].startswith("flashattention: 4 modules give what their own code gives")
    caplog.clear()
    switch_attention(model, Section(), main=False).undo()
    assert not caplog.records
    assert shorten([""]) == "the model itself" and shorten(["0.a", "1.a", "b2"]) == "*.a, b2"


# ---------------------------------------------------------------------------------------------- ways to build a model


def test_a_dry_run_is_switched_and_not_checked():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = Model(NanoGPT)
        switched = switch_attention(model, Section(), main=False)
        assert switched.modules == {PLAIN: ["blocks.0.attn", "blocks.1.attn"]}
        assert not any("own code gives" in line for line in switched.lines)
        assert model(torch.randn(2, 8, WIDTH)).shape == ()
    switched.undo()


def test_the_block_can_be_compiled():
    torch.manual_seed(0)
    block, x = Block(NanoGPT()), batch()
    wanted = block(x)
    switched = switch_attention(block, Section(), main=False)
    got = torch.compile(block, backend="eager")(x)
    torch._dynamo.reset()
    switched.undo()
    torch.testing.assert_close(got, wanted)
