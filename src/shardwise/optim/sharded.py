"""Any optimizer, stepping the shards of a model instead of its parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.errors import NotYetSupported, ShardingError
from shardwise.optim.kinds import Kind, kind_of
from shardwise.optim.lamb import Lamb
from shardwise.optim.muon import Muon
from shardwise.optim.saved import ENTRY, Place, Saved
from shardwise.optim.shards import Shards, Window
from shardwise.optim.ways import ByElements, ByMatrices, ByNorms, ByWhole, Way
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
    got no gradient is not stepped. Optimizers that need whole parameters hold those that this rank steps instead
    (:class:`~shardwise.optim.ways.ByWhole`).

    Args:
        inner: the optimizer, over parameters of the model; changed in place, so that schedulers which hold it go on.
        model: the sharded model.
        sub_group_size: elements that are stepped at once, at the most.
        allow_untested: accept optimizer classes of which it is not known that they step each parameter by itself.

    Raises:
        ConfigError: the optimizer takes a closure, or is not known to step each parameter by itself.
        ShardingError: it holds a parameter that is not the model's.
    """

    def __init__(self, inner: Optimizer, model: ShardedModel, *, sub_group_size: int, allow_untested: bool) -> None:
        # Optimizer.__init__ is not called: groups, state and defaults are the inner optimizer's.
        self.optimizer = inner
        self.overflow = False
        self.stepping = False
        self.scaler: LossScaler = NoScaler()
        self._model = model
        _check_held(inner, model)
        cut = model.mesh.shard.size > 1 and model.policy.shard_optimizer
        self.kind = kind_of(inner, allow_untested=allow_untested, cut=cut)
        self._shards = Shards(model)
        self._way = _way(self.kind, inner, self._shards, _cut(model, self.kind, min(sub_group_size, STEP_NUMEL)))
        self._names = {id(slot.param): slot.name for u in model.units for slot in u.slots}
        self._trained = self._rebind(self._way.tensors())
        self._saved = Saved(inner, model, self.kind, self._places(self._way.tensors()))
        model.on_unfreeze = self._unfreeze
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
        """This rank's part of the optimizer's state, of the fp32 master weights and of the loss scale.

        The entry ``"shardwise"`` says whose it is. As in torch, tensors are the live ones: copy what must not move.
        """
        state = self.optimizer.state_dict()
        return state if self._model.closed else {**state, ENTRY: self._saved.entry(self.scaler)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave on the same rank of the same layout. All ranks must call this.

        Load the model's weights before: from low-precision ones the masters are made anew, and these are loaded here.
        A state without the entry ``"shardwise"`` must have the sizes of this rank's pieces.

        Raises:
            ShardingError: on all ranks, if it is another rank's or another layout's on any.
        """
        if self._model.closed:
            raise ShardingError("the engine is destroyed; load into the plain optimizer, which has whole parameters.")
        self._saved.check(state_dict)
        self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != ENTRY})
        self._saved.restore(state_dict.get(ENTRY, {}), self.scaler)

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
        window = Window({id(g.unit): g for g in self._model.grads}, scale, agreement.used)
        self.stepping = True
        try:
            if found_inf is not None:
                self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            handles = self._way.step(window)
        finally:
            self.stepping = False
            if found_inf is not None:
                del self.optimizer.found_inf  # type: ignore[attr-defined]
        for handle in handles:
            handle.wait()

    def close(self) -> None:
        """Give the inner optimizer its parameters back, without state: this rank has only a part of that."""
        self.optimizer.state.clear()
        for group, params in zip(self.optimizer.param_groups, self._given, strict=True):
            group["params"] = params
        self._shards.pieces.clear()

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state and master weights on this rank."""
        state = sum(
            v.numel() * v.element_size() for s in self.state.values() for v in s.values() if isinstance(v, torch.Tensor)
        )
        return state + sum(
            u.master.numel() * u.master.element_size() for u in self._model.units if u.master is not None
        )

    def _rebind(self, tensors: Mapping[int, nn.Parameter]) -> set[int]:
        """Put what this rank steps into the inner optimizer's groups in place of the parameters, state included."""
        pieces = {id(piece.slot.param): piece for piece, _ in self._shards.of(self._model.units)}
        old_state = dict(self.optimizer.state)
        self.optimizer.state.clear()
        self._given = [list(group["params"]) for group in self.optimizer.param_groups]
        for group, params in zip(self.optimizer.param_groups, self._given, strict=True):
            group["params"] = [tensors[id(p)] for p in params if id(p) in tensors]
            for param in params:
                if param in old_state and id(param) in tensors:
                    tensor = tensors[id(param)]
                    self.optimizer.state[tensor] = _cut_state(old_state[param], pieces[id(param)], tensor)
        return {id(param) for params in self._given for param in params}

    def _places(self, tensors: Mapping[int, nn.Parameter]) -> list[list[Place]]:
        """Where what each group of the inner optimizer holds lies in the model."""
        pieces = {id(piece.slot.param): piece for piece, _ in self._shards.of(self._model.units)}
        place_of = {}
        for key, tensor in tensors.items():
            piece = pieces[key]
            whole = tensor.numel() == piece.slot.numel
            start, numel = (0, tensor.numel()) if whole else (piece.param_start, piece.numel)
            place_of[id(tensor)] = (piece.slot.name, start, numel)
        return [[place_of[id(t)] for t in group["params"]] for group in self.optimizer.param_groups]

    def _unfreeze(self, unit: Unit) -> None:
        self._shards.follow_master(unit)
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


def _check_held(inner: Optimizer, model: ShardedModel) -> None:
    known = {id(slot.param) for u in model.units for slot in u.slots}
    for number, group in enumerate(inner.param_groups):
        for param in group["params"]:
            if id(param) not in known:
                raise ShardingError(
                    f"group {number} of the optimizer holds a parameter of shape {tuple(param.shape)} that is not "
                    "a parameter of the model; give shardwise.initialize the module that contains it."
                )


def _way(kind: Kind, inner: Optimizer, shards: Shards, groups: list[list[Unit]]) -> Way:
    if kind is Kind.NORMS and isinstance(inner, Lamb):
        return ByNorms(inner, shards, groups)
    if kind is Kind.MATRICES and isinstance(inner, Muon):
        return ByMatrices(inner, shards, groups)
    if kind is Kind.ELEMENTS:
        return ByElements(inner, shards, groups)
    return ByWhole(inner, shards, groups, always=kind is Kind.UNKNOWN)


def _cut(model: ShardedModel, kind: Kind, limit: int) -> list[list[Unit]]:
    """Units that are stepped at once: the same on all ranks."""
    if kind is Kind.UNKNOWN:
        return [list(model.units)]  # it may count its own steps: one call for everything
    groups: list[list[Unit]] = []
    size = 0
    for unit in model.units:
        if not groups or size + unit.shard_numel > limit:
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += unit.shard_numel
    return groups


def _cut_state(state: Mapping[str, Any], piece: Piece, tensor: torch.Tensor) -> dict[str, Any]:
    """The part of a whole parameter's state that belongs to the tensor that is stepped in its place."""
    cut: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == piece.slot.shape and value.dim() > 0:
            part = value.detach()
            if tensor.shape != value.shape:
                part = part.reshape(-1)[piece.param_start : piece.param_start + piece.numel]
            # Made over a low-precision model, it now stands beside fp32 weights.
            part = part.to(tensor.dtype, copy=True) if part.is_floating_point() else part.clone()
            cut[key] = part.view(tensor.shape)
        else:
            cut[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return cut
