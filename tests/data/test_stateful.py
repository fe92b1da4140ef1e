"""Loaders that go on by the state of their data, through torchdata or, without that, what stands for it here."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from shardwise import ConfigError
from shardwise.data.dispatch import DispatchedLoader
from shardwise.data.prepared import PreparedLoader
from shardwise.data.stateful import ResumableShard
from shardwise.dist import Mesh
from shardwise.dist.values import pack, unpack


class StandIn(DataLoader[Any]):
    """What is used of torchdata's ``StatefulDataLoader``, without workers: the state is taken after a batch."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loaded: dict[str, Any] = {}
        self.yielded = 0

    def __iter__(self) -> Any:
        state, self.loaded = self.loaded, {}
        self.yielded = state.get("yielded", 0)
        stateful = hasattr(self.dataset, "load_state_dict")
        if state and stateful:
            self.dataset.load_state_dict(state["dataset"])
        kept, index = self.batch_sampler, self.batch_sampler
        if self.yielded and not isinstance(self.dataset, IterableDataset):
            vars(self)["batch_sampler"] = islice(index, self.yielded, None)  # type: ignore[arg-type]
        batches = super().__iter__()
        vars(self)["batch_sampler"] = kept
        return self._counted(batches)

    def _counted(self, batches: Any) -> Any:
        for batch in batches:
            self.yielded += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        data = self.dataset
        return {"yielded": self.yielded, "dataset": data.state_dict() if hasattr(data, "state_dict") else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


@pytest.fixture(autouse=True)
def torchdata(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("torchdata") is None:
        module = types.ModuleType("torchdata.stateful_dataloader")
        module.StatefulDataLoader = StandIn  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torchdata", types.ModuleType("torchdata"))
        monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", module)


class Stream(IterableDataset[int]):
    """A stream that counts what is read of it."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, 0

    def __iter__(self) -> Iterator[int]:
        for i in range(self.length):
            self.read += 1
            yield i


class Resumable(Stream):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.length:
            self.at, self.read = self.at + 1, self.read + 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def make(kind: str, n: int, rank: int) -> PreparedLoader:
    axis = Mesh.build(timeout=timedelta(seconds=20)).world
    generator = torch.Generator().manual_seed(4)
    loader: DataLoader[Any] = {
        "map": lambda: DataLoader(range(11), 2, shuffle=True, generator=generator),
        "stream": lambda: DataLoader(Stream(11), 2),
        "resumable": lambda: DataLoader(Resumable(11), 2),
    }[kind]()
    return PreparedLoader(loader, axis=axis, part=(n, rank), stateful=True)


def numbers(batches: Any) -> list[list[int]]:
    return [b.tolist() for b in batches]


@pytest.mark.parametrize("kind", ["map", "stream", "resumable"])
@pytest.mark.parametrize(("n", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_4165_every_position_is_resumed_also_a_second_time(kind: str, n: int, rank: int) -> None:
    whole = make(kind, n, rank)
    epochs = [numbers(whole) for _ in range(4)]
    loader = make(kind, n, rank)
    states = []
    for epoch in range(2):
        for i, batch in enumerate(loader, 1):
            assert batch.tolist() == epochs[epoch][i - 1]
            states.append((epoch, i, unpack(*pack(loader.state_dict()))))
    for epoch, i, state in states:
        again = make(kind, n, rank)
        again.load_state_dict(state)
        if i == len(epochs[epoch]):  # with its last batch an epoch is over
            epoch, i = epoch + 1, 0
        for batch in again:
            assert batch.tolist() == epochs[epoch][i]
            state = unpack(*pack(again.state_dict()))
            break
        if (i := i + 1) == len(epochs[epoch]):
            epoch, i = epoch + 1, 0
        later = make(kind, n, rank)
        later.load_state_dict(state)
        assert numbers(later) == epochs[epoch][i:]
        assert later.epoch == epoch + 1 and numbers(later) == epochs[epoch + 1]


def test_a_stream_with_a_state_is_not_read_again() -> None:
    read = {}
    for kind in ("stream", "resumable"):
        loader = make(kind, 2, 1)
        for i, _ in enumerate(loader):
            if i == 1:
                break
        state = unpack(*pack(loader.state_dict()))
        again = make(kind, 2, 1)
        again.load_state_dict(state)
        assert numbers(again) == [[10, 0]], "completed from the start of the epoch, which the state remembers"
        data: Any = again.dataset
        read[kind] = data.dataset.read
    # Of eleven samples eight were read before; the last chunk was the third, which had begun.
    assert read == {"stream": 11, "resumable": 7}


def test_the_state_of_another_rank_says_nothing_but_how_many() -> None:
    loader = make("resumable", 2, 0)
    for i, _ in enumerate(loader):
        if i == 1:
            break
    state = loader.state_dict()
    for n, rank, rest in ((2, 1, [[10, 0]]), (1, 0, [[8, 9], [10]]), (3, 0, [[8, 9]])):
        other = make("resumable", n, rank)
        other.load_state_dict(state)
        assert numbers(other) == rest


def test_a_dispatched_stream_goes_on_by_its_state() -> None:
    axis = Mesh.build(timeout=timedelta(seconds=20)).world
    loaders = [DispatchedLoader(DataLoader(Resumable(11), 2), axis=axis, stateful=True) for _ in range(2)]
    for i, _ in enumerate(loaders[0]):
        if i == 2:
            break
    loaders[1].load_state_dict(unpack(*pack(loaders[0].state_dict())))
    data: Any = loaders[1].dataset
    assert numbers(loaders[1]) == [[6, 7], [8, 9], [10]] and data.read == 5


def test_a_shard_of_a_resumable_stream_cuts_as_others_do() -> None:
    for length in (0, 3, 8, 11):
        for even in (True, False):
            for drop in (True, False):
                for rank in range(2):
                    shard = ResumableShard(Resumable(length), 2, drop, 2, rank, even_batches=even)
                    chunk = [list(range(i, min(i + 4, length))) for i in range(0, length, 4)]
                    expected: list[int] = []
                    for samples in chunk:
                        if len(samples) < 4:
                            samples = [] if drop else (samples + [*chunk[0]] * 4)[:4] if even else samples
                        expected += samples[2 * rank : 2 * rank + 2]
                    assert list(shard) == expected
                    assert shard.remainder == (length % 4 if even and not drop else 0)


def test_without_torchdata_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata", None)
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(ConfigError, match=r"package torchdata, which cannot be imported .* Install torchdata"):
        make("map", 1, 0)
