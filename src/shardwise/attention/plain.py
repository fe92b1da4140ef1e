"""Attention written out by hand: its forward is replaced by its own trace with one fast call in it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from shardwise.attention.backend import Unsuitable, flash_first
from shardwise.attention.check import BATCH, LENGTH, Inputs, on_real_inputs, random_tensor, width_of
from shardwise.attention.install import install, original_forward
from shardwise.attention.mha import is_cross_call
from shardwise.attention.pattern import rewrite
from shardwise.attention.trace import Call, describe, trace

# Traces that hold for one set of shapes are kept for this many.
MOST_VARIANTS = 256
NOT_FOUND = "no attention was found in it"


@dataclass(frozen=True)
class Variant:
    """A module's forward for one kind of calls.

    Attributes:
        function: takes the module, the call's tensors, and the constants.
        roots: for each attention the positions of the tensors that queries, keys and values are computed from.
        drops: whether the module's own code drops weights in all of them.
    """

    function: Callable[..., Any]
    constants: list[torch.Tensor]
    roots: list[tuple[set[int], set[int], set[int]]]
    drops: bool

    def crosses(self, tensors: list[torch.Tensor]) -> bool:
        """Whether a call is cross-attention."""
        return any(_crosses(*(_distinct(r, tensors) for r in roots)) for roots in self.roots)


@dataclass
class Plan:
    """How the calls of one module are run; knows no module, so that copies may share it.

    Attributes:
        name: of the module.
        dropout: the probability in place of the module's own; None keeps that.
        cross: whether cross-attention is routed.
        warn: says once that a call runs as it was, and why.
        unchecked: the first call is compared with the original.
    """

    name: str
    dropout: float | None
    cross: bool
    warn: Callable[[str], None]
    unchecked: bool = True
    _strict: bool = False
    _variants: dict[Any, Variant] = field(default_factory=dict)
    _refused: dict[Any, str] = field(default_factory=dict)

    def variant(self, module: nn.Module, call: Call) -> Variant:
        """The trace for calls of this kind; made if it is the first.

        Raises:
            Unsuitable: it has no attention that is known, with the reason.
        """
        for sized in (False, True):
            key = (call.key, call.sizes) if sized else call.key
            if key in self._variants:
                return self._variants[key]
            if key in self._refused:
                reason = self._refused[key]
                continue
            try:
                made = _variant(module, call, self.dropout, sized)
            except Unsuitable as error:
                reason = self._refused[key] = str(error)
                continue
            if len(self._variants) >= MOST_VARIANTS:
                self._variants.pop(next(iter(self._variants)))
            self._variants[key] = made
            return made
        raise Unsuitable(reason)

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """A context in which a call that is not suitable raises, and nothing is compared."""
        unchecked, self.unchecked, self._strict = self.unchecked, False, True
        try:
            yield
        finally:
            self.unchecked, self._strict = unchecked, False

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward."""
        original = original_forward(module)
        try:
            call = describe(module, args, kwargs)
            variant = self.variant(module, call)
            if not self.cross and variant.crosses(call.tensors):
                return original(module, *args, **kwargs)

            def switched() -> Any:
                with flash_first():
                    return variant.function(module, *call.tensors, *variant.constants)

            if self.unchecked:
                self.unchecked = False
                on_real_inputs(
                    self.name,
                    module,
                    lambda: original(module, *args, **kwargs),
                    self._evaluated(module, call),
                    # A boolean mask may mean either; one that is added can mean but one thing.
                    [t for t in call.tensors if t.is_floating_point()],
                )
            return switched()
        except Unsuitable as reason:
            if self._strict:
                raise
            self.warn(f"{reason}; such calls run as they did")
            return original(module, *args, **kwargs)

    def _evaluated(self, module: nn.Module, call: Call) -> Callable[[], Any]:
        """The switched forward as it is in evaluation, which may be another trace."""

        def run() -> Any:
            now = describe(module, *call.arguments())
            variant = self.variant(module, now)
            with flash_first():
                return variant.function(module, *now.tensors, *variant.constants)

        return run


def switch_plain(module: nn.Module, plan: Plan) -> Callable[[], None]:
    """Run a module by a plan.

    Returns:
        What undoes it.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return plan.run(self, args, kwargs)

    return install(module, forward)


def plain_inputs(module: nn.Module) -> Iterator[Inputs]:
    """Guesses of what a module may be called with, the likeliest first; not all of them will run."""
    parameters = list(inspect.signature(original_forward(module)).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in named if p.default is p.empty]
    masks = [p.name for p in named if p.default is not p.empty and "mask" in p.name]
    width = width_of(module)
    # A module with a stored mask may be made for few tokens.
    squares = [b.shape[-1] for b in module.buffers() if b.dim() >= 2 and b.shape[-1] == b.shape[-2]]
    length = min([LENGTH, *squares])
    shapes = [] if width is None else [(BATCH, length, width), (length, width)]
    shapes += [(BATCH, 2, length, 16), (BATCH, length, 16)]
    lower = torch.ones(length, length, dtype=torch.bool).tril()
    for shape, kind, extra in itertools.product(shapes, (torch.bool, torch.float32), ([], masks)):
        if kind == torch.float32 and not any("mask" in n for n in (*required, *extra)):
            continue
        if extra is masks and not masks:
            continue
        mask = lower.to(kind)
        hidden = [random_tensor(*shape, module=module) for _ in required]
        # One tensor for all: self-attention, of which the others are a change of values.
        args = tuple(mask.to(h.device) if "mask" in n else hidden[0] for n, h in zip(required, hidden, strict=True))
        device = hidden[0].device if hidden else torch.device("cpu")
        yield args, {name: mask.to(device) for name in extra}


def _variant(module: nn.Module, call: Call, dropout: float | None, sized: bool) -> Variant:
    traced = trace(module, call, sized=sized)
    inputs = [n for n in traced.graph.nodes if n.op == "placeholder"][: len(call.tensors)]
    # Before the nodes are replaced: what a value is computed from does not change.
    matches = rewrite(traced, dropout)
    if not matches:
        raise Unsuitable(NOT_FOUND)
    position = {node: i for i, node in enumerate(inputs)}
    roots = [tuple(_roots(n, position) for n in (m.query, m.key, m.value)) for m in matches]
    constants = [traced.constants[n.name] for n in traced.graph.nodes if n.op == "placeholder" and n not in position]
    drops = all(m.has_dropout for m in matches)
    return Variant(traced.function(), constants, roots, drops)  # type: ignore[arg-type]


def _roots(node: fx.Node, position: dict[fx.Node, int]) -> set[int]:
    found: set[int] = set()
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if one in position:
            found.add(position[one])
        todo += one.all_input_nodes
    return found


def _distinct(positions: set[int], tensors: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    return {id(tensors[i]): tensors[i] for i in positions}


def _crosses(query: dict[int, torch.Tensor], key: dict[int, torch.Tensor], value: dict[int, torch.Tensor]) -> bool:
    if query.keys() & key.keys() or not query or not key:
        return False
    if len(query) == len(key) == len(value) == 1:
        return is_cross_call(*(next(iter(x.values())) for x in (query, key, value)))
    return True
