"""How each kind of optimizer steps a sharded model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.optim.common import gradient
from shardwise.optim.lamb import Lamb
from shardwise.optim.muon import Muon
from shardwise.optim.shards import Shards, Window
from shardwise.optim.whole import Spread, Wholes
from shardwise.sharding import Unit
from shardwise.sharding.unit import Slot


class Way(Protocol):
    """Steps the inner optimizer of a :class:`~shardwise.optim.sharded.ShardedOptimizer`."""

    def tensors(self) -> dict[int, nn.Parameter]:
        """By parameter id, what the optimizer holds in the parameter's place on this rank, if anything."""

    def step(self, window: Window) -> list[Any]:
        """Step everything; returns handles of what is on its way to other ranks. All ranks must call this."""


class ByElements:
    """Each rank steps its pieces; no communication."""

    def __init__(self, inner: Optimizer, shards: Shards, groups: list[list[Unit]]) -> None:
        self._inner, self._shards, self._groups = inner, shards, groups

    def tensors(self) -> dict[int, nn.Parameter]:  # noqa: D102
        return _pieces(self._shards, self._groups)

    def step(self, window: Window) -> list[Any]:  # noqa: D102
        handles = []
        for units in self._groups:
            self._shards.bind(units, window)
            with _only(self._inner, [t for _, t in self._shards.of(units)], len(self._groups) > 1) as any_gradient:
                if any_gradient:
                    self._inner.step()
            handles += self._shards.land(units, window)
        return handles


class ByNorms:
    """Each rank steps its pieces in two passes (LAMB); between them, one sum of two numbers a parameter.

    Between the passes the directions stand in the place of the gradients; where those have 16 bits and the weights
    32, that is 4 bytes an element of this rank's shard for the time of the step.
    """

    def __init__(self, inner: Lamb, shards: Shards, groups: list[list[Unit]]) -> None:
        self._inner, self._shards, self._groups = inner, shards, groups
        self._slots = [slot for units in groups for unit in units for slot in unit.slots]

    def tensors(self) -> dict[int, nn.Parameter]:  # noqa: D102
        return _pieces(self._shards, self._groups)

    def step(self, window: Window) -> list[Any]:  # noqa: D102
        for units in self._groups:
            self._shards.bind(units, window)
        as_one_step(self._inner, self._both_passes)
        return [handle for units in self._groups for handle in self._shards.land(units, window)]

    def _both_passes(self) -> None:
        squares = self._inner.advance()
        pieces = [pair for units in self._groups for pair in self._shards.of(units)]
        of_slot = {id(piece.slot.param): squares[t] for piece, t in pieces if t in squares}
        unit = self._groups[0][0]
        zero = torch.zeros(2, dtype=torch.float64, device=unit.device)
        table = torch.stack([of_slot.get(id(slot.param), zero) for slot in self._slots])
        if unit.policy.shard_optimizer:
            unit.axis.sum_small(table, "norms of weights and directions")
        row = {id(slot.param): table[i] for i, slot in enumerate(self._slots)}
        self._inner.apply({t: row[id(piece.slot.param)] for piece, t in pieces if t in squares})


class ByMatrices:
    """Each rank steps its pieces; momenta of split matrices (Muon) travel to one rank and orthogonalized ones back.

    That is, for each group of units, two all-to-alls in which a rank sends at the most its part of the matrices that
    are cut; matrices that lie on one rank do not travel.
    """

    def __init__(self, inner: Muon, shards: Shards, groups: list[list[Unit]]) -> None:
        self._inner, self._shards, self._groups = inner, shards, groups
        self._matrices = {id(p) for group in inner.param_groups if group["use_muon"] for p in group["params"]}
        self._wholes = [Wholes(units, _matrix_work) for units in groups]

    def tensors(self) -> dict[int, nn.Parameter]:  # noqa: D102
        return _pieces(self._shards, self._groups)

    def step(self, window: Window) -> list[Any]:  # noqa: D102
        handles = []
        for units, wholes in zip(self._groups, self._wholes, strict=True):
            self._shards.bind(units, window)
            pieces = self._shards.of(units)
            slots = _used(units, window, self._matrices)
            slot_of: dict[torch.Tensor, Slot] = {t: piece.slot for piece, t in pieces}
            with _only(self._inner, [t for _, t in pieces], len(self._groups) > 1):
                as_one_step(self._inner, functools.partial(self._both_passes, slot_of, slots, wholes))
            handles += self._shards.land(units, window)
        return handles

    def _both_passes(self, slot_of: Mapping[torch.Tensor, Slot], slots: list[Slot], wholes: Wholes) -> None:
        updates = self._inner.advance()
        of_slot = {id(slot_of[u.param].param): u for u in updates}
        for update in updates:
            if not wholes.spreads[id(slot_of[update.param].param)].split:
                self._inner.apply(update, self._inner.direction(update.momentum, update.group))
        split = wholes.split(slots)
        if not split:
            return
        momenta = wholes.gather(split, {key: u.momentum for key, u in of_slot.items()})
        directions = {key: self._inner.direction(m, of_slot[key].group) for key, m in momenta.items()}
        for key, direction in wholes.scatter(split, directions).items():
            update = of_slot[key]
            self._inner.apply(update, direction.to(update.param.dtype))


class ByWhole:
    """One rank steps each parameter whole: weights and gradients of split ones travel to it, and the weights back.

    That is, for each group of units, three all-to-alls in which a rank sends at the most its shard; parameters that
    lie on one rank are stepped in place. The owner holds the state, whole, and the whole weights and gradients for
    the time of the step.

    Args:
        inner: the optimizer, over the model's parameters.
        shards: this rank's pieces.
        groups: units that are stepped at once.
        always: call the optimizer also where this rank has nothing to step: it may count its steps.
    """

    def __init__(self, inner: Optimizer, shards: Shards, groups: list[list[Unit]], *, always: bool) -> None:
        self._inner, self._shards, self._groups, self._always = inner, shards, groups, always
        self._held = {id(p) for group in inner.param_groups for p in group["params"]}
        self._wholes = [Wholes(units, lambda slot: slot.numel) for units in groups]
        self._whole: dict[int, nn.Parameter] = {}
        for wholes in self._wholes:
            for key, spread in wholes.spreads.items():
                if spread.split and wholes.owned(spread.slot):
                    self._whole[key] = nn.Parameter(wholes.absent(spread.slot))

    def tensors(self) -> dict[int, nn.Parameter]:  # noqa: D102
        split = {key for wholes in self._wholes for key, spread in wholes.spreads.items() if spread.split}
        pieces = {k: t for k, t in _pieces(self._shards, self._groups).items() if k not in split}
        return {**pieces, **self._whole}

    def step(self, window: Window) -> list[Any]:  # noqa: D102
        handles = []
        for units, wholes in zip(self._groups, self._wholes, strict=True):
            self._shards.bind(units, window)
            slots = _used(units, window, self._held)
            split = wholes.split(slots)
            pieces = {id(piece.slot.param): t for piece, t in self._shards.of(units)}
            self._bring(split, pieces, wholes)
            members = [t for key, t in self.tensors().items() if key in wholes.spreads]
            with _only(self._inner, members, len(self._groups) > 1) as any_gradient:
                if any_gradient or (self._always and slots):
                    self._inner.step()
            self._return(split, pieces, wholes)
            handles += self._shards.land(units, window)
        return handles

    def _bring(self, split: list[Spread], pieces: Mapping[int, nn.Parameter], wholes: Wholes) -> None:
        if not split:
            return
        mine = {id(s.slot.param) for s in split} & pieces.keys()
        weights = wholes.gather(split, {key: pieces[key].data for key in mine})
        grads = wholes.gather(split, {key: gradient(pieces[key]) for key in mine})
        for key, value in weights.items():
            tensor, dtype = self._whole[key], wholes.dtype(wholes.spreads[key].slot)
            tensor.data = value.to(dtype)
            tensor.grad = grads[key].to(dtype)

    def _return(self, split: list[Spread], pieces: Mapping[int, nn.Parameter], wholes: Wholes) -> None:
        if not split:
            return
        owned = {id(s.slot.param): s.slot for s in split if wholes.owned(s.slot)}
        for key, value in wholes.scatter(split, {key: self._whole[key].data for key in owned}).items():
            pieces[key].data.copy_(value)
        for key, slot in owned.items():
            self._whole[key].data = wholes.absent(slot)
            self._whole[key].grad = None


def as_one_step(inner: Optimizer, passes: Callable[[], None]) -> None:
    """Run what an optimizer does instead of ``step()`` with the hooks of a step around it."""
    # What the schedules of torch look at, to see that the optimizer went before them.
    inner._opt_called = True  # type: ignore[attr-defined]
    Optimizer.profile_hook_step(lambda *_: passes())(inner)


def _used(units: list[Unit], window: Window, among: set[int]) -> list[Slot]:
    """The parameters of these units that are stepped: the same on all ranks."""
    slots = [slot for unit in units for slot in unit.slots if id(slot.param) in among]
    return [slot for slot in slots if window.used.get(id(slot.param), False)]


@contextmanager
def _only(optimizer: Optimizer, tensors: list[nn.Parameter], some: bool) -> Iterator[bool]:
    """Show an optimizer only these of its parameters; gives whether any has a gradient."""
    before = [group["params"] for group in optimizer.param_groups]
    try:
        if some:
            ids = {id(t) for t in tensors}
            for group, params in zip(optimizer.param_groups, before, strict=True):
                group["params"] = [p for p in params if id(p) in ids]
        yield any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params


def _pieces(shards: Shards, groups: list[list[Unit]]) -> dict[int, nn.Parameter]:
    return {id(piece.slot.param): tensor for units in groups for piece, tensor in shards.of(units)}


def _matrix_work(slot: Slot) -> float:
    """Of an iteration on a matrix: its smaller side squared times the larger one."""
    return float(slot.numel * min(slot.shape)) if len(slot.shape) == 2 else 0.0
