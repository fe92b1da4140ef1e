"""Stage 3: parameters are gathered around the modules that use them, in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _torch
from .stray import StrayParameters
from .trace import Trace
from .unit import Unit

if TYPE_CHECKING:
    from ..config.sections import ZeroSection


class Scope:
    """A module and the units that must be whole while it runs."""

    def __init__(self, name: str, module: nn.Module, units: list[Unit]) -> None:
        self.name = name
        self.module = module
        self.units = units

    def contains(self, other: Scope) -> bool:
        """Whether the other scope's module lies inside this one's (or is it)."""
        return not self.name or other.name == self.name or other.name.startswith(self.name + ".")


class Gatherer:
    """Hooks that gather a scope's units before its module runs and release them after.

    In the backward pass the gather is triggered by the autograd node that produced the module's output. Autograd runs
    nodes in the reverse of the order in which they were made, so when a scope's backward begins, that of every scope
    beside it that ran after it is over: this is when those are released. (Not when their gradients arrive: a frozen
    parameter has none.)

    Args:
        scopes: the modules; the first is the whole model.
        zero: the ``stage3_*`` keys.
        begin_backward: called when a backward pass is seen to start.
        in_backward: whether a backward pass is running.
    """

    def __init__(
        self,
        scopes: list[Scope],
        zero: ZeroSection,
        begin_backward: Callable[[], None],
        in_backward: Callable[[], bool],
    ) -> None:
        self._scopes = scopes
        self._prefetch_numel = zero.stage3_prefetch_bucket_size
        self._max_live = zero.stage3_max_live_parameters
        self._max_reuse = zero.stage3_max_reuse_distance
        self._begin_backward = begin_backward
        self._in_backward = in_backward
        self._units = list({id(u): u for s in scopes for u in s.units}.values())
        self._of_param = {id(slot.param): u for u in self._units for slot in u.slots}
        self._running: list[Scope] = []
        # One for training and one for evaluation; what a re-entrant checkpoint runs without gradients is training.
        self._traces = {True: Trace(), False: Trace()}
        self._training = True
        self._stray: dict[bool, StrayParameters] = {}
        self._stray_checked: set[bool] = set()
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

    def reset(self) -> None:
        """After an exception: nothing runs any more."""
        self._running.clear()
        for mode in list(self._stray):
            self._stray.pop(mode).stop()
        self.release_all()

    @property
    def live_numel(self) -> int:
        """Elements of the units that are whole on this rank now."""
        return sum(u.numel for u in self._units if u.live)

    def _hook(self, scope: Scope) -> None:
        module = scope.module
        self._hooks.append(module.register_forward_pre_hook(lambda m, a: self._before(scope), prepend=True))
        # Also when the forward raises: a recomputation that stops early, or a user's error.
        self._hooks.append(module.register_forward_hook(lambda m, a, out: self._after(scope, a, out), always_call=True))

    def _before(self, scope: Scope) -> None:
        if not self._running and not self._in_backward():
            self._start_iteration()
        self._running.append(scope)
        if self._in_backward():
            self._retire_others(scope)
        self._need(scope)

    def _after(self, scope: Scope, args: Any, out: Any) -> None:
        if scope in self._running:
            # An exception can skip the hooks of inner modules: drop them with their parent.
            while self._running.pop() is not scope:
                pass
        if not self._running:
            self._stop_watching_strays()
        if self._in_backward():
            return  # a recomputation: the scope's backward comes next
        if torch.is_grad_enabled():
            self._watch_backward(scope, args, out)
        for unit in scope.units:
            if not self._is_running(unit) and not self._worth_keeping(unit):
                unit.release()

    def _watch_backward(self, scope: Scope, args: Any, out: Any) -> None:
        passed_through = {id(t.grad_fn) for t in _torch.tensors_in(args) if t.grad_fn is not None}
        seen: set[int] = set()
        for tensor in _torch.tensors_in(out):
            node = tensor.grad_fn
            if node is None or id(node) in passed_through or id(node) in seen:
                continue
            seen.add(id(node))
            node.register_prehook(lambda grads: self._before_backward(scope))

    def _before_backward(self, scope: Scope) -> None:
        self._begin_backward()
        self._retire_others(scope)
        self._need(scope)

    def _need(self, scope: Scope) -> None:
        trace = self._traces[self._training or self._in_backward()]
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
        # Around it and inside it: a node of the whole model's output may lie in the middle of a block.
        keep = {id(u) for s in self._scopes if s.contains(scope) or scope.contains(s) for u in s.units}
        coming = {id(u) for u in self._traces[True].coming(self._prefetch_numel)}
        for unit in self._units:
            if id(unit) not in keep and id(unit) not in coming and unit.live and not self._is_running(unit):
                unit.release()

    def _worth_keeping(self, unit: Unit) -> bool:
        distance = self._traces[self._training].reuse_distance(unit)
        return distance is not None and distance < self._max_reuse and self.live_numel <= self._max_live

    def _is_running(self, unit: Unit) -> bool:
        return any(unit in s.units for s in self._running)

    def _start_iteration(self) -> None:
        mode = self._training = torch.is_grad_enabled()
        self._traces[mode].start()
        if mode not in self._stray_checked:
            self._stray_checked.add(mode)
            if not any(_torch.is_compiled(m) for m in self._scopes[0].module.modules()):
                self._stray[mode] = StrayParameters(lambda p: self._of_param.get(id(p)), self._adopt_stray)
                self._stray[mode].start()

    def _stop_watching_strays(self) -> None:
        for mode in list(self._stray):
            self._stray.pop(mode).stop()

    def _adopt_stray(self, unit: Unit) -> None:
        """A module reads a parameter that another module owns: from now on it belongs to both."""
        scope = self._running[-1] if self._running else self._scopes[0]
        if unit not in scope.units:
            scope.units.append(unit)
        unit.finish_gather()
