"""A model under a ZeRO stage: its units, and the hooks that keep them right while the user's loop runs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise import _torch
from shardwise.dist import Mesh
from shardwise.errors import ShardingError
from shardwise.sharding.access import is_managed, mark, take_over, unmark
from shardwise.sharding.gatherer import Gatherer, Scope
from shardwise.sharding.gradient import LOW_PRECISION, Averaging, GradientOptions, UnitGradient
from shardwise.sharding.guards import Guards
from shardwise.sharding.plan import ScopePlan, plan_scopes, plan_units
from shardwise.sharding.policy import POLICIES
from shardwise.sharding.reducer import Reducer, warn_discarded
from shardwise.sharding.rows import row_parameters
from shardwise.sharding.state import StateDictHooks
from shardwise.sharding.unit import Unit

if TYPE_CHECKING:
    from shardwise.config.sections import ZeroSection


class ShardedModel:
    """Cuts a model into units and keeps gathers and reductions going.

    Args:
        model: a module with its parameters in place (or built under ``zero.Init``); changed in place.
        zero: ``zero_optimization``.
        mesh: the ranks.
        device: where the parameters shall be.
        low_dtype: the dtype of fp16 or bf16 training, or None to keep the parameters' own.
        accumulates: whether a window has more than one micro-step.
        wire_dtype: ``communication_data_type``.
        sum_dtype: in which low-precision gradients of a window add up.
        averaging: where gradients are divided; default: by the ranks, before the sum.
        masters: keep low-precision parameters in fp32 beside their units.
        buffer_dtype: cast floating-point buffers to this, or leave them.
        by_rows: exchange the gradients of embeddings by rows.

    Raises:
        ShardingError: the model is managed by another engine, or has parameters without data.
    """

    def __init__(
        self,
        model: nn.Module,
        zero: ZeroSection,
        mesh: Mesh,
        *,
        device: torch.device,
        low_dtype: torch.dtype | None,
        accumulates: bool,
        wire_dtype: torch.dtype | None,
        sum_dtype: torch.dtype = torch.float32,
        averaging: Averaging | None = None,
        masters: bool = True,
        buffer_dtype: torch.dtype | None = None,
        by_rows: bool = False,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.averaging = averaging or Averaging(1.0 / mesh.world.size)
        self.masters = masters
        self.policy = POLICIES[zero.stage]
        self.device = device
        self._options = GradientOptions(
            scale=self.averaging.before,
            accumulates=accumulates,
            sum_dtype=sum_dtype,
            wire_dtype=wire_dtype,
            contiguous=zero.contiguous_gradients,
            scatter=zero.reduce_scatter,
        )
        self._publishes_by_broadcast = not zero.allgather_partitions
        _check(model)
        plans = plan_scopes(model, zero)
        rows = row_parameters(model) if by_rows else set()
        self.units = self._build(plan_units(plans, self.policy, zero, low_dtype, rows))
        self._place_buffers(buffer_dtype)
        self.managed = {id(slot.param): slot.name for u in self.units for slot in u.slots}
        self.grads = [self._new_gradient(u) for u in self.units if u.slots[0].param.requires_grad]
        self._frozen = [(u, s) for u in self.units for s in u.slots if not s.param.requires_grad]
        overlap = True if zero.overlap_comm is None else zero.overlap_comm
        by_scope = any(u.releases for u in self.units)
        self.reducer = Reducer(self.grads, self.policy, mesh, overlap=overlap, by_scope=by_scope)
        self.on_unfreeze: Callable[[Unit], None] = lambda unit: None
        unit_of = {id(slot.param): u for u in self.units for slot in u.slots}
        scopes = [Scope(p.name, p.module, _units_of(p, unit_of)) for p in plans]
        self.gatherer = Gatherer(scopes, zero, self.reducer.begin, self.reducer.scope_over) if by_scope else None
        if self.gatherer is not None:
            self.reducer.on_begin, self.reducer.on_end = self.gatherer.backward_begins, self.gatherer.backward_ends
            self.gatherer.release_all()
        self._state_hooks = StateDictHooks(model, scopes, self.units)
        self._guards = Guards(model, {u.dtype for u in self.units}, device)
        self._hooks = [
            model.register_forward_pre_hook(lambda m, a: self._before_forward(), prepend=True),
            model.register_forward_hook(lambda m, a, out: self._after_forward(out)),
        ]
        self.closed = False

    def names(self) -> list[str]:
        """The names of all parameters, in the order of the units."""
        return [slot.name for u in self.units for slot in u.slots]

    def publish(self, units: list[Unit]) -> list[Any]:
        """Start to bring the whole copies of these units up to date; returns the handles to wait for."""
        handles = [u.publish(by_broadcast=self._publishes_by_broadcast) for u in units]
        return [h for h in handles if h is not None]

    def close(self) -> None:
        """Undo everything: the model is an ordinary, whole model again. All ranks must call this."""
        if self.closed:
            return
        self.closed = True
        for hook in self._hooks:
            hook.remove()
        if self.gatherer is not None:
            self.gatherer.close()
        self._state_hooks.remove()
        self._guards.remove()
        self.reducer.close()
        broken = any(axis.failed for axis in self.mesh.axes())
        for unit in self.units:
            if not broken:  # else nobody is there to gather from, and the first error is the one to see
                unit.dissolve()
            unmark(unit)
        self.units, self.grads = [], []

    def abort(self) -> None:
        """After an exception in forward or backward: forget what was under way."""
        self.reducer.abort()
        if self.gatherer is not None:
            self.gatherer.reset()

    def _build(self, plans: list[Any]) -> list[Unit]:
        units = []
        for index, plan in enumerate(plans):
            unit = Unit(
                index,
                plan.name,
                plan.params,
                plan.dtype,
                plan.policy,
                self.mesh,
                self.device,
                by_rows=plan.by_rows,
            )
            self._agree_on_values(take_over(plan.params))
            trained = plan.params[0][1].requires_grad
            unit.fill(with_master=self.masters and trained and plan.dtype in LOW_PRECISION)
            unit.release()
            mark(unit)
            units.append(unit)
        return units

    def _agree_on_values(self, params: list[tuple[str, nn.Parameter]]) -> None:
        """All ranks start from rank 0's values."""
        if self.mesh.world.size == 1:
            return
        for name, param in params:
            values = param.data.to(self.device).contiguous()
            if not _torch.is_fake(values):
                self.mesh.world.broadcast(values, 0, name)
            param.data = values

    def _place_buffers(self, to: torch.dtype | None) -> None:
        for module in self.model.modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is None:
                    continue
                dtype = to if to is not None and buffer.is_floating_point() else buffer.dtype
                placed = buffer.to(device=self.device, dtype=dtype).contiguous()
                if self.mesh.world.size > 1 and not _torch.is_fake(placed):
                    self.mesh.world.broadcast(placed, 0, name)
                if placed is not buffer:
                    module._buffers[name] = placed

    def _new_gradient(self, unit: Unit) -> UnitGradient:
        return UnitGradient(unit, self._options, self.mesh.world.pool)

    def _before_forward(self) -> None:
        if _torch.in_backward_pass():
            return  # a recomputation
        if self.reducer.active:
            warn_discarded()
            self.abort()
        if not torch.is_grad_enabled():
            return
        for name, param in self.model.named_parameters():
            if id(param) not in self.managed:
                raise ShardingError(
                    f"parameter {name} was added or replaced after shardwise.initialize; it would not be trained. "
                    "Change the model first, then initialize."
                )
        self._notice_unfrozen()

    def _after_forward(self, out: Any) -> None:
        if not torch.is_grad_enabled():
            return
        # A backward that reaches the model's output has begun, before any gradient arrives. Seen here, in the outermost
        # graph, because re-entrant checkpoints run graphs of their own inside it.
        reducer = weakref.ref(self.reducer)

        def begin(_grads: Any) -> None:  # also when the pass is known: it tells which graph is the outermost
            alive = reducer()
            if alive is not None:
                alive.begin()

        for node in {id(t.grad_fn): t.grad_fn for t in _torch.tensors_in(out) if t.grad_fn is not None}.values():
            node.register_prehook(begin)

    def _notice_unfrozen(self) -> None:
        unfrozen = [(u, s) for u, s in self._frozen if s.param.requires_grad]
        if not unfrozen:
            return
        self._frozen = [(u, s) for u, s in self._frozen if not s.param.requires_grad]
        for unit, members in itertools.groupby(unfrozen, key=lambda pair: pair[0]):
            known = [i for i, g in enumerate(self.reducer.grads) if g.unit is unit]
            if known:
                for _, slot in members:
                    self.reducer.watch_param(known[0], slot.param)
                continue
            if self.masters and unit.dtype in LOW_PRECISION:
                unit.make_master()
            grad = self._new_gradient(unit)
            self.grads.append(grad)
            self.reducer.add(grad)
            self.on_unfreeze(unit)


def _units_of(plan: ScopePlan, unit_of: dict[int, Unit]) -> list[Unit]:
    """The units that a module needs gathered: of its own parameters and of those registered as external."""
    params = [*(p for _, p in plan.params), *(p for p in plan.external if id(p) in unit_of)]
    return list({id(u): u for p in params if (u := unit_of[id(p)]).releases}.values())


def _check(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if is_managed(param):
            raise ShardingError(
                f"parameter {name} is already managed by a shardwise engine; call its `destroy()` before the model is "
                "given to another one."
            )
        if param.is_meta:
            raise ShardingError(
                f"parameter {name} is on the meta device and has no values; build the model under "
                "`shardwise.zero.Init` or give it values before `shardwise.initialize`."
            )
