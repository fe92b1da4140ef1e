"""Finds ``softmax(q @ k) @ v`` in a graph and puts one call of :func:`attend` in its place."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from shardwise.attention import einsum
from shardwise.attention.backend import HIDES, Unsuitable, attend
from shardwise.attention.causal import is_causal
from shardwise.attention.einsum import Product
from shardwise.attention.trace import Traced

Step = tuple[Any, ...]

MATMUL: set[Any] = {torch.matmul, torch.bmm, operator.matmul, "matmul", "bmm", "__matmul__"}
ADD: set[Any] = {operator.add, operator.iadd, torch.add, "add", "add_"}
SUBTRACT: set[Any] = {operator.sub, operator.isub, torch.sub, "sub", "sub_"}
MULTIPLY: set[Any] = {operator.mul, operator.imul, torch.mul, "mul", "mul_"}
DIVIDE: set[Any] = {operator.truediv, operator.itruediv, torch.div, "div", "div_"}
FILL: set[Any] = {torch.masked_fill, "masked_fill", "masked_fill_"}
SOFTMAX: set[Any] = {F.softmax, torch.softmax, "softmax"}
# Of these only the dtype changes, or nothing; the kernels take the softmax in at least float32 by themselves.
CAST: set[Any] = {"float", "to", "type", "type_as", "contiguous"}


@dataclass
class Match:
    """An attention in a graph: what goes in, and whether the module's own code drops weights."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    has_dropout: bool


def rewrite(traced: Traced, dropout: float | None) -> list[Match]:
    """Replace every attention of a graph.

    Args:
        traced: its graph is changed in place.
        dropout: the probability in place of the module's own; None keeps that.

    Returns:
        What was found; empty if there is no attention.

    Raises:
        Unsuitable: there is one that is not computed by ``scaled_dot_product_attention``, with the reason.
    """
    nodes = list(traced.graph.nodes)
    softmaxes = [n for n in nodes if _target(n) in SOFTMAX or _is_child(traced.root, n, nn.Softmax)]
    return [m for n in softmaxes if (m := _replace(traced, n, dropout)) is not None]


def _replace(traced: Traced, softmax: fx.Node, setting: float | None) -> Match | None:
    root, graph = traced.root, traced.graph
    dim = _softmax_dim(root, softmax)
    between: list[fx.Node] = [softmax]
    chain = _Chain(traced, between)
    weights, own = _follow(root, softmax, between)
    last = _matmul_of(weights)
    product = chain.unfold(_argument(softmax, 0, "input"))
    if last is None or product is None:
        if last is not None and chain.reaches_matmul(softmax):
            raise Unsuitable(chain.reason or "its scores are computed in a way that is not known")
        return None  # a softmax of something else
    if len(weights.users) != 1 or (weights is not softmax and len(softmax.users) != 1):
        raise Unsuitable("it returns its weights, or uses them twice")
    if not isinstance(dim, int):
        raise Unsuitable("its softmax does not say over which dimension")
    matmul, values = last
    scores, steps = product
    between.insert(0, matmul)
    with graph.inserting_before(matmul):
        query, key_t = (_permuted(graph, *side) for side in (scores.left, scores.right))
        value = _permuted(graph, *values.right)
        p = _dropout_node(root, graph, own) if setting is None else (setting if root.training else 0.0)
        new = graph.call_function(attend, (query, key_t, value, tuple(steps), p, dim))
        result = new if values.out is None else graph.call_method("permute", (new, values.out))
    matmul.replace_all_uses_with(result)
    for node in sorted(set(between), reverse=True):
        if not node.users:
            graph.erase_node(node)
    return Match(scores.left[0], scores.right[0], values.right[0], own is not None)


class _Chain:
    """Walks from a softmax back to the product of queries and keys."""

    def __init__(self, traced: Traced, between: list[fx.Node]) -> None:
        self._traced = traced
        self._root = traced.root
        self._between = between
        self.reason = ""

    def unfold(self, node: Any) -> tuple[Product, list[Step]] | None:
        """The product, and the steps from it to this node, first to last; None if this is another thing."""
        if not isinstance(node, fx.Node) or node.op not in {"call_function", "call_method", "call_module"}:
            return None
        if len(node.users) != 1:
            self.reason = "its scores are used twice"
            return None
        target = _target(node)
        found = self._product(node, target) or self._step(node, target)
        if found is not None:
            self._between.append(node)
        return found

    def reaches_matmul(self, softmax: fx.Node) -> bool:
        """Whether a product of two matrices is among what a softmax is computed from, within a few operations."""
        todo = [(n, 0) for n in softmax.all_input_nodes]
        while todo:
            node, depth = todo.pop()
            target = _target(node)
            if target in MATMUL or target is torch.einsum:
                return True
            if depth < 5:
                todo += [(n, depth + 1) for n in node.all_input_nodes]
                if depth == 0 and not self.reason:
                    self.reason = f"it does {getattr(target, '__name__', target)} to its scores"
        return False

    def _product(self, node: fx.Node, target: Any) -> tuple[Product, list[Step]] | None:
        if target in MATMUL:
            left, right = _argument(node, 0, "input"), _argument(node, 1, "other")
            if target in {torch.bmm, "bmm"}:
                right = _argument(node, 1, "mat2")
            if isinstance(left, fx.Node) and isinstance(right, fx.Node):
                return Product((left, None), (right, None)), []
        if target is torch.einsum and (product := einsum.scores(node)) is not None:
            return product, []
        return None

    def _step(self, node: fx.Node, target: Any) -> tuple[Product, list[Step]] | None:
        """What an operation does to the scores that it is given."""
        first, second = _argument(node, 0, "input"), _argument(node, 1, "other")
        inner: Any = None
        step: Step | None = None
        if target in CAST or _is_child(self._root, node, nn.Identity):
            return self.unfold(first)
        plain = set(node.kwargs) <= {"input", "other"}  # neither `alpha` nor `rounding_mode`
        for targets, name, turns in ((ADD, "add", True), (MULTIPLY, "scale", True), (SUBTRACT, "subtract", False)):
            if target in targets and plain:
                inner, step = self.unfold(first), (name, second)
                if inner is None and turns:
                    inner, step = self.unfold(second), (name, first)
        if target in DIVIDE and plain:
            inner, step = self.unfold(first), ("divide", second)
        if target in FILL:
            mask, value = _argument(node, 1, "mask"), _number(_argument(node, 2, "value"))
            inner, step = self.unfold(first), self._hiding("fill", mask, value)
        if target is torch.where or target == "where":
            # As a method it is called on one of the values, the condition comes second.
            order = (0, 1, 2) if target is torch.where else (1, 0, 2)
            names = ("condition", "input", "other")
            condition, yes, no = (_argument(node, i, n) for i, n in zip(order, names, strict=True))
            inner, step = self.unfold(yes), self._hiding("keep", condition, _number(no))
            if inner is None:
                inner, step = self.unfold(no), self._hiding("fill", condition, _number(yes))
        if inner is None or step is None:
            return None
        if step[0] in {"fill", "keep", "add"} and is_causal(self._traced, step):
            step = ("causal", step)
        return inner[0], [*inner[1], step]

    def _hiding(self, kind: str, mask: Any, value: float | None) -> Step | None:
        if value is None:
            self.reason = "its scores are filled with a value that is not a number in its code"
            return None
        if value > HIDES:
            self.reason = f"its scores are filled with {value:g}, which hides nothing"
            return None
        return (kind, mask, value)


def _follow(root: nn.Module, softmax: fx.Node, between: list[fx.Node]) -> tuple[fx.Node, fx.Node | None]:
    """From the softmax through casts and dropout to the weights; the dropout's node, if there is one."""
    node, dropout = softmax, None
    while len(node.users) == 1:
        user = next(iter(node.users))
        is_dropout = _target(user) in {F.dropout, torch.dropout} or _is_child(root, user, nn.Dropout)
        casts = _target(user) in CAST or _is_child(root, user, nn.Identity)
        if _argument(user, 0, "input") is not node or not (casts or (is_dropout and dropout is None)):
            break
        if is_dropout:
            dropout = user
        node = user
        between.insert(0, node)
    return node, dropout


def _matmul_of(weights: fx.Node) -> tuple[fx.Node, Product] | None:
    """The product of these weights with values."""
    for user in weights.users:
        target = _target(user)
        second = _argument(user, 1, "mat2" if target in {torch.bmm, "bmm"} else "other")
        if target in MATMUL and _argument(user, 0, "input") is weights and isinstance(second, fx.Node):
            return user, Product((weights, None), (second, None))
        if target is torch.einsum and (product := einsum.weighted(user, weights)) is not None:
            return user, product
    return None


def _permuted(graph: fx.Graph, node: fx.Node, order: tuple[int, ...] | None) -> fx.Node:
    if order is None or order == tuple(range(len(order))):
        return node
    return graph.call_method("permute", (node, order))


def _dropout_node(root: nn.Module, graph: fx.Graph, node: fx.Node | None) -> Any:
    """The probability that a dropout of the module drops with in this call."""
    if node is None:
        return 0.0
    if node.op == "call_module":
        return graph.call_function(current_dropout, (graph.get_attr(str(node.target)),))
    p, training = _argument(node, 1, "p", 0.5), _argument(node, 2, "training", True)
    if node.target is torch.dropout:
        training = _argument(node, 2, "train", True)
    if isinstance(training, bool):
        return p if training else 0.0
    return graph.call_function(operator.mul, (p, training))


def current_dropout(module: nn.Dropout) -> float:
    """The probability that a dropout module drops with now."""
    return module.p if module.training else 0.0


def _softmax_dim(root: nn.Module, node: fx.Node) -> Any:
    if node.op == "call_module":
        return getattr(root.get_submodule(str(node.target)), "dim", None)
    return _argument(node, 1, "dim")


def _number(value: Any) -> float | None:
    if isinstance(value, fx.Node) and value.target is torch.full and len(value.args) > 1:
        value = value.args[1]
    return float(value) if isinstance(value, int | float) else None


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _target(node: fx.Node) -> Callable[..., Any] | str | None:
    """The function, or the name of the method, that a node calls."""
    return node.target if node.op in {"call_function", "call_method"} else None


def _is_child(root: nn.Module, node: fx.Node, kind: type[nn.Module]) -> bool:
    return node.op == "call_module" and isinstance(root.get_submodule(str(node.target)), kind)
