"""Which samples each rank reads: tables written out by hand, and what holds for any sizes."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from shardwise import ConfigError
from shardwise.data.split import BatchSamplerShard, IterableDatasetShard, SkipBatchSampler


def batches(samples: int, size: int, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(samples)), size, drop_last)


def shards(sampler: Any, n: int, **options: Any) -> list[list[list[int]]]:
    return [list(BatchSamplerShard(sampler, n, rank, **options)) for rank in range(n)]


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter(range(self.length))


class Sizes:
    """A batch sampler whose batches differ in size; it has no ``batch_size`` unless one is given."""

    def __init__(self, *sizes: int, **attributes: Any) -> None:
        self.sizes = sizes
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Any:
        first = 0
        for size in self.sizes:
            yield list(range(first, first + size))
            first += size


TURNS = [
    # samples, batch size, even, drop_last, batches of rank 0, batches of rank 1
    (8, 2, True, False, [[0, 1], [4, 5]], [[2, 3], [6, 7]]),
    (8, 3, True, False, [[0, 1, 2], [6, 7, 0]], [[3, 4, 5], [1, 2, 3]]),
    (8, 3, False, False, [[0, 1, 2], [6, 7]], [[3, 4, 5]]),
    (8, 3, True, True, [[0, 1, 2]], [[3, 4, 5]]),
    (11, 3, True, False, [[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 0]]),
    (11, 3, False, False, [[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10]]),
    (9, 3, True, False, [[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [0, 1, 2]]),
    (2, 3, True, False, [[0, 1, 0]], [[1, 0, 1]]),
    (2, 3, False, False, [[0, 1]], []),
    (2, 3, True, True, [], []),
    (0, 3, True, False, [], []),
]


@pytest.mark.parametrize(("samples", "size", "even", "drop", "first", "second"), TURNS)
def test_batches_go_to_the_ranks_in_turn(
    samples: int, size: int, even: bool, drop: bool, first: list[list[int]], second: list[list[int]]
) -> None:
    assert shards(batches(samples, size, drop), 2, even_batches=even) == [first, second]


PARTS = [
    (8, 4, True, False, [[0, 1], [4, 5]], [[2, 3], [6, 7]]),
    (7, 4, True, False, [[0, 1], [4, 5]], [[2, 3], [6, 0]]),
    (5, 4, True, False, [[0, 1], [4, 0]], [[2, 3], [1, 2]]),
    (7, 4, False, False, [[0, 1], [4, 5]], [[2, 3], [6]]),
    (5, 4, False, False, [[0, 1], [4]], [[2, 3]]),
    (5, 4, True, True, [[0, 1]], [[2, 3]]),
    (1, 4, True, False, [[0, 0]], [[0, 0]]),
]


@pytest.mark.parametrize(("samples", "size", "even", "drop", "first", "second"), PARTS)
def test_split_batches_cuts_each_batch(
    samples: int, size: int, even: bool, drop: bool, first: list[list[int]], second: list[list[int]]
) -> None:
    sampler = batches(samples, size, drop)
    assert shards(sampler, 2, even_batches=even, split_batches=True) == [first, second]


@settings(deadline=None, max_examples=200)
@given(
    samples=st.integers(0, 40),
    size=st.integers(1, 6),
    n=st.integers(1, 5),
    even=st.booleans(),
    drop=st.booleans(),
    split=st.booleans(),
)
def test_what_holds_for_any_sizes(samples: int, size: int, n: int, even: bool, drop: bool, split: bool) -> None:
    size = size * n if split else size
    sampler = batches(samples, size, drop)
    found = shards(sampler, n, even_batches=even, split_batches=split)
    seen = [i for rank in found for batch in rank for i in batch]
    for rank, mine in enumerate(found):
        assert len(BatchSamplerShard(sampler, n, rank, split, even)) == len(mine)
    stream = [
        list(IterableDatasetShard(Stream(samples), size, drop, n, rank, split, even_batches=even)) for rank in range(n)
    ]
    for rank, own in enumerate(stream):
        assert len(IterableDatasetShard(Stream(samples), size, drop, n, rank, split, even_batches=even)) == len(own)
    per = size // n if split else size
    if drop:
        whole = samples // size if split else samples // size // n
        assert {len(mine) for mine in found} == {whole}
        assert sorted(seen) == list(range(whole * per * n))
        assert sorted(i for own in stream for i in own) == sorted(seen)
        return
    assert set(seen) == set(range(samples)) == {i for own in stream for i in own}
    if even:
        assert len({len(mine) for mine in found}) == 1 == len({len(own) for own in stream})
        assert all(len(batch) == per for mine in found for batch in mine)
        # A stream is cut as a sampler is, but for the order in a round, which is the same too.
        assert [[i for batch in mine for i in batch] for mine in found] == stream
        # In the order of the rounds, samples come as in one process: what is read twice comes last.
        rounds = [i for turn in zip(*found, strict=True) for batch in turn for i in batch]
        assert rounds[:samples] == list(range(samples))
    else:
        assert sorted(seen) == list(range(samples)) == sorted(i for own in stream for i in own)


def test_batches_of_different_sizes_are_never_lost() -> None:
    # Without a batch size, what is missing of the last round is whole batches from the start.
    assert shards(Sizes(1, 3, 2), 2) == [[[0], [4, 5]], [[1, 2, 3], [0]]]
    assert shards(Sizes(1, 3, 2), 2, even_batches=False) == [[[0], [4, 5]], [[1, 2, 3]]]
    # With one, a short batch in the middle is given out as it is: the sampler meant it.
    assert shards(Sizes(2, 1, 2, 2, batch_size=2), 2) == [[[0, 1], [3, 4]], [[2], [5, 6]]]
    assert shards(Sizes(2, 1, 2, 1, batch_size=2, drop_last=True), 2) == [[[0, 1], [3, 4]], [[2], [5]]]


def test_a_sampler_without_an_end_is_read_as_it_comes() -> None:
    class Endless:
        batch_size = 2

        def __iter__(self) -> Any:
            first = 0
            while True:
                yield [first, first + 1]
                first += 2

    assert list(islice(BatchSamplerShard(Endless(), 2, 1), 2)) == [[2, 3], [6, 7]]


def test_splitting_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"in 3 equal parts, but the batch size is 4. Give the loader a batch size"):
        BatchSamplerShard(batches(8, 4), 3, 0, split_batches=True)
    with pytest.raises(ConfigError, match="batch size is not known"):
        BatchSamplerShard(Sizes(1, 2), 2, 0, split_batches=True)
    with pytest.raises(ConfigError, match=r"batch size is 1. Give a round multiple of 2"):
        IterableDatasetShard(Stream(4), 1, num_processes=2, split_batches=True)


def test_a_stream_is_told_of_its_epoch() -> None:
    class Shuffled(Stream):
        def __iter__(self) -> Any:
            return iter(torch.randperm(self.length, generator=self.generator).tolist())

    first, second = (IterableDatasetShard(Shuffled(8), 2, num_processes=2, process_index=r) for r in range(2))
    epochs = []
    for epoch in range(2):
        first.set_epoch(epoch)
        second.set_epoch(epoch)
        epochs.append((list(first), list(second)))
        assert sorted(epochs[-1][0] + epochs[-1][1]) == list(range(8))
    assert epochs[0] != epochs[1]

    class Told(Stream):
        def set_epoch(self, epoch: int) -> None:
            self.told = epoch

    told = Told(3)
    IterableDatasetShard(told).set_epoch(5)
    assert told.told == 5


def test_a_stream_in_a_loader_gives_whole_batches() -> None:
    loader = DataLoader(IterableDatasetShard(Stream(7), 2, num_processes=2, process_index=1), batch_size=2)
    # The last chunk is 4, 5, 6 and 0 from the start.
    assert [batch.tolist() for batch in loader] == [[2, 3], [6, 0]]


def test_skipping_batches_keeps_what_the_sampler_says_of_itself() -> None:
    skipped = SkipBatchSampler(batches(7, 2), 2)
    assert list(skipped) == [[4, 5], [6]]
    assert (len(skipped), skipped.total_length, skipped.batch_size, skipped.drop_last) == (2, 4, 2, False)
    assert list(SkipBatchSampler(batches(3, 2), 9)) == [] and len(SkipBatchSampler(batches(3, 2), 9)) == 0
    # The ranks skip rounds of their own batches.
    assert list(SkipBatchSampler(BatchSamplerShard(batches(8, 2), 2, 1), 1)) == [[6, 7]]
