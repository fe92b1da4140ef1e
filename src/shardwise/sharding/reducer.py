"""When gradients are reduced: as units complete during the backward pass, in one order on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from shardwise import _torch
from shardwise.dist import Handle, Mesh
from shardwise.sharding.policy import Policy
from shardwise.sharding.unit import Slot, Unit

# Reductions in flight at once. One travels while the next unit's gradients are computed; more only cost memory.
MAX_IN_FLIGHT = 2


class Group(Protocol):
    """Parameters whose gradients are reduced together."""

    @property
    def slots(self) -> Sequence[Slot]:
        """The parameters."""

    @property
    def device(self) -> torch.device:
        """Where they are."""


class Gradient(Protocol):
    """The gradients of one unit or bucket, as the reducer sees them."""

    repeated: bool

    @property
    def unit(self) -> Group:
        """Whose gradients."""

    @property
    def trained(self) -> bool:
        """Whether any parameter wants a gradient now."""

    @property
    def complete(self) -> bool:
        """Whether every parameter has got its gradient in this backward."""

    @property
    def pending(self) -> bool:
        """Whether gradients were collected that are not reduced yet."""

    @property
    def in_flight(self) -> bool:
        """Whether a reduction was started and not finished."""

    def begin_backward(self) -> None:
        """Forget which gradients arrived in the last backward."""

    def collect(self, param: torch.Tensor) -> None:
        """Take ``param.grad``, which autograd has just completed."""

    def start_reduction(self) -> Handle:
        """Begin to reduce what was collected."""

    def finish_reduction(self, handle: Handle) -> None:
        """Wait for the reduction."""

    def discard(self) -> None:
        """Drop all gradients of the window."""


G = TypeVar("G", bound=Gradient)


class Reducer(Generic[G]):
    """Watches the backward pass and reduces each unit when its gradients are there.

    All ranks reduce the units in the same order, whatever parameters each of them used: a unit waits for those
    before it, and what is incomplete when the backward ends is reduced then, with zeros for what is missing. The
    order starts as the reverse of the model's and is replaced by the one that rank 0 saw in its first backward.

    Where parameters are gathered during the backward (stage 3), a unit is reduced when the backward of its module is
    over, complete or not. Gathers and reductions then interleave alike on all ranks; else a rank that waits for a
    reduction and one that waits for a gather could wait for each other.

    Args:
        grads: the units that are trained.
        policy: the row of the ZeRO table.
        mesh: the ranks.
        overlap: let reductions travel while the backward goes on.
        by_scope: units are reduced by :meth:`scope_over`, and what is left at the end.

    Attributes:
        boundary: whether the next backward is the last one before a step; set by the engine.
        active: whether a backward pass is running.
    """

    def __init__(self, grads: list[G], policy: Policy, mesh: Mesh, *, overlap: bool, by_scope: bool) -> None:
        self.grads = list(grads)
        self.boundary = True
        self.active = False
        self._policy = policy
        self._mesh = mesh
        self._by_scope = by_scope
        self._in_flight_limit = MAX_IN_FLIGHT if overlap else 0
        self._order = list(reversed(range(len(grads))))
        self._order_learned = by_scope
        self._index = {id(g.unit): i for i, g in enumerate(self.grads)}
        self._seen: list[int] = []
        self._cursor = 0
        self._ready: set[int] = set()
        self._issued: set[int] = set()
        self._in_flight: list[tuple[G, Handle]] = []
        self._unreduced = False
        self._ends_itself = False
        self._arrivals = 0
        self._outer_graph = -1
        self._nested: set[int] = set()
        self._repeated: set[int] = set()
        self._hooks: list[Any] = []
        self.on_begin: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        # For models that share a group: whether this one may reduce before the end, and who reduces when at the end.
        self.may_begin: Callable[[], bool] = lambda: True
        self.when_over: Callable[[Callable[[], None]], None] = lambda reduce: reduce()
        self.on_first_reduction: Callable[[], None] = lambda: None
        self._talked = False
        for index in range(len(self.grads)):
            self._watch(index)

    def add(self, grad: G) -> None:
        """Watch one more unit (it was frozen before)."""
        self.grads.append(grad)
        index = len(self.grads) - 1
        self._order.append(index)
        self._index[id(grad.unit)] = index
        self._watch(index)

    def begin(self, *, ends_itself: bool = True) -> None:
        """A backward pass starts. Does nothing if one is running.

        Args:
            ends_itself: called from inside the pass, which then calls :meth:`end` when it is over.
        """
        if _torch.in_backward_pass() and self._outer_graph == -1:
            self._outer_graph = _torch.graph_task_id()
        if self.active:
            return
        self.active = True
        self._ends_itself = ends_itself
        self._start_round()
        if ends_itself:
            _torch.queue_backward_callback(self.end)
        self.on_begin()

    @property
    def reduces_now(self) -> bool:
        """Whether this backward reduces, or only collects."""
        return self._policy.reduce_each_micro_step or self.boundary

    def scope_over(self, units: list[Unit]) -> None:
        """The backward of the module that needs these units is over: reduce them, with zeros for what is missing."""
        if not self.active or not self.reduces_now:
            return
        for unit in units:
            index = self._index.get(id(unit))
            if index is not None:
                self._issue(index)

    def end(self) -> None:
        """The backward pass is over: reduce what is left, and wait."""
        if not self.active:
            return
        self.active = False
        # A pass that was begun by a hook and brought no gradient was `torch.autograd.grad`: nothing to reduce.
        if self._arrivals or not self._ends_itself:
            if self.reduces_now:
                self.when_over(self._reduce_rest)
            else:
                self._unreduced = True
        self.on_end()

    def finish(self) -> None:
        """Before a step: make sure that all gradients of the window are reduced."""
        if self._unreduced:
            self._start_round()
            self._reduce_rest()

    def abort(self) -> None:
        """A backward pass failed: drop every gradient of the window."""
        self.active = False
        self._drain()
        self.discard()

    def discard(self) -> None:
        """Drop the gradients of the window."""
        self._unreduced = False
        for grad in self.grads:
            grad.discard()

    def close(self) -> None:
        """Stop watching, and drop the gradients of the window."""
        self.unwatch()
        self.discard()

    def unwatch(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def watch_param(self, index: int, param: torch.nn.Parameter) -> None:
        """Collect this parameter's gradients for the unit with this index."""
        watched: Any = param
        self._hooks.append(watched.register_post_accumulate_grad_hook(lambda p: self._arrived(index, p)))

    def _watch(self, index: int) -> None:
        for slot in self.grads[index].unit.slots:
            if slot.param.requires_grad:
                self.watch_param(index, slot.param)

    def _start_round(self) -> None:
        self._cursor = 0
        self._arrivals = 0
        self._talked = False
        self._outer_graph = _torch.graph_task_id()
        self._ready.clear()
        self._issued.clear()
        self._seen.clear()
        for grad in self.grads:
            grad.begin_backward()

    def _arrived(self, index: int, param: torch.Tensor) -> None:
        self.begin()
        self._arrivals += 1
        grad = self.grads[index]
        while grad.in_flight:
            self._finish_oldest()
        grad.collect(param)
        # A re-entrant graph may bring a second gradient for a module that several checkpoints share. Until the first
        # backward has shown for which units, what such graphs touch is not reduced before the end.
        if not self._order_learned and _torch.graph_task_id() != self._outer_graph:
            self._nested.add(index)
        if grad.complete and index not in self._ready:
            self._seen.append(index)
            self._ready.add(index)
            if self.reduces_now and not self._by_scope and self.may_begin():
                self._issue_ready()

    def _issue_ready(self) -> None:
        ready = self._ready - self._repeated - self._nested
        while self._cursor < len(self._order) and self._order[self._cursor] in ready:
            self._cursor += 1
            self._issue(self._order[self._cursor - 1])

    def _talk(self) -> None:
        if not self._talked:
            self._talked = True
            self.on_first_reduction()

    def _issue(self, index: int) -> None:
        self._talk()
        self._issued.add(index)
        grad = self.grads[index]
        if not grad.trained and not grad.pending:
            return
        while grad.in_flight or len(self._in_flight) > max(self._in_flight_limit - 1, 0):
            self._finish_oldest()
        self._in_flight.append((grad, grad.start_reduction()))
        if self._in_flight_limit == 0:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        grad, handle = self._in_flight.pop(0)
        grad.finish_reduction(handle)

    def _drain(self) -> None:
        while self._in_flight:
            self._finish_oldest()

    def _reduce_rest(self) -> None:
        self._talk()
        late = [i for i in self._order if i in self._issued and self.grads[i].pending]
        for index in [i for i in self._order if i not in self._issued] + late:
            self._issue(index)
        self._drain()
        self._unreduced = False
        if not self._order_learned:
            self._learn_order()

    def _learn_order(self) -> None:
        if not self.grads:
            return
        self._order_learned = True
        # Those that complete more than once come last, and are reduced at the end. Marked by a negative number.
        repeated = [i for i, g in enumerate(self.grads) if g.repeated]
        seen = [i for i in self._seen if i not in repeated]
        order = seen + [i for i in self._order if i not in {*seen, *repeated}] + [-1 - i for i in repeated]
        device = self.grads[0].unit.device
        agreed = torch.tensor(order, dtype=torch.int64, device=device)
        self._mesh.world.broadcast(agreed, 0, "order of reductions")
        if not _torch.is_fake(agreed):
            order = agreed.tolist()
        self._nested.clear()
        self._order = [i if i >= 0 else -1 - i for i in order]
        self._repeated = {-1 - i for i in order if i < 0}


def warn_discarded() -> None:
    """Say that a failed backward cost the gradients of its window."""
    warnings.warn(
        "The last backward pass did not end; the gradients of its accumulation window were dropped.", stacklevel=3
    )
