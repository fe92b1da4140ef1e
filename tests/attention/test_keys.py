"""``attention_dropout`` and ``cross_attention``."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from shardwise.attention import switch_attention
from tests.attention.models import WIDTH, Built, Einsum, Model, NanoGPT, Native, Scaled, Section, SelfMHA, batch
from tests.attention.tools import Watched, found_nothing

# ---------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("make", [NanoGPT, Native, SelfMHA, Built])
@pytest.mark.parametrize(("setting", "wanted"), [(None, 0.25), (True, 0.25), (False, 0.0), (0.1, 0.1)])
def test_dropout_is_what_the_key_says_and_in_training_only(make, setting, wanted):
    model = make(0.25)
    with Watched() as watched:
        switched = switch_attention(model, Section(attention_dropout=setting), main=False)
        watched.seen.clear()
        model.train()(batch())
        model.eval()(batch())
        model.train()(batch())
    # A mode that was entered first sees the call last, as it reaches the kernel.
    assert watched.seen == [wanted, 0.0, wanted]
    switched.undo()
    with Watched() as watched:
        model(batch())
    assert watched.seen in ([0.25], [])  # its own code again


def test_dropout_is_drawn_anew_each_time_and_scaled():
    model = NanoGPT()
    switched = switch_attention(model, Section(attention_dropout=0.5), main=False)
    x = batch(rows=256)
    a, b = model(x), model(x)
    assert not torch.equal(a, b)
    model.eval()
    # The mean of 256 x 12 x 16 values with a deviation below 1 is good to 0.02.
    assert abs(float((a - model(x)).detach().mean())) < 0.02
    switched.undo()


def test_own_dropout_is_required_where_it_is_asked_for():
    found_nothing(Model(Einsum), r"attention_dropout: true asks .* blocks\.0\.attn has none", attention_dropout=True)

    class Without(Native):
        def __init__(self):
            super().__init__()
            self.dropout = None

    found_nothing(Without(), "the model itself|has none", attention_dropout=True)


# ---------------------------------------------------------------------------------------------- cross-attention


class Crossed(nn.Module):
    """Queries of x, keys and values of other, in one module; and a decoder layer of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()
        self.cross_attn = Scaled()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.layer(self.scaled(x, other, other) + self.cross_attn(x, other, other), other)


@pytest.mark.parametrize("cross", [False, True])
def test_cross_attention_is_switched_as_the_key_says(cross):
    torch.manual_seed(0)
    model, x, other = Crossed().double(), batch().double(), batch(seed=6).double()[:, :5]
    wanted = model(x, other)
    switched = switch_attention(model, Section(cross_attention=cross), main=False)
    with profile(activities=[ProfilerActivity.CPU]) as events:
        torch.testing.assert_close(model(x, other), wanted, rtol=1e-12, atol=1e-12)
    counts = {e.key: e.count for e in events.key_averages()}
    # Both of the layer call the function in any case; of the modules that write it out, one has the name, one the call.
    assert counts["aten::scaled_dot_product_attention"] == (4 if cross else 2)
    names = {"scaled", "cross_attn", "layer.self_attn", "layer.multihead_attn"}
    assert {n for found in switched.modules.values() for n in found} == (names if cross else names - set(switched.left))
    assert set(switched.left) == (set() if cross else {"cross_attn", "layer.multihead_attn"})
    switched.undo()


def test_only_cross_attention_is_nothing():
    model = nn.ModuleDict({"cross_attn": SelfMHA().attn})
    found_nothing(model, r"cross_attn: cross-attention; flashattention\.cross_attention is false")
