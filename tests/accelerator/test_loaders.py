"""``prepare_data_loader`` and ``skip_first_batches``: what Accelerate's users rely on, and what they ran into.

Numbers in the names are those of the reports in Accelerate's tracker whose behaviour must not come back.
"""

from __future__ import annotations

import pickle
import sys
import types
import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from shardwise import ConfigError
from shardwise.accelerator.current import forget
from shardwise.accelerator.loaders import (
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from shardwise.accelerator.process import Processes
from shardwise.data.looped import LoopedLoader
from shardwise.dist.objects import gather_values
from shardwise.dist.values import pack, unpack
from tests.ranks import RankPools


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(range(self.length))


class Listening(Dataset[int]):
    """Notes the epochs that it is told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        return i


def prepare(loader: DataLoader[Any], **options: Any) -> Any:
    return prepare_data_loader(loader, processes=Processes(cpu=True), **options)


def numbers(batches: Any) -> list[list[int]]:
    return [b.tolist() for b in batches]


def parts(make: Any, n: int, **options: Any) -> list[Any]:
    """The loaders of all of n ranks, in this one process."""
    return [prepare(make(), num_processes=n, process_index=r, **options) for r in range(n)]


# -- kinds and what they show of themselves --


def test_the_kind_of_loader() -> None:
    plain = DataLoader(range(8), 2)
    assert type(prepare(plain)) is DataLoaderShard and isinstance(prepare(plain), DataLoader)
    assert type(prepare(plain, put_on_device=True, dispatch_batches=True)) is DataLoaderDispatcher
    assert type(prepare(DataLoader(Stream(4)), put_on_device=True)) is DataLoaderDispatcher
    assert type(prepare(DataLoader(Stream(4)), put_on_device=True, dispatch_batches=False)) is DataLoaderShard
    assert type(prepare(DataLoader(Stream(4)))) is DataLoaderShard
    prepared = prepare(plain)
    assert prepare(prepared) is prepared
    with pytest.raises(ConfigError, match="dispatch_batches=True needs put_on_device=True"):
        prepare(plain, dispatch_batches=True)
    with pytest.raises(ConfigError, match=r"expected a torch.utils.data.DataLoader, got a list"):
        prepare([1, 2])
    with pytest.raises(ConfigError, match="process_index: 3 is not one of 2 parts"):
        prepare(plain, num_processes=2, process_index=3)


def test_a_prepared_loader_shows_what_it_is_made_of() -> None:
    data = range(20)
    loader = DataLoader(data, 2, shuffle=True, drop_last=True)
    for prepared in parts(lambda: loader, 2):
        assert prepared.dataset is data and len(prepared) == 5 and prepared.batch_size == 2 and prepared.drop_last
        assert prepared.batch_sampler.batch_sampler is loader.batch_sampler
        assert (prepared.sampler, prepared.batch_sampler.sampler) == (loader.sampler, loader.sampler)
        assert (prepared.total_batch_size, prepared.total_dataset_length) == (4, 20)
    split = parts(lambda: loader, 2, split_batches=True)[1]
    assert (split.batch_size, split.total_batch_size, len(split)) == (1, 2, 10) and split.split_batches
    stream = parts(lambda: DataLoader(Stream(9), 4), 2, split_batches=True)[0]
    assert (stream.batch_size, stream.total_batch_size) == (2, 4)


def test_even_batches_is_a_live_value_of_the_batch_sampler() -> None:
    first, second = parts(lambda: DataLoader(range(7), 2), 2)
    assert first.batch_sampler.even_batches is True
    assert (numbers(first), numbers(second)) == ([[0, 1], [4, 5]], [[2, 3], [6, 0]])
    second.batch_sampler.even_batches = False
    assert numbers(second) == [[2, 3], [6]] and not second.even_batches and second.remainder == 0
    second.even_batches = True
    assert second.batch_sampler.even_batches and numbers(second)[-1] == [6, 0]


class Permuted:
    """A batch sampler that is none of torch's, and has no sampler inside."""

    def __init__(self, batch_size: int | None, *batches: list[int]) -> None:
        if batch_size is not None:
            self.batch_size = batch_size
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def test_882_679_2392_2285_loaders_without_a_batch_sampler_of_torch() -> None:
    def own() -> DataLoader[Any]:
        return DataLoader(range(8), batch_sampler=Permuted(2, [7, 6], [5, 4], [3, 2], [1]))

    loaders = parts(own, 2)
    assert all(type(dl.batch_sampler.batch_sampler) is Permuted for dl in loaders)
    assert [numbers(dl) for dl in loaders] == [[[7, 6], [3, 2]], [[5, 4], [1, 7]]]
    assert [dl.remainder for dl in loaders] == [3, 3], "what was really read, not the length of the data"
    assert [dl.rows for dl in loaders] == [None, None]
    sized = parts(lambda: DataLoader(range(8), batch_sampler=Permuted(None, [7, 6], [5, 4], [3])), 2)
    assert [numbers(dl) for dl in sized] == [[[7, 6], [3]], [[5, 4], [7, 6]]]
    assert [(dl.remainder, dl.rows) for dl in sized] == [(1, 1), (1, 2)], "which cannot be gathered"
    assert [numbers(dl) for dl in parts(own, 2, split_batches=True)] == [[[7], [5], [3], [1]], [[6], [4], [2], [7]]]
    with pytest.raises(ConfigError, match="in 2 equal parts, but the batch size is not known"):
        parts(lambda: DataLoader(range(8), batch_sampler=Permuted(None, [1, 2])), 2, split_batches=True)

    def whole() -> DataLoader[Any]:
        sampler = BatchSampler(SequentialSampler(range(7)), 2, False)
        return DataLoader(TensorDataset(torch.arange(7)), batch_size=None, sampler=sampler)

    assert [[b[0].tolist() for b in dl] for dl in parts(whole, 2)] == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
    single = parts(lambda: DataLoader(range(5), batch_size=None), 2)
    assert [list(dl) for dl in single] == [[0, 2, 4], [1, 3, 0]]


def test_a_sampler_without_an_end_is_read_as_it_comes() -> None:
    class Endless:
        batch_size = 2

        def __iter__(self) -> Any:
            yield from ([i, i + 1] for i in range(0, 1000, 2))

    prepared = prepare(DataLoader(range(1000), batch_sampler=Endless()), num_processes=2, process_index=1)
    for batch in prepared:
        assert batch.tolist() == [2, 3] and prepared.remainder == -1
        break


REMAINDERS = [
    # loader, options, remainder on 2 ranks
    (lambda: DataLoader(range(8), 2), {}, 0),  # 952: a full last round is kept whole
    (lambda: DataLoader(range(7), 2), {}, 3),
    (lambda: DataLoader(range(7), 2, drop_last=True), {}, 0),  # 3693
    (lambda: DataLoader(range(7), 2), {"even_batches": False}, 0),
    (lambda: DataLoader(range(7), 4), {"split_batches": True}, 3),
    (lambda: DataLoader(Stream(7), 2), {}, 3),
    (lambda: DataLoader(Stream(8), 2), {}, 0),
    (lambda: DataLoader(Stream(7), 2, drop_last=True), {}, 0),
    (lambda: DataLoader(range(9), batch_sampler=Permuted(2, [0, 1], [2, 3], [4])), {}, 1),
    (lambda: DataLoader(range(9), batch_sampler=Permuted(2, [0, 1], [2, 3])), {}, 0),
    (lambda: DataLoader(range(9), batch_sampler=Permuted(None, [0, 1], [2, 3], [4])), {}, 1),
]


@pytest.mark.parametrize(("make", "options", "expected"), REMAINDERS)
def test_952_3693_the_remainder_is_what_is_not_repeated(make: Any, options: dict[str, Any], expected: int) -> None:
    for prepared in parts(make, 2, **options):
        for _ in range(2):
            found = [prepared.remainder for _ in prepared]
            assert found[-1] == expected
        alone = prepare(make())
        list(alone)
        assert alone.remainder == 0, "one process repeats nothing"


# -- epochs --


def test_2157_2333_2823_a_seedable_shuffle_depends_on_the_epoch_and_on_nothing_else() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(range(20), 4, shuffle=True)

    torch.manual_seed(5)
    first, second = parts(make, 2, use_seedable_sampler=True)
    assert isinstance(first.batch_sampler.batch_sampler.sampler, SeedableRandomSampler)
    epochs = [numbers(first) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    torch.rand(3)
    for epoch in (1, 1, 0, 2):
        first.set_epoch(epoch)
        assert numbers(first) == epochs[epoch] and first.epoch == first.iteration == epoch + 1
    # The order is that of torch's sampler with the seed `initial_seed + epoch`.
    second.set_epoch(2)
    expected = list(RandomSampler(range(20), generator=torch.Generator().manual_seed(7)))
    mine = [i for batch in epochs[2] for i in batch]
    theirs = [i for batch in numbers(second) for i in batch]
    assert (mine[:4], theirs[:4], mine[4:8]) == (expected[:4], expected[4:8], expected[8:12])
    other = prepare(make(), use_seedable_sampler=True, data_seed=6)
    torch.manual_seed(99)
    again = prepare(make(), use_seedable_sampler=True, data_seed=6)
    assert numbers(other) == numbers(again) != numbers(prepare(make(), use_seedable_sampler=True, data_seed=7))


def test_seedable_wherever_the_shuffle_is() -> None:
    data = TensorDataset(torch.arange(8))
    shuffles = {
        "sampler": DataLoader(range(8), 2, sampler=RandomSampler(range(8), replacement=True, num_samples=6)),
        "batch_sampler": DataLoader(range(8), batch_sampler=BatchSampler(RandomSampler(range(8)), 2, False)),
        "batches": DataLoader(data, None, sampler=BatchSampler(RandomSampler(range(8)), 2, False)),
        "single": DataLoader(range(8), None, sampler=RandomSampler(range(8))),
    }
    for name, loader in shuffles.items():
        outer = loader.batch_sampler or loader.sampler
        inner = getattr(outer, "sampler", outer)
        prepared = prepare(loader, use_seedable_sampler=True, data_seed=3)
        again = prepare(loader, use_seedable_sampler=True, data_seed=3)
        assert str(list(prepared)) == str(list(again)), name
        assert not isinstance(inner, SeedableRandomSampler), "the user's own is not changed"
    plain = prepare(DataLoader(range(4), 2), use_seedable_sampler=True)
    assert numbers(plain) == [[0, 1], [2, 3]]
    own = SeedableRandomSampler(range(4), data_seed=8)
    assert prepare(DataLoader(range(4), 2, sampler=own), use_seedable_sampler=True).sampler is own


def test_who_is_told_of_epochs() -> None:
    data = Listening()
    prepared = prepare(DataLoader(data, 2))
    list(prepared), list(prepared)
    prepared.set_epoch(5)
    list(prepared)
    assert data.told == [0, 1, 5, 5] and prepared.epoch == 6

    class Told(BatchSampler):
        epochs: ClassVar[list[int]] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    inner = SeedableRandomSampler(range(4))
    list(prepare(DataLoader(range(4), batch_sampler=Told(inner, 2, False)), num_processes=2, process_index=0))
    assert Told.epochs == [0] and inner.epoch == 1
    dispatched = prepare(DataLoader(data, 2), put_on_device=True, dispatch_batches=True)
    dispatched.set_epoch(3)
    list(dispatched)
    assert data.told[4:] == [3, 3] and dispatched.epoch == 4


# -- leaving batches out --


def make_skippable(kind: str) -> Any:
    generator = torch.Generator().manual_seed(4)
    loaders = {
        "map": lambda: prepare(DataLoader(range(11), 2, shuffle=True, generator=generator)),
        "global": lambda: prepare(DataLoader(range(11), 2, shuffle=True)),
        "seedable": lambda: prepare(DataLoader(range(11), 2, shuffle=True), use_seedable_sampler=True, data_seed=1),
        "stream": lambda: prepare(DataLoader(Stream(11), 2)),
        "dispatched": lambda: prepare(
            DataLoader(range(11), 2, shuffle=True, generator=generator), put_on_device=True, dispatch_batches=True
        ),
        "dispatched stream": lambda: prepare(DataLoader(Stream(11), 2), put_on_device=True),
    }
    torch.manual_seed(2)
    return loaders[kind]()


KINDS = ["map", "global", "seedable", "stream", "dispatched", "dispatched stream"]


@pytest.mark.parametrize("kind", KINDS)
def test_4071_a_skipped_epoch_is_the_one_that_the_loader_is_in_and_the_next_follows(kind: str) -> None:
    whole = make_skippable(kind)
    epochs = [numbers(whole) for _ in range(3)]
    loader = make_skippable(kind)
    assert numbers(loader) == epochs[0]
    skipped = skip_first_batches(loader, 2)
    assert type(skipped) is type(loader)
    assert numbers(skipped) == epochs[1][2:] and skipped.end_of_dataloader
    assert loader.epoch == 2 and numbers(loader) == epochs[2], "the given loader goes on with the next epoch"
    twice = skip_first_batches(skip_first_batches(make_skippable(kind), 1), 2)
    assert numbers(twice) == epochs[0][3:]


@pytest.mark.parametrize("kind", KINDS)
def test_2016_3242_3996_a_state_loaded_and_batches_skipped_are_not_left_out_twice(kind: str) -> None:
    whole = make_skippable(kind)
    epochs = [numbers(whole) for _ in range(4)]
    loader = make_skippable(kind)
    list(loader), list(loader)
    for step, _ in enumerate(loader):
        if step == 2:
            state = unpack(*pack(loader.state_dict()))
            break
    assert (state["epoch"], state["batches"]) == (2, 3)
    for skip in (True, False):
        torch.manual_seed(77)
        again = make_skippable(kind)
        if kind == "seedable":
            again.batch_sampler.sampler.initial_seed = 1234  # as in a program with another seed
        torch.manual_seed(78)
        again.load_state_dict(state)
        first = skip_first_batches(again, 3) if skip else again
        assert numbers(first) == epochs[2][3:]
        if kind != "global":  # whose next epoch depends on all numbers that were drawn meanwhile
            assert numbers(again) == epochs[3]
    # A state that is saved while the skipped loader runs is of the given one too.
    again.load_state_dict(state)
    for _ in skip_first_batches(again, 3):
        break
    assert (again.state_dict()["epoch"], again.state_dict()["batches"]) == (2, 4)
    # An epoch that the user chose is begun at its start.
    again.load_state_dict(state)
    again.set_epoch(2)
    assert again.state_dict()["batches"] == 3
    again.set_epoch(0)
    assert again.state_dict()["batches"] == 0 and (kind != "seedable" or numbers(again) == epochs[0])


def test_4295_4235_a_skipped_loader_keeps_everything() -> None:
    events: list[str] = []

    class Loops:
        def begin(self, loader: LoopedLoader) -> None:
            events.append("begin")

        def advanced(self, loader: LoopedLoader) -> None:
            events.append("last" if loader.end_of_dataloader else "next")

        def end(self, loader: LoopedLoader) -> None:
            events.append("end")

    options: dict[str, Any] = {
        "device": torch.device("meta"),
        "put_on_device": True,
        "non_blocking": True,
        "loops": Loops(),
        "rng_types": ["generator"],
    }
    loader = prepare(DataLoader(range(7), 2, drop_last=True), num_processes=2, process_index=0, **options)
    skipped: Any = skip_first_batches(loader, 1)
    assert len(skipped) == 0 and len(loader) == 1
    for name in ("device", "non_blocking", "drop_last", "rng_types", "split_batches", "even_batches", "batch_size"):
        assert getattr(skipped, name) == getattr(loader, name), name
    loader = prepare(DataLoader(range(9), 2), num_processes=2, process_index=0, **options)
    skipped = skip_first_batches(loader, 1)
    batches = [(b.device.type, skipped.remainder) for b in skipped]
    assert batches == [("meta", 1)] * 2 and len(skipped) == 2 and events == ["begin", "next", "last", "end"]
    second = skip_first_batches(prepare(DataLoader(range(9), 2), num_processes=2, process_index=1), 1)
    assert numbers(second) == [[6, 7], [1, 2]], "completed from the start of the epoch, not from what is left"

    def slice_fn(batch: Any, part: slice, process_index: int, num_processes: int) -> Any:
        return -batch[part]

    dispatched = prepare(
        DataLoader(range(6), 2), put_on_device=True, dispatch_batches=True, slice_fn_for_dispatch=slice_fn
    )
    assert numbers(skip_first_batches(dispatched, 2)) == [[-4, -5]]


def test_skipping_in_loaders_that_are_not_prepared() -> None:
    for loader in (DataLoader(range(7), 2), DataLoader(Stream(7), 2)):
        skipped = skip_first_batches(loader, 2)
        assert numbers(skipped) == [[4, 5], [6]] == numbers(skipped)
    assert len(skip_first_batches(DataLoader(range(7), 2), 2)) == 2
    assert numbers(SkipDataLoader(range(16), batch_size=4, skip_batches=2)) == [[8, 9, 10, 11], [12, 13, 14, 15]]
    data = TensorDataset(torch.arange(7))
    whole = DataLoader(data, None, sampler=BatchSampler(SequentialSampler(range(7)), 3, False))
    assert [b[0].tolist() for b in skip_first_batches(whole, 1)] == [[3, 4, 5], [6]]


# -- loaders that are cut by rank already --


def test_3520_4075_4199_a_loader_that_is_cut_already_is_not_cut_again() -> None:
    def distributed(size: int = 10) -> DataLoader[Any]:
        return DataLoader(range(size), 2, sampler=DistributedSampler(range(size), 2, 1, shuffle=False))

    with pytest.warns(UserWarning, match="its sampler is a DistributedSampler for 2 ranks"):
        prepared = prepare(distributed(), num_processes=2, process_index=1)
    assert numbers(prepared) == [[1, 3], [5, 7], [9]] and len(prepared) == 3 and prepared.remainder == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = prepare(distributed(), num_processes=2, process_index=1, already_sharded=True)
        assert numbers(said) == [[1, 3], [5, 7], [9]]
        stream = prepare(DataLoader(Stream(4), 2), num_processes=2, process_index=1, already_sharded=True)
        assert numbers(stream) == [[0, 1], [2, 3]]
    with pytest.warns(UserWarning, match="DistributedSampler"):
        odd = prepare(distributed(9), num_processes=2, process_index=1)
    assert odd.remainder == -1, "what it repeats is not at the end of a round"
    sampler = BatchSampler(DistributedSampler(range(8), 2, 0, shuffle=False), 2, False)
    with pytest.warns(UserWarning, match="DistributedSampler"):
        assert numbers(prepare(DataLoader(range(8), batch_sampler=sampler), num_processes=2, process_index=0)) == [
            [0, 2],
            [4, 6],
        ]


class FromFiles(IterableDataset[int]):
    """As ``datasets.IterableDataset``: a stream of several files."""

    def __init__(self, files: list[list[int]]) -> None:
        self.files = files
        self._distributed: Any = None

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> FromFiles:
        return FromFiles(self.files[index::num_shards])

    def __iter__(self) -> Any:
        return iter([i for file in self.files for i in file])


def test_a_stream_of_files_is_shared_by_files(monkeypatch: pytest.MonkeyPatch) -> None:
    data = FromFiles([[0, 1], [2, 3], [4, 5]])
    cut = [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]
    assert [numbers(dl) for dl in parts(lambda: DataLoader(data, 2), 2)] == cut, "a stream like any other"
    module = types.ModuleType("datasets")
    module.IterableDataset = FromFiles  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert [numbers(dl) for dl in parts(lambda: DataLoader(data, 2), 2)] == [[[0, 1], [4, 5]], [[2, 3]]]
    assert numbers(parts(lambda: DataLoader(data, 2), 4)[3]) == [[0, 1]], "fewer files than ranks"
    data._distributed = types.SimpleNamespace(rank=0, world_size=2)
    with pytest.warns(UserWarning, match="split by `split_dataset_by_node`"):
        assert numbers(prepare(DataLoader(data, 2), num_processes=2, process_index=0)) == [[0, 1], [2, 3], [4, 5]]


def test_ranks_along_tp_and_cp_read_the_same() -> None:
    class Dimension:
        def __init__(self, size: int) -> None:
            self.length = size

        def size(self) -> int:
            return self.length

    class DeviceMesh(dict[str, Dimension]):
        mesh_dim_names = ("dp_shard", "tp")

    mesh = DeviceMesh(dp_shard=Dimension(2), tp=Dimension(2))
    found = parts(lambda: DataLoader(range(8), 2), 4, torch_device_mesh=mesh)
    assert [numbers(dl) for dl in found] == [[[0, 1], [4, 5]]] * 2 + [[[2, 3], [6, 7]]] * 2


# -- pickle --


def test_pickled_loaders() -> None:
    for options in ({}, {"dispatch_batches": True}):
        loader = prepare(
            DataLoader(range(7), 2, shuffle=True), put_on_device=True, rng_types=["torch", "generator"], **options
        )
        next(iter(loader))
        again = pickle.loads(pickle.dumps(loader))
        torch.manual_seed(1)
        first = numbers(again)
        torch.manual_seed(1)
        assert first == numbers(loader)


def pickled_on_ranks() -> list[Any]:
    processes = Processes(cpu=True)
    loader = prepare_data_loader(
        DataLoader(range(7), 2, shuffle=True), put_on_device=True, rng_types=["generator"], processes=processes
    )
    raw = pickle.dumps(loader)
    torch.manual_seed(processes.process_index)
    found = numbers(pickle.loads(raw))
    other = gather_values(processes.axis, raw, torch.device("cpu"), "pickles")[1 - processes.process_index]
    stranger = pickle.loads(other)
    with pytest.raises(ConfigError, match="was pickled by rank"):
        next(iter(stranger))
    return found


def test_a_pickled_loader_finds_its_ranks_again(ranks: RankPools) -> None:
    first, second = ranks(2).run(pickled_on_ranks)
    assert sorted({i for batch in first + second for i in batch}) == list(range(7))


def test_constructors_as_accelerate_has_them() -> None:
    forget()
    for kind in (DataLoaderShard, DataLoaderDispatcher):
        loader: Any = kind(range(16), batch_size=4)
        for _ in range(2):
            assert [loader.end_of_dataloader for _ in loader] == [False, False, False, True]
        loader = kind(range(16), batch_size=4, skip_batches=2, iteration=3)
        assert numbers(loader) == [[8, 9, 10, 11], [12, 13, 14, 15]] == numbers(loader)
        assert (len(loader), loader.epoch, len(skip_first_batches(loader, 1))) == (2, 5, 1)
        loader = kind(range(16), batch_size=4, _drop_last=True, _non_blocking=True, torch_device_mesh="mesh")
        skipped: Any = skip_first_batches(loader, 1)
        assert (skipped._drop_last, skipped._non_blocking, skipped.torch_device_mesh) == (True, True, "mesh")
        inner = SeedableRandomSampler(range(16))
        loader = kind(range(16), batch_sampler=BatchSampler(inner, 4, False))
        loader.set_epoch(1)
        assert inner.epoch == 1 == loader.iteration
        assert len(next(iter(skip_first_batches(loader, 2)))) == 4 and inner.epoch == 1
    with pytest.raises(ConfigError, match="rng_types: `dice` is not known"):
        DataLoaderShard(range(2), rng_types=["dice"])
    forget()


# -- several ranks --


def synchronised() -> list[Any]:
    processes = Processes(cpu=True)
    torch.manual_seed(processes.process_index)
    loader = prepare_data_loader(DataLoader(range(4), 2), rng_types=["torch", "generator"], processes=processes)
    list(loader)
    drawn = torch.rand(()).item()
    # 2268: nobody gave the ranks one seed, and yet they read one order.
    torch.manual_seed(processes.process_index)
    seedable = prepare_data_loader(
        DataLoader(range(8), 2, shuffle=True), use_seedable_sampler=True, processes=processes
    )
    return [drawn, [numbers(seedable) for _ in range(2)]]


def test_2268_ranks_without_a_common_seed_share_one_order(ranks: RankPools) -> None:
    first, second = ranks(2).run(synchronised)
    assert first[0] == second[0], "rng_types"
    for epoch in range(2):
        assert sorted(i for rank in (first, second) for batch in rank[1][epoch] for i in batch) == list(range(8))
    assert first[1][0] != first[1][1]


def all_alone() -> list[Any]:
    """Loaders that not all ranks read: nothing may wait."""
    processes = Processes(cpu=True)
    if processes.process_index == 1:
        return []
    data = DataLoader(range(6), 2, shuffle=True, generator=torch.Generator().manual_seed(1))
    alone = prepare_data_loader(data, num_processes=1, process_index=0, processes=processes)
    own = prepare_data_loader(data, already_sharded=True, processes=processes)
    return [sorted(i for b in numbers(dl) for i in b) for dl in (alone, own)]


def test_a_loader_that_one_rank_reads_waits_for_nobody(ranks: RankPools) -> None:
    assert ranks(2).run(all_alone)[0] == [list(range(6))] * 2


def finish(kind: str, state: Any, stop: int) -> list[Any]:
    """Three epochs, from a state or from the start, with random numbers drawn by the user in between."""
    processes = Processes(cpu=True)
    torch.manual_seed(11 + processes.process_index if state is None else 1000)
    generator = torch.Generator().manual_seed(processes.process_index) if kind == "generator" else None
    data: Any = Stream(25) if kind == "stream" else range(25)
    loader = DataLoader(data, 2, **({"shuffle": True, "generator": generator} if kind != "stream" else {}))
    prepared: Any = prepare_data_loader(loader, use_seedable_sampler=kind == "seedable", processes=processes)
    if state is not None:
        prepared.load_state_dict(state)
    found: list[Any] = []
    while prepared.epoch < 3:
        for batch in prepared:
            found.append(batch.tolist())
            torch.rand(processes.process_index + 1)
            if len(found) == stop:
                return [found, unpack(*pack(prepared.state_dict()))]
    return [found, None]


def in_order(found: list[Any]) -> list[int]:
    return [i for turn in zip(*(rank[0] for rank in found), strict=True) for batch in turn for i in batch]


@pytest.mark.parametrize("kind", ["generator", "global", "seedable", "stream"])
def test_4195_2016_the_third_epoch_is_finished_on_the_same_and_on_other_ranks(ranks: RankPools, kind: str) -> None:
    whole = in_order(ranks(2).run(finish, kind, None, -1))
    assert len(whole) == 3 * 28 and set(whole[56:81]) == set(range(25))
    halfway = ranks(2).run(finish, kind, None, 7 + 7 + 3)
    state = halfway[0][1]
    assert in_order(halfway) == whole[: 56 + 12] and (state["epoch"], state["batches"]) == (2, 6)
    for size in (1, 2, 3):
        run = ranks(size).run if size > 1 else lambda f, *a: [f(*a)]
        rest = in_order(run(finish, kind, state, -1))
        assert rest[:13] == whole[68:81], f"on {size} ranks"
        assert rest[13:] == whole[56 : 56 + len(rest) - 13], "what is repeated is the start of the epoch"
