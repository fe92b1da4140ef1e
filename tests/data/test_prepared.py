"""Prepared loaders: the samples of one process in its order, the last batch known, and going on where one stopped."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from shardwise import ConfigError
from shardwise.data.prepared import PreparedLoader
from shardwise.dist import Axis, Mesh
from shardwise.dist.values import pack, unpack
from tests.ranks import RankPools


class Noisy(Dataset[torch.Tensor]):
    """Samples ``[number, noise]``; the noise is drawn from torch's global generator when a sample is read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(i)), torch.rand(())])


class Quiet(Noisy):
    """Without the noise: ranks that read other samples keep equal random states."""

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([float(i)])


class Stream(IterableDataset[int]):
    """Numbers in an order that its generator draws; with or without a length."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Sized(Stream):
    def __len__(self) -> int:
        return self.length


class Recorded:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.active: list[Any] = []

    def begin(self, loader: Any) -> None:
        self.events.append("begin")
        self.active.append(loader)

    def advanced(self, loader: Any) -> None:
        self.events.append("last" if loader.end_of_dataloader else "next")

    def end(self, loader: Any) -> None:
        self.events.append("end")
        self.active.remove(loader)


def alone() -> Axis:
    return Mesh.build(timeout=timedelta(seconds=20)).world


def numbers(batches: Any) -> list[list[int]]:
    return [[int(v) for v in (b[:, 0] if b.dim() == 2 else b)] for b in batches]


def shuffled(
    generated: bool, samples: int = 11, size: int = 3, data: type[Noisy] = Noisy, **options: Any
) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7) if generated else None
    return DataLoader(data(samples), size, shuffle=True, generator=generator, **options)


# -- one process --


@pytest.mark.parametrize("generated", [False, True])
def test_alone_it_is_the_loader_to_the_last_random_number(generated: bool) -> None:
    torch.manual_seed(3)
    plain = [batch for loader in [shuffled(generated)] for _ in range(3) for batch in loader]
    after = torch.rand(3)
    torch.manual_seed(3)
    prepared = PreparedLoader(shuffled(generated), axis=alone())
    found = [batch for _ in range(3) for batch in prepared]
    assert torch.equal(torch.cat(found), torch.cat(plain))
    assert torch.equal(torch.rand(3), after)
    assert prepared.epoch == 3 and len(prepared) == 4 and isinstance(prepared, DataLoader)


@pytest.mark.parametrize("samples", [0, 1, 3, 7])
def test_the_last_batch_is_known(samples: int) -> None:
    for loader in (DataLoader(Noisy(samples), 3), DataLoader(Stream(samples), 3), DataLoader(Sized(samples), 3)):
        loops = Recorded()
        prepared = PreparedLoader(loader, axis=alone(), loops=loops)
        ends = [prepared.end_of_dataloader for _ in prepared]
        assert ends == [False] * (len(ends) - 1) + [True] * bool(samples)
        assert loops.events == ["begin", *["next"] * (len(ends) - 1), *["last"] * bool(samples), "end"]


def test_a_loop_that_is_left_early_is_over() -> None:
    loops = Recorded()
    outer, inner = (PreparedLoader(DataLoader(Noisy(6), 2), axis=alone(), loops=loops) for _ in range(2))
    for _ in outer:
        for _ in inner:
            assert loops.active == [outer, inner]
            break
        assert loops.active == [outer]
        with pytest.raises(ZeroDivisionError):
            for _ in inner:
                raise ZeroDivisionError
        break
    assert loops.active == [] and (outer.epoch, inner.epoch) == (0, 0)
    assert len(list(outer)) == 3 and outer.epoch == 1, "the next loop reads the epoch from its start"
    assert [a.tolist() == b.tolist() for a, b in zip(outer, inner, strict=True)] != [] and loops.active == []


def test_loaders_without_batches_of_their_own() -> None:
    whole = DataLoader(Listed(7), batch_size=None, sampler=BatchSampler(SequentialSampler(range(7)), 3, False))
    assert numbers(PreparedLoader(whole, axis=alone())) == [[0, 1, 2], [3, 4, 5], [6]]
    single = PreparedLoader(DataLoader(Noisy(3), batch_size=None), axis=alone())
    assert [int(b[0]) for b in single] == [0, 1, 2] and single.end_of_dataloader


class Listed(Noisy):
    def __getitem__(self, i: Any) -> torch.Tensor:
        return torch.tensor(i)


def test_batches_are_moved_and_other_things_left() -> None:
    def collate(items: list[Any]) -> Any:
        return {"x": torch.stack(items), "text": ["a"] * len(items), "none": None, "pair": (torch.ones(1), 3)}

    loader = DataLoader(Noisy(2), 2, collate_fn=collate)
    (batch,) = PreparedLoader(loader, axis=alone(), device=torch.device("meta"))
    assert batch["x"].device.type == "meta" == batch["pair"][0].device.type
    assert batch["text"] == ["a", "a"] and batch["none"] is None and batch["pair"][1] == 3


def test_workers_read_the_same_samples() -> None:
    prepared = PreparedLoader(shuffled(True, num_workers=2), axis=alone())
    assert numbers(prepared) == numbers(shuffled(True))
    assert prepared.end_of_dataloader and prepared.epoch == 1


# -- going on --


def kept(state: dict[str, Any]) -> dict[str, Any]:
    return unpack(*pack(state))


@pytest.mark.parametrize("generated", [False, True])
def test_every_position_of_three_epochs_is_resumed_exactly(generated: bool) -> None:
    torch.manual_seed(5)
    prepared = PreparedLoader(shuffled(generated), axis=alone())
    positions, batches = [], []
    for _ in range(3):
        positions.append((kept(prepared.state_dict()), torch.get_rng_state(), len(batches)))
        for batch in prepared:
            batches.append(batch)
            torch.rand(2)  # the model's dropout
            positions.append((kept(prepared.state_dict()), torch.get_rng_state(), len(batches)))
    for state, random, read in positions:
        torch.manual_seed(99)
        again = PreparedLoader(shuffled(generated), axis=alone())
        again.load_state_dict(state)
        assert kept(again.state_dict())["batches"] == state["batches"], "a state that was not used yet is kept"
        torch.set_rng_state(random)
        rest = []
        for _ in range(again.epoch, 3):
            for batch in again:
                rest.append(batch)
                torch.rand(2)
        assert len(rest) == len(batches) - read
        assert all(torch.equal(a, b) for a, b in zip(rest, batches[read:], strict=True))


def test_a_stream_is_resumed() -> None:
    for cls in (Stream, Sized):
        prepared = PreparedLoader(DataLoader(cls(10), 3), axis=alone())
        prepared_batches = [numbers(prepared) for _ in range(2)]
        again = PreparedLoader(DataLoader(cls(10), 3), axis=alone())
        list(again)
        for i, _ in enumerate(again):
            if i == 1:
                state = kept(again.state_dict())
                break
        late = PreparedLoader(DataLoader(cls(10), 3), axis=alone())
        late.load_state_dict(state)
        assert numbers(late) == prepared_batches[1][2:] and late.epoch == 2


def test_what_cannot_be_resumed_is_refused() -> None:
    prepared = PreparedLoader(DataLoader(Noisy(12), 3), axis=alone())
    next(iter(prepared))
    state = prepared.state_dict()
    assert state["batches"] == 1
    other = PreparedLoader(DataLoader(Noisy(12), 2), axis=alone())
    with pytest.raises(ConfigError, match=r"1 batches of 3 samples .* are no whole batches of 2"):
        other.load_state_dict(state)
    # Twice as many samples were read: three batches of 2.
    other.load_state_dict(state | {"batches": 2})
    assert numbers(other) == [[6, 7], [8, 9], [10, 11]]


# -- several ranks --


def rounds(found: list[list[list[int]]]) -> list[int]:
    return [i for turn in zip(*found, strict=True) for batch in turn for i in batch]


def read_on_ranks(generated: bool, split: bool, epochs: int = 2) -> tuple[list[list[list[int]]], list[int], bool]:
    mesh = Mesh.build(timeout=timedelta(seconds=20))
    torch.manual_seed(40 + mesh.world.position)  # rank 0 decides
    loader = shuffled(generated, 25, 2 * mesh.world.size if split else 2, Quiet)
    prepared = PreparedLoader(loader, axis=mesh.world, split_batches=split)
    result = [numbers(prepared) for _ in range(epochs)]
    rest = prepared.remainder
    mesh.close()
    return result, [rest, len(prepared)], prepared.end_of_dataloader


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_ranks_share_the_order_of_one_process(ranks: RankPools, size: int, generated: bool, split: bool) -> None:
    by_rank = ranks(size).run(read_on_ranks, generated, split)
    torch.manual_seed(40)
    plain = shuffled(generated, 25, 2, Quiet)
    for epoch in range(2):
        expected = [i for batch in numbers(plain) for i in batch]
        order = rounds([result[epoch] for result, _, _ in by_rank])
        assert order[:25] == expected and order[25:] == expected[: len(order) - 25]
    assert all(facts == [25 % (2 * size), len(by_rank[0][0][0])] and last for _, facts, last in by_rank)


def read_from(state: dict[str, Any] | None, stop: int, kind: str) -> tuple[list[list[int]], dict[str, Any]]:
    """Read up to ``stop`` batches of this rank, from a state on."""
    mesh = Mesh.build(timeout=timedelta(seconds=20))
    loader = shuffled(True, 25, 2) if kind == "map" else DataLoader(Stream(25), 2)
    prepared = PreparedLoader(loader, axis=mesh.world)
    if state is not None:
        prepared.load_state_dict(state)
    found = []
    for batch in prepared:
        found += numbers([batch])
        if len(found) == stop:
            break
    state = kept(prepared.state_dict())
    mesh.close()
    return found, state


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_an_epoch_is_finished_on_another_number_of_ranks(ranks: RankPools, kind: str) -> None:
    whole = read_from(None, -1, kind)[0]
    order = [i for batch in whole for i in batch]
    pair = ranks(2).run(read_from, None, 3, kind)
    state = pair[0][1]
    assert state["batches"] == 6 == pair[1][1]["batches"]
    assert rounds([found for found, _ in pair]) == order[:12]
    for size in (2, 3, 4):  # six batches are no whole number of rounds of four ranks
        rest = rounds([found for found, _ in ranks(size).run(read_from, state, -1, kind)])
        assert rest[:13] == order[12:] and rest[13:] == order[: len(rest) - 13]
    assert [i for batch in read_from(state, -1, kind)[0] for i in batch] == order[12:]


def differing_orders() -> str:
    mesh = Mesh.build(timeout=timedelta(seconds=20))
    torch.manual_seed(mesh.world.position)
    order = torch.randperm(8).tolist()
    with pytest.raises(ConfigError) as error:
        list(PreparedLoader(DataLoader(Noisy(8), 2, sampler=order), axis=mesh.world))
    custom = BatchSampler(
        RandomSampler(range(8), generator=torch.Generator().manual_seed(mesh.world.position)), 2, False
    )
    found = PreparedLoader(DataLoader(Noisy(8), batch_sampler=custom), axis=mesh.world)
    assert len(numbers(found)) == 2, "a generator is taken over from the first rank"

    class OwnWay(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter([torch.zeros(2, 2)])

    with pytest.raises(ConfigError, match="OwnWay has an __iter__ of its own"):
        PreparedLoader(OwnWay(Noisy(8)), axis=mesh.world)
    assert len(list(PreparedLoader(OwnWay(Noisy(8)), axis=mesh.world, already_sharded=True))) == 1
    mesh.close()
    return str(error.value)


def test_samplers_that_differ_are_found_before_the_first_batch(ranks: RankPools) -> None:
    first, second = ranks(2).run(differing_orders)
    assert "the ranks' samplers give different orders: the first batch of rank 0 is [" in first
    assert "the first batch of rank 1 is [" in second
