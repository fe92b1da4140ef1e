"""What a sharded optimizer saves beside torch's state: where it belongs, the fp32 masters, the loss scale."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise import _torch
from shardwise.errors import ShardingError
from shardwise.optim.kinds import Kind
from shardwise.precision import LossScaler
from shardwise.sharding import ShardedModel

ENTRY = "shardwise"

Place = tuple[str, int, int]
"""Of a piece: the parameter's name, the first element of it, and how many."""

_DO = (
    "Each rank must load what it saved itself, with the ranks, the stage and the sizes (buckets, sub-groups, "
    "thresholds) of the run that saved: put engine.global_rank into the name of the file."
)


class Saved:
    """Writes and reads the entry ``"shardwise"`` of an optimizer's state.

    Args:
        inner: the optimizer, over ``held``.
        model: the sharded model.
        kind: how the optimizer steps; says of which shape its state is.
        held: by group, where what it holds lies, in its order.
    """

    def __init__(self, inner: Optimizer, model: ShardedModel, kind: Kind, held: list[list[Place]]) -> None:
        self._inner, self._model, self._kind, self._held = inner, model, kind, held

    def entry(self, scaler: LossScaler) -> dict[str, Any]:
        """Plain values, and the masters by parameter name (live, as torch's state is)."""
        masters = {
            piece.slot.name: piece.view(unit.master)
            for unit in self._model.units
            if unit.master is not None
            for piece in unit.pieces()
        }
        world = self._model.mesh.world
        return {
            "rank": world.position,
            "world_size": world.size,
            "stage": self._model.policy.stage,
            "pieces": self._pieces(),
            "held": [list(group) for group in self._held],
            "masters": masters,
            "scaler": scaler.state_dict(),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that is not of this rank and layout. All ranks must call this, and all raise or none.

        Raises:
            ShardingError: with what differs and what to do.
        """
        problem = self._problem(state)
        if problem is None and any(unit.pins for unit in self._model.units):
            problem = "optimizer.load_state_dict inside GatheredParameters would be undone at its end; load outside."
        bad = self._tell(problem is not None)
        if problem is not None:
            raise ShardingError(problem)
        if bad:
            raise ShardingError(f"rank {bad[0]} was given an optimizer state that is not its own; see its error. {_DO}")

    def restore(self, entry: Mapping[str, Any], scaler: LossScaler) -> None:
        """Put the masters back, round them into the weights and bring these to all ranks. All ranks must call this."""
        masters: Mapping[str, torch.Tensor] = entry.get("masters", {})
        for unit in self._model.units:
            for piece in unit.pieces():
                if piece.slot.name in masters:
                    for kept in (unit.master, unit.shard):
                        if kept is not None:
                            piece.view(kept).copy_(masters[piece.slot.name])
        if self._tell(bool(masters)):
            for handle in self._model.publish(self._model.units):
                handle.wait()
        loaded = entry.get("scaler", {})
        if loaded and loaded.keys() == scaler.state_dict().keys():
            scaler.load_state_dict(loaded)

    def _tell(self, mine: bool) -> list[int]:
        """The ranks of which it holds."""
        world = self._model.mesh.world
        said = torch.zeros(world.size, dtype=torch.float64, device=self._model.device)
        if _torch.is_fake(said):
            return [world.position] if mine else []
        said[world.position] = float(mine)
        world.sum_small(said, "state of the optimizer")
        return [rank for rank, value in zip(world.ranks, said.tolist(), strict=True) if value]

    def _pieces(self) -> list[Place]:
        return [(p.slot.name, p.param_start, p.numel) for unit in self._model.units for p in unit.pieces()]

    def _problem(self, state: Mapping[str, Any]) -> str | None:
        entry = state.get(ENTRY)
        try:
            return self._wrong_size(state) if entry is None else self._wrong_place(entry)
        except (KeyError, TypeError, ValueError) as error:  # told like the rest, so that no rank waits for this one
            return f"this is no optimizer state, or not a whole one: {type(error).__name__}: {error}. {_DO}"

    def _wrong_place(self, entry: Mapping[str, Any]) -> str | None:
        theirs = [_places(entry["pieces"]), *map(_places, entry["held"])]
        ours = [self._pieces(), *self._held]
        if theirs == ours:
            return None
        world, policy = self._model.mesh.world, self._model.policy
        pairs = itertools.chain.from_iterable(
            itertools.zip_longest(a, b) for a, b in itertools.zip_longest(theirs, ours, fillvalue=())
        )
        saved, here = next(((a, b) for a, b in pairs if a != b), (None, None))
        return (
            f"this optimizer state is not of this rank and layout: it was saved by rank {entry['rank']} of "
            f"{entry['world_size']} at stage {entry['stage']} and has {_words(saved)} where rank {world.position} of "
            f"{world.size} at stage {policy.stage} has {_words(here)}. {_DO}"
        )

    def _wrong_size(self, state: Mapping[str, Any]) -> str | None:
        """Of a state without our entry, for example one that a plain optimizer saved."""
        unfit = "the optimizer state was not saved by a sharded optimizer and does not fit this rank's pieces: "
        hint = (
            " A whole model's state goes into the plain optimizer before shardwise.initialize, which cuts it; a rank's "
            "own comes from engine.optimizer.state_dict()."
        )
        groups, own = state["param_groups"], self._inner.param_groups
        counts = [len(group["params"]) for group in groups], [len(group["params"]) for group in own]
        if counts[0] != counts[1]:
            return f"{unfit}it has groups of {counts[0]} parameters, this rank steps {counts[1]}.{hint}"
        for group, mine, held in zip(groups, own, self._held, strict=True):
            for key, param, place in zip(group["params"], mine["params"], held, strict=True):
                for name, value in state["state"].get(key, {}).items():
                    if isinstance(value, torch.Tensor) and not self._fits(value.shape, param.shape):
                        return (
                            f"{unfit}{name} of {place[0]} has the shape {tuple(value.shape)}, and what this rank steps "
                            f"has {tuple(param.shape)}.{hint}"
                        )
        return None

    def _fits(self, state: Sequence[int], param: Sequence[int]) -> bool:
        if not state or self._kind is Kind.UNKNOWN:  # whose state may have any shape
            return True
        if self._kind is Kind.WHOLE:  # Adafactor keeps means of rows and of columns
            return len(state) == len(param) and all(s in (1, p) for s, p in zip(state, param, strict=True))
        return tuple(state) == tuple(param)


def _places(rows: Iterable[Sequence[Any]]) -> list[Place]:
    return [(str(name), int(start), int(numel)) for name, start, numel in rows]


def _words(place: Place | None) -> str:
    return "nothing" if place is None else f"elements {place[1]} to {place[1] + place[2] - 1} of {place[0]}"
