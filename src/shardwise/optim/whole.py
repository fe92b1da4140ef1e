"""Whole parameters out of slices: who makes them whole, and how slices get there and back."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.dist import Axis
from shardwise.sharding import Unit
from shardwise.sharding.unit import REDUCE, Slot


@dataclass(frozen=True)
class Spread:
    """Where the slices of one parameter lie.

    Attributes:
        slot: the parameter.
        sizes: by position on the shard axis, the elements that this rank holds, in order.
        owner: the position that makes it whole: one that holds a slice.
    """

    slot: Slot
    sizes: tuple[int, ...]
    owner: int

    @property
    def split(self) -> bool:
        """Whether several ranks hold a slice."""
        return sum(size > 0 for size in self.sizes) > 1


class Wholes:
    """Makes the parameters of some units whole, each on one of the ranks that hold a slice, and cuts them again.

    The work is shared out by size: the largest parameter first, each to the rank with the least so far. Parameters
    that lie on one rank stay there. Each direction is one all-to-all on the shard axis for all parameters together;
    a rank sends what it holds of parameters that others own, at the most its shard.

    Args:
        units: the same on all ranks.
        work: what making a parameter whole and stepping it costs, to share it out.
    """

    def __init__(self, units: Sequence[Unit], work: Callable[[Slot], float]) -> None:
        self._axis: Axis = units[0].axis
        self._tag = units[0].tag(REDUCE)
        self._key = units[0].name
        self.spreads = _share_out(units, work)
        self._me = self._axis.position
        self._like = units[0].shard
        self._units = units
        self._unit_of = {id(slot.param): unit for unit in units for slot in unit.slots}

    def absent(self, slot: Slot) -> torch.Tensor:
        """What stands for a whole parameter while it is not here: its shape and dtype, and the memory of one number."""
        return self._like.new_zeros((), dtype=self.dtype(slot)).expand(slot.shape)

    def dtype(self, slot: Slot) -> torch.dtype:
        """In which the parameter is stepped: now, for a parameter that was frozen until now has a master since."""
        return _dtype(self._unit_of[id(slot.param)])

    def owned(self, slot: Slot) -> bool:
        """Whether this rank makes the parameter whole."""
        return self.spreads[id(slot.param)].owner == self._me

    def split(self, slots: Sequence[Slot]) -> list[Spread]:
        """Those of the parameters that several ranks hold slices of."""
        return [s for slot in slots if (s := self.spreads[id(slot.param)]).split]

    def gather(self, spreads: Sequence[Spread], slices: Mapping[int, torch.Tensor]) -> _Tensors:
        """Bring slices together. All ranks must call this with the same parameters.

        Args:
            spreads: which parameters, in the same order everywhere.
            slices: by parameter id, this rank's slices, flat.

        Returns:
            By parameter id, those that this rank owns, in their shapes.
        """
        out = [self._mine(s, slices) if s.owner == to else None for to in range(self._axis.size) for s in spreads]
        sent = [sum(s.sizes[self._me] for s in spreads if s.owner == to) for to in range(self._axis.size)]
        owned = [s for s in spreads if s.owner == self._me]
        received = [sum(s.sizes[source] for s in owned) for source in range(self._axis.size)]
        inbox = self._exchange(out, sent, received)
        whole: dict[int, list[torch.Tensor]] = {id(s.slot.param): [] for s in owned}
        for source, part in enumerate(torch.split(inbox, received)):
            for s, values in zip(owned, torch.split(part, [s.sizes[source] for s in owned]), strict=True):
                whole[id(s.slot.param)].append(values)
        return {id(s.slot.param): torch.cat(whole[id(s.slot.param)]).view(s.slot.shape) for s in owned}

    def scatter(self, spreads: Sequence[Spread], wholes: Mapping[int, torch.Tensor]) -> _Tensors:
        """The way back: cut what this rank owns, send the slices home. All ranks must call this.

        Returns:
            By parameter id, this rank's slices, flat.
        """
        size = self._axis.size
        owned: dict[int, list[Spread]] = {s.owner: [] for s in spreads}
        for s in spreads:
            owned[s.owner].append(s)
        mine = owned.get(self._me, [])
        cut = {id(s.slot.param): torch.split(wholes[id(s.slot.param)].reshape(-1), list(s.sizes)) for s in mine}
        out = [cut[id(s.slot.param)][to] for to in range(size) for s in mine]
        sent = [sum(s.sizes[to] for s in mine) for to in range(size)]
        received = [sum(s.sizes[self._me] for s in owned.get(source, [])) for source in range(size)]
        inbox = self._exchange(out, sent, received)
        slices: _Tensors = {}
        for source, part in enumerate(torch.split(inbox, received)):
            theirs = owned.get(source, [])
            for s, values in zip(theirs, torch.split(part, [s.sizes[self._me] for s in theirs]), strict=True):
                if values.numel():
                    slices[id(s.slot.param)] = values
        return slices

    def _mine(self, spread: Spread, slices: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        return slices[id(spread.slot.param)].reshape(-1) if spread.sizes[self._me] else None

    def _exchange(self, out: Sequence[torch.Tensor | None], sent: list[int], received: list[int]) -> torch.Tensor:
        dtype = self._travels()
        parts = [part.to(dtype) for part in out if part is not None and part.numel()]
        outbox = torch.cat(parts) if parts else self._like.new_empty(0, dtype=dtype)
        inbox = self._like.new_empty(sum(received), dtype=dtype)
        self._axis.all_to_all(outbox, sent, inbox, received, self._key, self._tag).wait()
        return inbox

    def _travels(self) -> torch.dtype:
        """Weights of several dtypes travel together, in the widest of them."""
        dtypes = [_dtype(unit) for unit in self._units if unit.dtype.is_floating_point]
        return functools.reduce(torch.promote_types, dtypes) if dtypes else self._like.dtype


_Tensors = dict[int, torch.Tensor]


def _dtype(unit: Unit) -> torch.dtype:
    return unit.dtype if unit.master is None else unit.master.dtype


def _share_out(units: Sequence[Unit], work: Callable[[Slot], float]) -> dict[int, Spread]:
    sizes = {id(slot.param): _sizes(unit, slot) for unit in units for slot in unit.slots}
    load: dict[int, float] = defaultdict(float)
    spreads: dict[int, Spread] = {}

    def give(slot: Slot, holders: Sequence[int]) -> None:
        owner = min(holders, key=lambda rank: (load[rank], rank))
        load[owner] += work(slot)
        spreads[id(slot.param)] = Spread(slot, sizes[id(slot.param)], owner)

    later = []
    for slot in (slot for unit in units for slot in unit.slots):
        holders = [rank for rank, size in enumerate(sizes[id(slot.param)]) if size]
        if len(holders) > 1:
            later.append((slot, holders))
        else:
            give(slot, holders or [0])  # an empty parameter lies nowhere
    # sorted() keeps the order of equals, so that all ranks come to the same result.
    for slot, holders in sorted(later, key=lambda pair: -work(pair[0])):
        give(slot, holders)
    return spreads


def _sizes(unit: Unit, slot: Slot) -> tuple[int, ...]:
    """Elements of a parameter by position on the shard axis; where shards are not cut, this rank has all of them."""
    k = unit.shard_numel
    if not unit.policy.shard_optimizer:
        return tuple(slot.numel if rank == unit.axis.position else 0 for rank in range(unit.axis.size))
    return tuple(max(0, min(slot.end, (rank + 1) * k) - max(slot.offset, rank * k)) for rank in range(unit.axis.size))
