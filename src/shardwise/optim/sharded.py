"""Any elementwise ``torch.optim`` optimizer, stepping the shards of a model instead of its parameters."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.errors import ConfigError, NotYetSupported, ShardingError
from shardwise.optim.optimizers import ELEMENTWISE
from shardwise.precision import LossScaler, NoScaler
from shardwise.sharding import Piece, ShardedModel, Unit
from shardwise.sharding.agreement import Agreement

# Shards are stepped in groups of about this many elements, so that the first are on their way to the other ranks
# while the next are computed, and fp32 copies of low-precision gradients exist for one group at a time.
STEP_NUMEL = 16 * 1024 * 1024


class ShardedOptimizer(Optimizer):
    """Wraps an optimizer over a model's parameters; its groups then hold this rank's pieces of them.

    Each parameter's piece is an optimizer parameter of its own (a view of the unit's shard), in the group of its
    parameter. So hyper-parameters, state and step counts are kept per parameter, as torch does, and a parameter that
    got no gradient is not stepped.

    Args:
        inner: the optimizer, over parameters of the model; changed in place, so that schedulers which hold it go on.
        model: the sharded model.
        sub_group_size: elements that are stepped at once, at the most.
        allow_untested: accept optimizer classes of which it is not known that they step each element by itself.

    Raises:
        ConfigError: the optimizer needs whole parameters, or is not known to step elementwise.
        ShardingError: it holds a parameter that is not the model's.
    """

    def __init__(self, inner: Optimizer, model: ShardedModel, *, sub_group_size: int, allow_untested: bool) -> None:
        # Optimizer.__init__ is not called: groups, state and defaults are the inner optimizer's.
        self.optimizer = inner
        self.overflow = False
        self.stepping = False
        self.scaler: LossScaler = NoScaler()
        self._model = model
        self._known = type(inner) in ELEMENTWISE
        _check_class(inner, model, allow_untested)
        _check_closure(inner)
        self._pieces: dict[int, list[tuple[Piece, nn.Parameter]]] = {}
        of_param = self._make_pieces(model.units)
        names = {id(slot.param): slot.name for u in model.units for slot in u.slots}
        self._trained = self._rebind(of_param)
        self._sub_groups = self._cut(min(sub_group_size, STEP_NUMEL))
        model.on_unfreeze = self._unfreeze
        self._names = names
        self._warn_about_untrained()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups; ``params`` are this rank's pieces."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state, by piece."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.optimizer.defaults

    @property
    def loss_scale(self) -> float:
        """What fp16 losses are multiplied with; 1 without fp16."""
        return self.scaler.scale

    cur_scale = loss_scale

    def register_step_pre_hook(self, hook: Any) -> Any:
        """As in torch; called for each group of shards that is stepped at once."""
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """As in torch; called for each group of shards that is stepped at once."""
        return self.optimizer.register_step_post_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave on the same rank of the same layout."""
        self.optimizer.load_state_dict(dict(state_dict))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the window."""
        self._model.reducer.discard()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the model is cut already."""
        raise ShardingError("parameter groups cannot be added after shardwise.initialize; give them all before.")

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.optimizer!r})"

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        agreement: Agreement | None = None,
        scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        """Step this rank's pieces with the reduced gradients, and bring whole copies up to date.

        Args:
            closure: not supported.
            agreement: which parameters were used.
            scale: a 0-d tensor that gradients are multiplied with (unscaling, clipping), or None.
            found_inf: a 0-d float tensor on the device, 1.0 where the step must change nothing. Only for optimizers
                that take one (``supports_found_inf``).
        """
        if closure is not None:
            raise NotYetSupported("optimizer.step(closure) has no meaning for a sharded model.")
        if agreement is None:
            raise ShardingError("a sharded optimizer steps through `engine.step()`, which clips, unscales and decides.")
        if any(u.pins for u in self._model.units):
            raise ShardingError("engine.step() inside GatheredParameters would be undone at its end; step outside.")
        grads = {id(g.unit): g for g in self._model.grads}
        handles = []
        self.stepping = True
        all_params = [group["params"] for group in self.param_groups]
        try:
            if found_inf is not None:
                self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            for units in self._sub_groups:
                for unit in units:
                    grad = grads.get(id(unit))
                    if grad is not None and grad.total is not None:
                        self._bind(unit, grad.total, scale, agreement.used)
                self._restrict(units, all_params)
                if any(p.grad is not None for group in self.param_groups for p in group["params"]):
                    self.optimizer.step()
                for unit in units:
                    for _, tensor in self._pieces[id(unit)]:
                        tensor.grad = None
                    if unit.master is not None:
                        unit.shard.copy_(unit.master)
                handles += self._model.publish([u for u in units if id(u) in grads])
        finally:
            self.stepping = False
            for group, params in zip(self.param_groups, all_params, strict=True):
                group["params"] = params
            if found_inf is not None:
                del self.optimizer.found_inf  # type: ignore[attr-defined]
        for handle in handles:
            handle.wait()

    def close(self) -> None:
        """Give the inner optimizer its parameters back, without state: this rank has only a part of that."""
        self.optimizer.state.clear()
        for group, params in zip(self.optimizer.param_groups, self._given, strict=True):
            group["params"] = params
        self._pieces.clear()

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state and master weights on this rank."""
        state = sum(
            v.numel() * v.element_size() for s in self.state.values() for v in s.values() if isinstance(v, torch.Tensor)
        )
        return state + sum(
            u.master.numel() * u.master.element_size() for u in self._model.units if u.master is not None
        )

    def _bind(self, unit: Unit, total: torch.Tensor, scale: torch.Tensor | None, used: Mapping[int, bool]) -> None:
        grad = total
        if unit.master is not None and total.dtype != unit.master.dtype:
            grad = total.to(unit.master.dtype)
        if scale is not None:
            grad.mul_(scale.to(grad.dtype))
        for piece, tensor in self._pieces[id(unit)]:
            if used.get(id(piece.slot.param), False):
                tensor.grad = piece.view(grad)

    def _restrict(self, units: list[Unit], all_params: list[list[nn.Parameter]]) -> None:
        """Show the inner optimizer only the pieces of these units."""
        if len(self._sub_groups) == 1:
            return
        ids = {id(t) for u in units for _, t in self._pieces[id(u)]}
        for group, params in zip(self.param_groups, all_params, strict=True):
            group["params"] = [p for p in params if id(p) in ids]

    def _make_pieces(self, units: list[Unit]) -> dict[int, nn.Parameter | None]:
        of_param: dict[int, nn.Parameter | None] = {id(s.param): None for u in units for s in u.slots}
        for unit in units:
            source = unit.master if unit.master is not None else unit.shard
            pieces = []
            for piece in unit.pieces():
                tensor = nn.Parameter(piece.view(source), requires_grad=source.is_floating_point())
                pieces.append((piece, tensor))
                of_param[id(piece.slot.param)] = tensor
            self._pieces[id(unit)] = pieces
        return of_param

    def _rebind(self, of_param: Mapping[int, nn.Parameter | None]) -> set[int]:
        """Put the pieces into the inner optimizer's groups in place of the parameters, state included."""
        for number, group in enumerate(self.optimizer.param_groups):
            for param in group["params"]:
                if id(param) not in of_param:
                    raise ShardingError(
                        f"group {number} of the optimizer holds a parameter of shape {tuple(param.shape)} that is not "
                        "a parameter of the model; give shardwise.initialize the module that contains it."
                    )
        trained: set[int] = set()
        pieces = {id(p.slot.param): p for pairs in self._pieces.values() for p, _ in pairs}
        old_state = dict(self.optimizer.state)
        self.optimizer.state.clear()
        self._given = [list(group["params"]) for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            mine = []
            for param in group["params"]:
                trained.add(id(param))
                tensor = of_param[id(param)]
                if tensor is None:
                    continue
                mine.append(tensor)
                if param in old_state:
                    self.optimizer.state[tensor] = _cut_state(old_state[param], pieces[id(param)], tensor.dtype)
            group["params"] = mine
        return trained

    def _cut(self, limit: int) -> list[list[Unit]]:
        units = self._model.units
        if not self._known:
            return [list(units)]  # it may count its own steps: one call for everything
        groups: list[list[Unit]] = []
        size = 0
        for unit in units:
            if not groups or size + unit.shard_numel > limit:
                groups.append([])
                size = 0
            groups[-1].append(unit)
            size += unit.shard_numel
        return groups

    def _unfreeze(self, unit: Unit) -> None:
        """A frozen unit got a master copy: its pieces now live there."""
        if unit.master is not None:
            for piece, tensor in self._pieces[id(unit)]:
                tensor.data = piece.view(unit.master)
        self._warn_about_untrained()

    def _warn_about_untrained(self) -> None:
        missing = [
            self._names[id(slot.param)]
            for u in self._model.units
            for slot in u.slots
            if slot.param.requires_grad and id(slot.param) not in self._trained
        ]
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            warnings.warn(f"these parameters want gradients but no optimizer group holds them: {shown}", stacklevel=4)


def _check_closure(inner: Optimizer) -> None:
    closure = inspect.signature(type(inner).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer {type(inner).__name__} evaluates the loss itself, several times a step (a closure); the "
            "engine's loop of forward, backward and step cannot serve it. Use an optimizer that steps from gradients."
        )


def _check_class(inner: Optimizer, model: ShardedModel, allow_untested: bool) -> None:
    if type(inner) in ELEMENTWISE or model.mesh.shard.size == 1 or not model.policy.shard_optimizer:
        return
    name = type(inner).__name__
    if type(inner).__module__.startswith("torch.optim"):
        raise ConfigError(
            f"optimizer {name} needs whole parameters, and ZeRO stage {model.policy.stage} gives each rank a slice; "
            "use stage 0, or an optimizer that steps each element by itself (AdamW, SGD, ...)."
        )
    if not allow_untested:
        raise ConfigError(
            f"it is not known whether the optimizer {name} steps each element by itself, which ZeRO stage "
            f"{model.policy.stage} needs. If it does, set `zero_allow_untested_optimizer` to true; else use stage 0."
        )


def _cut_state(state: Mapping[str, Any], piece: Piece, dtype: torch.dtype) -> dict[str, Any]:
    cut: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == piece.slot.shape and value.dim() > 0:
            part = value.detach().reshape(-1)[piece.param_start : piece.param_start + piece.numel].clone()
            if part.is_floating_point():
                part = part.to(dtype)  # made over a low-precision model, it now stands beside an fp32 master
            cut[key] = part.view(piece.slot.shape) if piece.whole else part
        else:
            cut[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return cut
