"""Products of matrices that are written as ``einsum``, brought into the order of ``matmul``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True)
class Product:
    """``left @ right`` after permutations; ``out`` permutes the result into the order that was asked for."""

    left: tuple[fx.Node, tuple[int, ...] | None]
    right: tuple[fx.Node, tuple[int, ...] | None]
    out: tuple[int, ...] | None = None


def parse(node: fx.Node) -> tuple[list[str], str, list[Any]] | None:
    """The letters of both operands and of the result, and the operands; None if it is not of two."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation or "." in equation:
        return None
    left, out = equation.replace(" ", "").split("->")
    terms = left.split(",")
    if len(terms) != 2 or any(len(set(t)) != len(t) for t in (*terms, out)):
        return None
    return terms, out, operands


def scores(node: fx.Node) -> Product | None:
    """Queries times keys: ``...id, ...jd -> ...ij``, with the letters of each operand in any order.

    Either operand may be the queries: those are the one with the result's last letter but one.
    """
    parsed = parse(node)
    if parsed is None or len(parsed[1]) < 2:
        return None
    (a, b), out, operands = parsed
    *batch, i, j = list(out)
    if i in b:
        a, b, operands = b, a, operands[::-1]
    summed = set(a) - set(out)
    if len(summed) != 1 or set(a) != {*batch, i, *summed} or set(b) != {*batch, j, *summed}:
        return None
    d = summed.pop()
    return Product(
        (operands[0], tuple(a.index(x) for x in (*batch, i, d))),
        (operands[1], tuple(b.index(x) for x in (*batch, d, j))),
    )


def weighted(node: fx.Node, weights: fx.Node) -> Product | None:
    """Weights times values: ``...ij, ...je -> ...ie``, with the letters of values and result in any order."""
    parsed = parse(node)
    if parsed is None:
        return None
    (a, b), out, operands = parsed
    if operands[1] is weights:
        a, b, operands = b, a, operands[::-1]
    if operands[0] is not weights or len(a) < 2:
        return None
    *batch, i, j = list(a)
    extra = set(b) - set(a)
    if len(extra) != 1 or set(b) != {*batch, j, *extra} or set(out) != {*batch, i, *extra}:
        return None
    e = extra.pop()
    made = (*batch, i, e)
    return Product(
        (weights, None), (operands[1], tuple(b.index(x) for x in (*batch, j, e))), tuple(made.index(x) for x in out)
    )
