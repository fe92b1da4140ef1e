"""``nn.MultiheadAttention`` in all its ways, and inside torch's own layers."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch import nn

from shardwise.attention import switch_attention
from shardwise.attention.switch import MHA
from tests.attention.models import Section

BATCH, LENGTH, KEYS = 2, 6, 5
WAYS = [
    dict(zip(("batch_first", "add_bias_kv", "add_zero_attn", "bias"), w, strict=True))
    for w in itertools.product((False, True), repeat=4)
] + [{"kdim": 12, "vdim": 20}, {"kdim": 12, "batch_first": True}]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(f"{k}={v}" for k, v in way.items()))
def test_output_and_gradients_are_those_that_come_with_weights(way):
    """The original with need_weights=True writes the softmax out; in float64 both agree to rounding."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, dtype=torch.float64, **way)
    first = way.get("batch_first", False)

    def made(length, width):
        sizes = (BATCH, length) if first else (length, BATCH)
        return torch.randn(*sizes, width, dtype=torch.float64)

    query, key, value = made(LENGTH, 16), made(KEYS, module.kdim), made(KEYS, module.vdim)
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[0, -1] = True
    hidden = torch.rand(LENGTH, KEYS) > 0.7
    hidden[:, 0] = False
    bias = torch.randn(BATCH * 4, LENGTH, KEYS, dtype=torch.float64)
    low = torch.zeros(BATCH, KEYS, dtype=torch.float64).masked_fill(padding, -torch.inf)
    calls = [{}, {"key_padding_mask": padding}, {"attn_mask": hidden}, {"attn_mask": bias, "key_padding_mask": low}]
    expected = [results(module, (query, key, value), {**c, "need_weights": True}) for c in calls]
    switched = switch_attention(module, Section(cross_attention=True), main=False)
    assert switched.modules == {MHA: [""]} and switched.largest < 1e-12
    for call, wanted in zip(calls, expected, strict=True):
        found = results(module, (query, key, value), {**call, "need_weights": False})
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    switched.undo()
    assert "forward" not in module.__dict__


def results(module, args, kwargs):
    module.zero_grad()
    out = module(*args, **kwargs)[0]
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in module.parameters())]


def test_weights_are_returned_where_they_are_asked_for_and_it_is_said(caplog):
    module, x = nn.MultiheadAttention(16, 4), torch.randn(LENGTH, BATCH, 16)
    wanted = module(x, x, x, average_attn_weights=False)
    switched = switch_attention(module, Section(), main=True)
    with caplog.at_level(logging.WARNING, "shardwise"):
        for _ in range(2):
            found = module(x, x, x, average_attn_weights=False)
    switched.undo()
    assert found[1].shape == (BATCH, 4, LENGTH, LENGTH)
    torch.testing.assert_close(found, wanted)
    assert len(caplog.records) == 1 and "need_weights=True" in caplog.text


def test_the_causal_hint_reaches_the_kernel_without_a_mask():
    module, x = nn.MultiheadAttention(16, 4), torch.randn(LENGTH, BATCH, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    wanted = module(x, x, x, attn_mask=mask)[0]
    switched = switch_attention(module, Section(), main=False)
    torch.testing.assert_close(module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0], wanted)
    switched.undo()


@pytest.mark.parametrize("norm_first", [False, True])
def test_layers_of_torch_train_and_evaluate_as_before(norm_first):
    torch.manual_seed(0)
    keys = {"batch_first": True, "norm_first": norm_first, "dropout": 0.0}
    model = nn.Transformer(16, 2, 2, 2, 32, **keys).double()
    source, target = torch.randn(2, 5, 16).double(), torch.randn(2, 4, 16).double()
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    def run():
        model.train().zero_grad()
        out = model(source, target, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding)
        out.square().mean().backward()
        with torch.no_grad():
            evaluated = model.eval()(source, target, tgt_mask=mask, src_key_padding_mask=padding)
        return [out.detach(), evaluated, *(p.grad.clone() for p in model.parameters())]

    expected = run()
    for cross in (False, True):
        switched = switch_attention(model, Section(cross_attention=cross), main=False)
        assert len(switched.modules[MHA]) == (6 if cross else 4)
        torch.testing.assert_close(run(), expected, rtol=1e-11, atol=1e-12)
        switched.undo()
