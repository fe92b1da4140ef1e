"""Masks that are proved to hide exactly the keys after each query, so that no mask has to be handed over.

The flash kernel of a GPU takes no mask, but knows this one. What is proved holds for every length: the mask is a
corner of a stored square table, which is read, or is built by ``tril`` or ``triu`` of ones.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shardwise import _torch
from shardwise.attention.backend import HIDES
from shardwise.attention.trace import Traced

SAME: set[Any] = {"bool", "to", "float", "type", "type_as", "contiguous"}
NOT: set[Any] = {operator.invert, torch.logical_not, "logical_not", torch.bitwise_not, "bitwise_not"}
EQUAL: set[Any] = {operator.eq, torch.eq, "eq"}
UNEQUAL: set[Any] = {operator.ne, torch.ne, "ne"}
# Of a table that a length builds, this corner stands for all.
SAMPLE = 16


def is_causal(traced: Traced, step: tuple[Any, ...]) -> bool:
    """Whether a step on the scores hides exactly the keys after each query, if there are as many of both.

    Args:
        traced: the graph and its module.
        step: ``("fill", mask, value)``, ``("keep", mask, value)`` or ``("add", bias)`` with nodes of the graph.
    """
    table = _table(traced, step[1])
    if table is None or table.dim() < 2 or table.shape[-1] != table.shape[-2] or table.numel() != table.shape[-1] ** 2:
        return False
    table = table.reshape(table.shape[-2:])
    lower = torch.ones_like(table, dtype=torch.bool).tril()
    if step[0] == "add":
        return table.is_floating_point() and torch.equal(table == 0, lower) and bool((table[~lower] <= HIDES).all())
    shown = table.bool() if step[0] == "keep" else ~table.bool()
    return torch.equal(shown, lower)


def _table(traced: Traced, node: Any) -> torch.Tensor | None:
    """The whole table of which the node is a corner that starts at the first query and key; None if unknown."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "get_attr":
        return _stored(traced, str(node.target))
    if node.op == "placeholder":
        return traced.constants.get(node.name)  # whole, because the trace holds for these lengths only
    first = node.args[0] if node.args else None
    if node.target in {torch.tril, torch.triu, "tril", "triu"} and isinstance(first, fx.Node):
        return _triangle(node, first)
    table = _table(traced, first) if node.op in {"call_function", "call_method"} else None
    if table is None or table.dim() < 2:
        return None
    other: Any = node.args[1] if len(node.args) > 1 else None
    if node.target in SAME:
        return table
    if node.target in {"unsqueeze", torch.unsqueeze}:
        fits = isinstance(other, int) and 0 <= other <= table.dim() - 2
        return table.unsqueeze(other) if fits else None
    if node.target in {"view", "reshape"}:
        return table.reshape(1, 1, *table.shape[-2:]) if _only_leading(node) else None
    if node.target is operator.getitem:
        return _corner(table, other)
    if node.target in NOT:
        bitwise = node.target in {operator.invert, torch.bitwise_not, "bitwise_not"}
        return None if bitwise and table.dtype != torch.bool else ~table.bool()
    if isinstance(other, int | float):
        equal = torch.eq(table, other)
        return equal if node.target in EQUAL else (~equal if node.target in UNEQUAL else None)
    return None


def _stored(traced: Traced, target: str) -> torch.Tensor | None:
    *path, name = target.split(".")
    owner = traced.root.get_submodule(".".join(path))
    buffer = owner._buffers.get(name)
    if buffer is None or _torch.is_fake(buffer) or buffer.is_meta:
        return None
    return buffer


def _triangle(node: fx.Node, first: fx.Node) -> torch.Tensor | None:
    """``tril(ones(n, n))`` or ``triu(ones(n, n), 1)``."""
    if first.target is not torch.ones:
        return None
    sizes: Any = first.args[0] if len(first.args) == 1 and isinstance(first.args[0], list | tuple) else first.args
    diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
    if not isinstance(sizes, list | tuple) or len(sizes) < 2 or not isinstance(diagonal, int):
        return None
    if any(s != 1 for s in sizes[:-2]):
        return None
    ones = torch.ones(SAMPLE, SAMPLE, dtype=torch.bool)
    made: torch.Tensor = ones.tril(diagonal) if "tril" in str(node.target) else ones.triu(diagonal)
    return made


def _corner(table: torch.Tensor, index: Any) -> torch.Tensor | None:
    """What an index takes, if every slice of it starts at the first; slices are left whole."""
    whole: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        if isinstance(item, slice):
            if item.start not in (None, 0) or item.step not in (None, 1):
                return None
            item = slice(None)
        elif item is not None and item is not Ellipsis and not (isinstance(item, int) and item == 0):
            return None
        whole.append(item)
    corner: torch.Tensor = table[tuple(whole)]
    return corner


def _only_leading(node: fx.Node) -> bool:
    """Whether a change of shape only adds dimensions of one in front: ``view(1, 1, T, T)``."""
    sizes = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        sizes = tuple(sizes[0])
    return len(sizes) > 2 and all(s in (1, -1) for s in sizes[:-2])
