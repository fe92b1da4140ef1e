"""A state that is saved with the last batch of an epoch: the epoch is over, whichever way a script counts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from shardwise.accelerator.loaders import skip_first_batches
from shardwise.data.dispatch import DispatchedLoader
from shardwise.data.prepared import PreparedLoader
from shardwise.dist import Axis, Mesh
from tests.ranks import RankPools


def make(dispatched: bool, axis: Axis) -> Any:
    data = DataLoader(range(7), 2, shuffle=True, generator=torch.Generator().manual_seed(4))
    return (DispatchedLoader if dispatched else PreparedLoader)(data, axis=axis)


def read(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def ends(dispatched: bool) -> dict[str, Any]:
    mesh = Mesh.build(timeout=timedelta(seconds=20))
    try:
        return ways_on(dispatched, mesh.world)
    finally:
        mesh.close()


def ways_on(dispatched: bool, axis: Axis) -> dict[str, Any]:
    loader = make(dispatched, axis)
    wanted = [read(loader) for _ in range(3)]
    loader = make(dispatched, axis)
    state: dict[str, Any] = {}
    for _ in loader:
        state = loader.state_dict()
    found: dict[str, Any] = {"wanted": wanted}
    ways = {
        "goes on": lambda again: [read(again), read(again)],
        "counts the next": lambda again: (again.set_epoch(1), [read(again), read(again)])[1],
        "skips none": lambda again: [read(skip_first_batches(again, 0)), read(again)],
        "comes back": lambda again: (again.set_epoch(0), [read(again), read(again), read(again)])[1],
    }
    for name, way in ways.items():
        again = make(dispatched, axis)
        again.load_state_dict(state)
        found[name] = way(again)
        found[f"{name}: epoch"] = again.epoch
    return found


@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_an_epoch_is_over_with_its_last_batch(ranks: RankPools, size: int, dispatched: bool) -> None:
    for found in ranks(size).run(ends, dispatched):
        _, second, third = found["wanted"]
        for way in ("goes on", "counts the next", "skips none"):
            assert found[way] == [second, third], way
        assert found["comes back"] == [[], second, third]
        assert {n for name, n in found.items() if name.endswith(": epoch")} == {3}
