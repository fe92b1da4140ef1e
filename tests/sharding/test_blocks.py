"""Which modules are the blocks of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.sharding.blocks import find_blocks, holds_blocks, names_of
from tests.sharding.models import Block


class Weights(nn.Module):
    """A block without modules in it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))


def holding(**children: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, child in children.items():
        setattr(model, name, child)
    return model


def blocks(n: int = 2) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(n))


SHARED = Block()
MODELS = {
    "a list": (holding(a=nn.Linear(2, 2), h=blocks(3)), ["h.0", "h.1", "h.2"]),
    "two lists": (holding(encoder=holding(h=blocks()), h=blocks()), ["encoder.h.0", "encoder.h.1", "h.0", "h.1"]),
    "a sequence is the model": (nn.Sequential(Block(), Block()), ["0", "1"]),
    "between others": (nn.Sequential(nn.Linear(8, 8), Block(), Block()), []),
    "a dict": (nn.ModuleDict({"x": Block(), "y": Block()}), ["x", "y"]),
    "members without parameters": (nn.Sequential(Block(), nn.ReLU(), Block()), ["0", "2"]),
    "of one": (holding(h=blocks(1)), []),
    "outermost": (holding(s=nn.ModuleList(holding(h=blocks()) for _ in range(2))), ["s.0", "s.1"]),
    "lists in a list": (
        nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])]),
        ["0.0", "0.1", "1.0", "1.1"],
    ),
    "of torch": (holding(e=nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2)), ["e.layers.0", "e.layers.1"]),
    "single layers": (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), []),
    "with weights of their own": (nn.ModuleList([Weights(), Weights()]), ["0", "1"]),
    "one twice": (nn.ModuleList([SHARED, SHARED, Block()]), ["0", "2"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_find_blocks(name: str) -> None:
    model, expected = MODELS[name]
    assert list(find_blocks(model)) == expected
    assert all(model.get_submodule(path) is block for path, block in find_blocks(model).items())


def test_a_list_of_layers_is_gathered_by_member_all_the_same() -> None:
    assert holds_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert not holds_blocks(nn.ModuleList([nn.Linear(2, 2), Block()])) and not holds_blocks(Block())


def test_names_of() -> None:
    assert names_of({"h.0": SHARED}) == "h.0" and names_of({"h.0": SHARED, "h.1": SHARED}) == "h.0 .. h.1"
