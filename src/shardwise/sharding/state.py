"""``state_dict()`` and ``load_state_dict()`` of a sharded model speak whole tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardingError
from shardwise.sharding.gatherer import Scope
from shardwise.sharding.unit import Unit


class StateDictHooks:
    """Gathers a unit when its module's state is read or written, and releases it after.

    At stage 3 both are collective: every rank must call them.

    Args:
        scopes: modules whose units stay gathered while their whole subtree is visited.
        units: all units of the model.
    """

    def __init__(self, model: nn.Module, scopes: Iterable[Scope], units: list[Unit]) -> None:
        self._unit_of = {id(slot.param): u for u in units for slot in u.slots}
        self._held: list[Unit] = []
        self._clones: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        self._hooks: list[Any] = []
        held_by = {id(s.module): [u for u in s.units if u.releases] for s in scopes}
        for module in model.modules():
            if any(id(p) in self._unit_of for p in module._parameters.values()) or held_by.get(id(module)):
                self._hook(module, held_by.get(id(module), []))

    def remove(self) -> None:
        """Make ``state_dict`` and ``load_state_dict`` torch's own again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(self, module: nn.Module, scope_units: list[Unit]) -> None:
        def before_save(m: nn.Module, prefix: str, keep_vars: bool) -> None:
            self._gather(m, scope_units)

        def after_save(m: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
            self._copy_out(m, state_dict, prefix)
            self._release(m, scope_units)

        def before_load(
            m: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
        ) -> None:
            if metadata.get("assign_to_params_buffers", False):
                raise ShardingError("load_state_dict(assign=True) would replace sharded parameters; use assign=False.")
            self._gather(m, scope_units)
            self._set_masters(m, state_dict, prefix)

        def after_load(m: nn.Module, _incompatible: Any) -> None:
            for unit in {id(u): u for u in (*self._own(m), *scope_units)}.values():
                unit.adopt()
            self._release(m, scope_units)

        target: Any = module
        self._hooks += [
            target.register_state_dict_pre_hook(before_save),
            target.register_state_dict_post_hook(after_save),
            target.register_load_state_dict_pre_hook(before_load),
            target.register_load_state_dict_post_hook(after_load),
        ]

    def _own(self, module: nn.Module) -> list[Unit]:
        found = [self._unit_of.get(id(p)) for p in module._parameters.values() if p is not None]
        return list({id(u): u for u in found if u is not None}.values())

    def _gather(self, module: nn.Module, scope_units: list[Unit]) -> None:
        self._held.extend(scope_units)
        for unit in (*scope_units, *self._own(module)):
            unit.finish_gather()

    def _release(self, module: nn.Module, scope_units: list[Unit]) -> None:
        for unit in scope_units:
            self._held.remove(unit)
        for unit in (*self._own(module), *scope_units):
            if unit not in self._held:
                unit.release()

    def _copy_out(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        for name, param in module._parameters.items():
            unit = self._unit_of.get(id(param))
            key = prefix + name
            if param is None or unit is None or not unit.releases or key not in state_dict:
                continue
            # Tied parameters stay one tensor in the result, as they are in torch.
            known_key, known = self._clones.get(id(param), ("", None))
            clone = known() if known is not None else None
            if clone is None or state_dict.get(known_key) is not clone:
                clone = param.detach().clone()
                self._clones[id(param)] = (key, weakref.ref(clone))
            state_dict[key] = clone

    def _set_masters(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Take the fp32 masters from the loaded values themselves, not from what is left after the cast."""
        for name, param in module._parameters.items():
            unit = self._unit_of.get(id(param))
            value = state_dict.get(prefix + name)
            if unit is None or unit.master is None or not isinstance(value, torch.Tensor):
                continue
            for piece in unit.pieces():
                if piece.slot.param is param and value.shape == piece.slot.shape:
                    part = value.reshape(-1)[piece.param_start : piece.param_start + piece.numel]
                    unit.master[piece.start : piece.start + piece.numel].copy_(part)
