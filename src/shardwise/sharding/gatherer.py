"""Stage 3: parameters are gathered around the modules that use them, in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise import _torch
from shardwise.messages import logger
from shardwise.sharding.stray import StrayParameters
from shardwise.sharding.trace import Trace
from shardwise.sharding.unit import Unit

if TYPE_CHECKING:
    from shardwise.config.sections import ZeroSection


class Scope:
    """A module and the units that must be whole while it runs.

    Attributes:
        open_calls: forwards of the module whose backward has not begun.
    """

    def __init__(self, name: str, module: nn.Module, units: list[Unit]) -> None:
        self.name = name
        self.module = module
        self.units = units
        self.open_calls = 0

    def contains(self, other: Scope) -> bool:
        """Whether the other scope's module lies inside this one's (or is it)."""
        return not self.name or other.name == self.name or other.name.startswith(self.name + ".")


@dataclass
class _Call:
    """One forward of a scope that a backward may reach."""

    scope: Scope
    open: bool


class Gatherer:
    """Hooks that gather a scope's units before its module runs and release them after.

    In the backward pass the gather is triggered by the autograd node that produced the module's output. Autograd runs
    nodes in the reverse of the order in which they were made, so when a scope's backward begins, that of every scope
    beside it that ran after it is over: this is when those are released, and their gradients reduced. (Not when their
    gradients arrive: a frozen parameter has none.)

    Args:
        scopes: the modules; the first is the whole model.
        zero: the ``stage3_*`` keys.
        begin_backward: called when a backward pass is seen to start.
        scope_over: called with the units of a scope whose backward is over.
    """

    def __init__(
        self,
        scopes: list[Scope],
        zero: ZeroSection,
        begin_backward: Callable[[], None],
        scope_over: Callable[[list[Unit]], None],
    ) -> None:
        self._scopes = scopes
        self._prefetch_numel = zero.stage3_prefetch_bucket_size
        self._max_live = zero.stage3_max_live_parameters
        self._max_reuse = zero.stage3_max_reuse_distance
        self._begin_backward = begin_backward
        self._scope_over = scope_over
        self._units = list({id(u): u for s in scopes for u in s.units}.values())
        self._of_param = {id(slot.param): u for u in self._units for slot in u.slots}
        self._scopes_of = {id(u): [s for s in scopes if u in s.units] for u in self._units}
        self._running: list[Scope] = []
        self._begun: dict[int, Scope] = {}
        self._related: dict[int, set[int]] = {}
        # One for training and one for evaluation; what a re-entrant checkpoint runs without gradients is training.
        self._traces = {True: Trace(), False: Trace()}
        self._training = True
        self._graph_made = False
        self._holding = False
        self._stray: dict[bool, StrayParameters] = {}
        self._stray_checked: set[bool] = set()
        self._watched = {True: False, False: False}
        self._hooks: list[Any] = []
        for scope in scopes:
            self._hook(scope)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def release_all(self) -> None:
        """Release what no running module needs."""
        for unit in self._units:
            if not self._is_running(unit):
                unit.release()

    def backward_begins(self) -> None:
        """A backward pass starts. After one that made a graph (``create_graph=True``), the nodes of that graph read
        parameters with no module around them: everything is gathered and kept."""
        self._holding, self._graph_made = self._graph_made, False
        if self._holding:
            for unit in self._units:
                unit.start_gather()
            for unit in self._units:
                unit.finish_gather()

    def backward_ends(self) -> None:
        """The backward pass is over."""
        self._holding = False
        self._begun.clear()
        for scope in self._scopes:
            scope.open_calls = 0
        self.release_all()

    def reset(self) -> None:
        """After an exception: nothing runs any more."""
        self._running.clear()
        self._stop_watching_strays()
        self.backward_ends()

    @property
    def live_numel(self) -> int:
        """Elements of the units that are whole on this rank now."""
        return sum(u.numel for u in self._units if u.live)

    def looks_for_strays_now(self) -> bool:
        """Whether this iteration, its backward included, is one that is watched for such reads."""
        return self._watched[self._training or _torch.in_backward_pass()]

    def hooks_inside(self, module: nn.Module) -> bool:
        """Whether parameters are gathered around a module that lies inside this one."""
        inside = {id(m) for m in module.modules() if m is not module}
        return any(id(s.module) in inside for s in self._scopes)

    def _hook(self, scope: Scope) -> None:
        module = scope.module
        self._hooks.append(module.register_forward_pre_hook(lambda m, a: self._before(scope), prepend=True))
        # Also when the forward raises: a recomputation that stops early, or a user's error.
        self._hooks.append(module.register_forward_hook(lambda m, a, out: self._after(scope, a, out), always_call=True))

    def _before(self, scope: Scope) -> None:
        recomputing = _torch.in_backward_pass()
        if not self._running and not recomputing:
            self._start_iteration(scope)
        self._running.append(scope)
        if recomputing:
            self._retire_others(scope)
        self._need(scope)

    def _after(self, scope: Scope, args: Any, out: Any) -> None:
        if scope in self._running:
            # An exception can skip the hooks of inner modules: drop them with their parent.
            while self._running.pop() is not scope:
                pass
        if not self._running:
            self._stop_watching_strays()
        if torch.is_grad_enabled():
            self._watch_backward(scope, args, out)
        if _torch.in_backward_pass():
            return  # a recomputation: the scope's backward comes next
        for unit in scope.units:
            if not self._is_running(unit) and not self._worth_keeping(unit):
                unit.release()

    def _watch_backward(self, scope: Scope, args: Any, out: Any) -> None:
        passed_through = {id(t.grad_fn) for t in _torch.tensors_in(args) if t.grad_fn is not None}
        nodes = {id(t.grad_fn): t.grad_fn for t in _torch.tensors_in(out) if t.grad_fn is not None}
        # The graph of a recomputation may be thrown away: its call is not waited for.
        call = _Call(scope, open=not _torch.in_backward_pass() and bool(nodes.keys() - passed_through))
        scope.open_calls += call.open
        for key in nodes.keys() - passed_through:
            nodes[key].register_prehook(lambda grads: self._before_backward(call))

    def _before_backward(self, call: _Call) -> None:
        self._begin_backward()
        self._graph_made = self._graph_made or torch.is_grad_enabled()
        if call.open:
            call.open = False
            call.scope.open_calls -= 1
        self._retire_others(call.scope)
        self._begun[id(call.scope)] = call.scope
        self._need(call.scope)

    def _need(self, scope: Scope) -> None:
        trace = self._traces[self._training or _torch.in_backward_pass()]
        wanted = [u for u in scope.units if not u.live]
        for unit in wanted:
            unit.start_gather()
        for unit in scope.units:
            trace.note(unit)
        for unit in wanted:
            unit.finish_gather()
        # Asked for now, they travel while this scope computes.
        room = self._max_live - self.live_numel
        for unit in trace.coming(min(self._prefetch_numel, room)):
            unit.start_gather()

    def _retire_others(self, scope: Scope) -> None:
        """The backward of ``scope`` begins: those beside it are over."""
        over = [s for s in self._begun.values() if not (s.contains(scope) or scope.contains(s))]
        for other in over:
            del self._begun[id(other)]
        for other in over:
            self._scope_over([u for u in other.units if not self._in_use_elsewhere(u)])
        if self._holding:
            return
        keep = self._related_units(scope)
        coming = {id(u) for u in self._traces[True].coming(self._prefetch_numel)}
        for unit in self._units:
            if unit.live and id(unit) not in keep and id(unit) not in coming and not self._is_running(unit):
                unit.release()

    def _in_use_elsewhere(self, unit: Unit) -> bool:
        """Whether a scope that needs the unit has its backward under way or ahead (tied weights, a second call)."""
        return any(s.open_calls > 0 or id(s) in self._begun for s in self._scopes_of[id(unit)])

    def _related_units(self, scope: Scope) -> set[int]:
        # Around it and inside it: a node of the whole model's output may lie in the middle of a block.
        found = self._related.get(id(scope))
        if found is None:
            related = [s for s in self._scopes if s.contains(scope) or scope.contains(s)]
            found = self._related[id(scope)] = {id(u) for s in related for u in s.units}
        return found

    def _worth_keeping(self, unit: Unit) -> bool:
        distance = self._traces[self._training].reuse_distance(unit)
        return distance is not None and distance < self._max_reuse and self.live_numel <= self._max_live

    def _is_running(self, unit: Unit) -> bool:
        return any(unit in s.units for s in self._running)

    def look_for_strays(self) -> None:
        """In the next forward, look again for parameters that modules read which do not own them."""
        self._stray_checked.clear()

    def _start_iteration(self, scope: Scope) -> None:
        mode = self._training = torch.is_grad_enabled()
        self._traces[mode].start()
        self._watched[mode] = False
        if mode not in self._stray_checked:
            if scope is self._scopes[0]:  # a part of the model, run by itself, shows only that part
                self._stray_checked.add(mode)
            if not any(_torch.is_compiled(m) for m in self._scopes[0].module.modules()):
                self._stray[mode] = StrayParameters(lambda p: self._of_param.get(id(p)), self._adopt_stray)
                self._stray[mode].start()
                self._watched[mode] = True

    def _stop_watching_strays(self) -> None:
        for mode in list(self._stray):
            self._stray.pop(mode).stop()

    def _adopt_stray(self, unit: Unit) -> None:
        """A module reads a parameter that another module owns: from now on it belongs to both."""
        scope = self._running[-1] if self._running else self._scopes[0]
        if unit not in scope.units:
            logger.info(
                "%s is read by %s, which does not own it: gathered for both", unit.name, scope.name or "the model"
            )
            scope.units.append(unit)
            self._scopes_of[id(unit)].append(scope)
            self._related.clear()
        unit.finish_gather()
