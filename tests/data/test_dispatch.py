"""Dispatched loaders: one rank reads, each gets its own batches, whatever they are made of."""

from __future__ import annotations

from collections import namedtuple
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardwise import ConfigError
from shardwise.data.dispatch import DispatchedLoader
from shardwise.data.parcels import DispatchError
from shardwise.dist import Mesh
from shardwise.dist.values import ValueKindError, pack, unpack
from tests.ranks import RankPools

Pair = namedtuple("Pair", ["x", "label"])


class Only0(IterableDataset[Any]):
    """A stream that only rank 0 may touch."""

    def __init__(self, samples: list[Any], rank: int, fail_at: int = -1) -> None:
        self.samples, self.rank, self.fail_at = samples, rank, fail_at

    def __iter__(self) -> Any:
        assert self.rank == 0, "another rank read the data"
        for i, sample in enumerate(self.samples):
            if i == self.fail_at:
                raise OSError(f"disk {i} is gone")
            yield sample


def world() -> Mesh:
    return Mesh.build(timeout=timedelta(seconds=20))


def listed(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def read(samples: list[Any], size: int | None, collate: bool, options: dict[str, Any]) -> list[Any]:
    """Two epochs of a stream: batches, flags of the end, remainders."""
    mesh = world()
    drop_last = options.pop("drop_last", False)
    loader = DataLoader(
        Only0(samples, mesh.world.position), size, drop_last=drop_last, **({"collate_fn": list} if not collate else {})
    )
    prepared = DispatchedLoader(loader, axis=mesh.world, **options)
    found = []
    for _ in range(2):
        epoch = [(listed(batch), prepared.end_of_dataloader, prepared.remainder) for batch in prepared]
        found.append(epoch)
    assert found[0] == found[1] and prepared.epoch == 2
    assert [end for _, end, _ in found[0]] == [False] * (len(found[0]) - 1) + [True] * bool(found[0])
    last = found[0][-1][2] if found[0] else None
    assert prepared.rows == (len(found[0][-1][0]) if last else None)
    mesh.close()
    return [[batch for batch, _, _ in found[0]], last]


TABLE = [
    # samples, batch size, options, (batches, remainder) of each rank
    (8, 2, {}, [([[0, 1], [4, 5]], 0), ([[2, 3], [6, 7]], 0)]),
    (7, 2, {}, [([[0, 1], [4, 5]], 3), ([[2, 3], [6, 0]], 3)]),
    (5, 2, {}, [([[0, 1], [4]], 1), ([[2, 3], [0]], 1)]),
    (6, 2, {}, [([[0, 1], [4]], 0), ([[2, 3], [5]], 0)]),
    (1, 2, {}, [([[0]], 1), ([[0]], 1)]),
    (0, 2, {}, [([], None), ([], None)]),
    (7, 2, {"drop_last": True}, [([[0, 1]], 0), ([[2, 3]], 0)]),
    (3, 2, {"drop_last": True}, [([], None), ([], None)]),
    (7, 2, {"even_batches": False}, [([[0, 1], [4, 5]], 0), ([[2, 3], [6]], 0)]),
    (5, 2, {"even_batches": False}, [([[0, 1], [4]], 0), ([[2, 3]], 0)]),
    (1, 2, {"even_batches": False}, [([[0]], 0), ([], None)]),
    (8, 4, {"split_batches": True}, [([[0, 1], [4, 5]], 0), ([[2, 3], [6, 7]], 0)]),
    (7, 4, {"split_batches": True}, [([[0, 1], [4, 5]], 3), ([[2, 3], [6, 0]], 3)]),
    (5, 4, {"split_batches": True}, [([[0, 1], [4]], 1), ([[2, 3], [0]], 1)]),
    (5, 4, {"split_batches": True, "even_batches": False}, [([[0, 1], [4]], 0), ([[2, 3]], 0)]),
    (7, 4, {"split_batches": True, "drop_last": True}, [([[0, 1]], 0), ([[2, 3]], 0)]),
]


@pytest.mark.parametrize(("samples", "size", "options", "expected"), TABLE)
def test_961_each_rank_gets_its_batches_and_knows_the_last(
    ranks: RankPools, samples: int, size: int, options: dict[str, Any], expected: Any
) -> None:
    found = ranks(2).run(read, list(range(samples)), size, True, options)
    assert found == [list(e) for e in expected]


@pytest.mark.parametrize("size", [1, 3])
def test_other_numbers_of_ranks(ranks: RankPools, size: int) -> None:
    run = ranks(size).run if size > 1 else lambda f, *a: [f(*a)]
    found = run(read, list(range(10)), 2, True, {})
    if size == 1:
        assert found == [[[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], 0]]
    else:
        # Two batches are left for three ranks: four samples, and two of the start.
        assert found == [[[[0, 1], [6, 7]], 4], [[[2, 3], [8, 9]], 4], [[[4, 5], [0, 1]], 4]]


class Words(IterableDataset[Any]):
    """Samples of every kind, with sequences as long as the sample's number says."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Any:
        for i, length in enumerate(self.lengths):
            yield {"ids": torch.full((length,), i), "text": f"sample {i} \u00e4", "n": i}


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Padding to the longest of the batch, as tokenizers do."""
    longest = max(len(s["ids"]) for s in samples)
    ids = torch.stack([torch.nn.functional.pad(s["ids"], (0, longest - len(s["ids"])), value=-1) for s in samples])
    return {
        "ids": ids,
        "text": [s["text"] for s in samples],
        "none": None,
        "array": np.array([s["n"] for s in samples], dtype=np.int16),
        "pair": Pair(ids.to(torch.bfloat16), [s["n"] for s in samples]),
        "flag": True,
        "half": ids.bool(),
        "nothing": torch.empty(len(samples), 0),
        "scalar": torch.tensor(7),
    }


def everything(lengths: list[int], even: bool) -> list[Any]:
    mesh = world()
    loader = DataLoader(Words(lengths), 2, collate_fn=padded)
    prepared = DispatchedLoader(loader, axis=mesh.world, even_batches=even, device=torch.device("cpu"))
    found = []
    for batch in prepared:
        pair = batch["pair"]
        assert type(pair) is Pair and pair.x.dtype == torch.bfloat16 and torch.equal(pair.x.long(), batch["ids"])
        assert batch["none"] is None and batch["flag"] is True and batch["array"].dtype == np.int16
        assert torch.equal(batch["half"], batch["ids"].bool()) and batch["scalar"].item() == 7
        assert batch["nothing"].shape == (len(batch["text"]), 0)
        assert batch["array"].tolist() == pair.label and [int(t.split()[1]) for t in batch["text"]] == pair.label
        found.append([pair.label, list(batch["ids"].shape)])
    mesh.close()
    return [found, prepared.remainder]


def test_2023_batches_of_one_round_may_differ_in_length_and_2334_1370_3849_hold_text(ranks: RankPools) -> None:
    # The first round has sequences of 2 and 5; the last one, completed, has batches of one length.
    found = ranks(2).run(everything, [1, 2, 5, 3, 2, 2, 2], True)
    assert found == [[[[[0, 1], [2, 2]], [[4, 5], [2, 2]]], 3], [[[[2, 3], [2, 5]], [[6, 0], [2, 2]]], 3]]


def test_26548_a_last_round_whose_batches_do_not_fit_together_is_given_out_whole(ranks: RankPools) -> None:
    # Five samples on two ranks: nothing but the first batch could complete the round, and it has another length.
    first, second = ranks(2).run(everything, [1, 2, 5, 3, 4], True)
    assert first == [[[[0, 1], [2, 2]], [[4], [1, 4]]], 1] and second[0][1][1] == [1, 4]
    # Seven samples on three ranks: the lengths 2 and 4 do not fit together, so the rank without a batch gets the first.
    found = ranks(3).run(everything, [1, 2, 5, 3, 1, 1, 2, 2, 4, 3], True)
    assert [rank[0][-1] for rank in found] == [[[6, 7], [2, 2]], [[8, 9], [2, 4]], [[0, 1], [2, 2]]]
    assert [rank[1] for rank in found] == [4, 4, 4]
    # Without completing, each rank has what there is.
    found = ranks(2).run(everything, [1, 2, 5, 3, 4], False)
    assert found == [[[[[0, 1], [2, 2]], [[4], [1, 4]]], 0], [[[[2, 3], [2, 5]]], 0]]


def test_lists_of_samples_are_cut_as_samples(ranks: RankPools) -> None:
    samples = [{"x": torch.full((3,), i)} for i in range(6)]

    def numbers(found: list[Any]) -> list[Any]:
        return [[[int(s["x"][0]) for s in batch] for batch in rank[0]] for rank in found]

    found = ranks(2).run(read_lists, samples, 4, {"split_batches": True})
    assert numbers(found) == [[[0, 1], [4]], [[2, 3], [5]]]
    found = ranks(2).run(read_lists, samples[:5], 2, {})
    assert numbers(found) == [[[0, 1], [4]], [[2, 3], [0]]] and found[0][1] == 1


def read_lists(samples: list[Any], size: int, options: dict[str, Any]) -> Any:
    mesh = world()
    loader = DataLoader(Only0(samples, mesh.world.position), size, collate_fn=list)
    prepared = DispatchedLoader(loader, axis=mesh.world, **options)
    found = list(prepared)
    mesh.close()
    return found, prepared.remainder


class Unsendable:
    pass


def failing(kind: str) -> list[str]:
    mesh = world()
    rank, words = mesh.world.position, []
    data: Any = Only0(list(range(8)), rank, fail_at=7 if kind == "data" else -1)

    def collate(samples: list[int]) -> Any:
        if kind == "collate" and 6 in samples:
            raise ZeroDivisionError("no such mean")
        return Unsendable() if kind == "value" and 6 in samples else torch.tensor(samples)

    prepared = DispatchedLoader(DataLoader(data, 2, collate_fn=collate), axis=mesh.world)
    with pytest.raises((DispatchError, OSError, ZeroDivisionError, ValueKindError)) as error:
        words.extend(str(listed(batch)) for batch in prepared)
    words.append(f"{error.type.__name__}: {error.value}")
    # The ranks are still in step.
    prepared = DispatchedLoader(DataLoader(Only0([0, 1], rank), 1), axis=mesh.world)
    assert [listed(b) for b in prepared] == [[rank]]
    mesh.close()
    return words


@pytest.mark.parametrize(
    ("kind", "own"),
    [("data", "OSError: disk 7 is gone"), ("collate", "ZeroDivisionError: no such mean"), ("value", "ValueKindError")],
)
def test_an_error_of_the_reading_rank_is_one_on_all(ranks: RankPools, kind: str, own: str) -> None:
    first, second = ranks(2).run(failing, kind)
    assert first[:-1] == ["[0, 1]"] and second[:-1] == ["[2, 3]"]
    assert first[-1].startswith(own)
    assert second[-1].startswith("DispatchError: rank 0, which reads for all, could not give a batch: " + own)


def left_early() -> list[Any]:
    mesh = world()
    prepared = DispatchedLoader(DataLoader(Only0(list(range(9)), mesh.world.position), 2), axis=mesh.world)
    found = []
    for batch in prepared:
        found.append(listed(batch))
        break
    assert prepared.epoch == 0 and prepared.state_dict()["batches"] == 2
    found += [listed(batch) for batch in prepared]
    mesh.close()
    return found


def test_209_a_loop_that_is_left_early_can_be_begun_again(ranks: RankPools) -> None:
    first, second = ranks(2).run(left_early)
    assert first == [[0, 1], [0, 1], [4, 5], [8]] and second == [[2, 3], [2, 3], [6, 7], [0]]


def left_by_one() -> list[str]:
    mesh = world()
    rank = mesh.world.position
    prepared = DispatchedLoader(DataLoader(Only0(list(range(8)), rank), 1), axis=mesh.world)
    steps = iter(prepared)
    found = [str(listed(next(steps)))]
    if rank == 1:
        steps = iter(prepared)  # it has broken out of the loop, and runs another
        with pytest.raises(DispatchError) as error:
            next(steps)
        found.append(str(error.value))
    else:
        found.append(str(listed(next(steps))))
    mesh.close()
    return found


def test_2258_a_rank_that_leaves_the_loop_alone_is_told_so(ranks: RankPools) -> None:
    first, second = ranks(2).run(left_by_one)
    assert first == ["[0]", "[2]"] and second[0] == "[1]"
    assert "rank 0 reads for all and is at round 2 of the epoch, rank 1 at round 1" in second[1]


class Shuffled(Dataset[Any]):
    def __len__(self) -> int:
        return 25

    def __getitem__(self, i: int) -> int:
        return i


def dispatched(kind: str, rank: int, generated: bool) -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(Only0(list(range(25)), rank), 2)
    generator = torch.Generator().manual_seed(7 + rank) if generated else None
    return DataLoader(Shuffled(), 2, shuffle=True, generator=generator)


def read_from(kind: str, generated: bool, state: Any, stop: int, epochs: int, split: bool = False) -> list[Any]:
    mesh = world()
    rank = mesh.world.position
    torch.manual_seed(3 + rank)
    loader = dispatched(kind, rank, generated)
    prepared = DispatchedLoader(loader, axis=mesh.world, split_batches=split)
    if state is not None:
        torch.manual_seed(99)
        prepared.load_state_dict(state)
        assert prepared.state_dict()["batches"] == state["batches"]
    found = []
    while prepared.epoch < epochs:
        for batch in prepared:
            found.append(listed(batch))
            if len(found) == stop:
                break
        if len(found) == stop:
            break
    result = [found, unpack(*pack(prepared.state_dict())), prepared.remainder]
    mesh.close()
    return result


def in_order(found: list[Any]) -> list[int]:
    return [i for turn in zip(*(rank[0] for rank in found), strict=True) for batch in turn for i in batch]


@pytest.mark.parametrize(("kind", "generated"), [("map", True), ("map", False), ("stream", False)])
def test_2016_the_third_epoch_is_finished_on_the_same_and_on_other_ranks(
    ranks: RankPools, kind: str, generated: bool
) -> None:
    whole = ranks(2).run(read_from, kind, generated, None, -1, 3)
    order = in_order(whole)  # three epochs of 7 rounds: 24 samples, and one that is shared by both ranks
    assert len(order) == 3 * 26 and set(order[:25]) == set(range(25))
    if kind == "map":
        assert order[:26] != order[26:52]
    halfway = ranks(2).run(read_from, kind, generated, None, 7 + 7 + 3, 3)
    state = halfway[0][1]
    assert (state["epoch"], state["batches"]) == (2, 6) and in_order(halfway) == order[: 52 + 12]
    rest = order[52 + 12 : 52 + 25]
    for size in (1, 2, 3):
        run = ranks(size).run if size > 1 else lambda f, *a: [f(*a)]
        found = run(read_from, kind, generated, state, -1, 3)
        assert in_order(found)[:13] == rest, f"on {size} ranks"
        assert in_order(found)[13:] == order[52:][: -13 % size], "the epoch's start"
        assert [f[2] for f in found] == [{1: 0, 2: 1, 3: 1}[size]] * size


def cut_by(name: str) -> Any:
    mesh = world()

    def reversed_slice(batch: Any, part: slice, process_index: int, num_processes: int) -> Any:
        assert num_processes == mesh.world.size and part.start // 2 == process_index
        return batch.flip(0)[part]

    loader = DataLoader(Only0([1, 2, 3, 4, 5, 6, 7, 8], mesh.world.position), 2)
    prepared = DispatchedLoader(loader, axis=mesh.world, slice_fn=reversed_slice)
    found = [listed(b) for b in prepared]
    mesh.close()
    return found


def test_a_function_of_the_user_cuts(ranks: RankPools) -> None:
    assert ranks(2).run(cut_by, "flip") == [[[4, 3], [8, 7]], [[2, 1], [6, 5]]]


def refused() -> str:
    mesh = world()
    with pytest.raises(ConfigError) as error:
        DispatchedLoader(DataLoader(Only0([], 0), 3), axis=mesh.world, split_batches=True)
    mesh.close()
    return str(error.value)


def test_splitting_what_cannot_be_split_is_refused(ranks: RankPools) -> None:
    assert "cuts each batch in 2 equal parts, but the batch size is 3" in ranks(2).run(refused)[0]
