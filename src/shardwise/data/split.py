"""Which samples a rank reads: batches of a sampler dealt out in turn, or a stream cut in chunks.

Everything here is arithmetic on indices. No rank talks to another: each reads the same sampler or stream and keeps its
own part, so all ranks must see the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset

from shardwise.errors import ConfigError

T = TypeVar("T")


class BatchSamplerShard(BatchSampler):
    """One rank's batches of a batch sampler.

    Batches go to the ranks in turn, or, with ``split_batches``, each batch is cut in as many parts as there are ranks.
    The last round may be short. ``even_batches`` fills it with samples from the start of the epoch, so that all ranks
    run equally many steps of equal size; without it ranks may differ in both. A ``batch_sampler`` without a
    ``batch_size`` has no size to fill up to: what is missing is then whole batches, again from the start.

    Args:
        batch_sampler: yields lists of indices, in the same order on every rank.
        num_processes: ranks that share the batches.
        process_index: this rank among them.
        split_batches: cut each batch instead of dealing them out; the size must be a multiple of the ranks.
        even_batches: fill the last round.
        skip: batches of ``batch_sampler`` to leave out, which other runs of this epoch have read. The last round is
            still filled from the start of the epoch.

    Attributes:
        remainder: samples of the last round that are not repeated, 0 if none is, -1 before that is known.

    Raises:
        ConfigError: ``split_batches`` with a batch size that the ranks do not divide, or that is not known.
    """

    def __init__(
        self,
        batch_sampler: Iterable[list[Any]],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        skip: int = 0,
    ) -> None:
        # The base class wants a sampler; what it would do with it is all replaced here.
        self.batch_sampler = batch_sampler
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.skip = skip
        self.remainder = -1
        if split_batches and (self.batch_size is None or self.batch_size % num_processes):
            raise ConfigError(
                f"split_batches cuts each batch in {num_processes} equal parts, but the batch size is "
                f"{'not known' if self.batch_size is None else self.batch_size}. Give the loader a batch size that is "
                f"a round multiple of {num_processes}, or leave split_batches off and give the size of one process."
            )

    @property
    def total_length(self) -> int:
        """Batches of all ranks together."""
        return max(0, len(self.batch_sampler) - self.skip)  # type: ignore[arg-type]

    def __len__(self) -> int:
        total, n, rank = self.total_length, self.num_processes, self.process_index
        if self.split_batches:
            return total - self._misses_the_last()
        if self.drop_last or total % n == 0:
            return total // n
        return total // n + (1 if self.even_batches or rank < total % n else 0)

    def __iter__(self) -> Iterator[list[Any]]:
        self.remainder = -1
        yield from self._parts() if self.split_batches else self._turns()
        self.remainder = max(0, self.remainder)

    def source(self) -> Iterable[list[Any]]:
        """What all ranks read."""
        return self.batch_sampler

    def _turns(self) -> Iterator[list[Any]]:
        n, rank, size = self.num_processes, self.process_index, self.batch_size
        start: list[list[Any]] = []
        waiting: list[list[Any]] = []
        for number, batch in enumerate(self.source()):
            if len(waiting) == n:  # a batch that was not full, and not the last: then it was meant so
                yield waiting[rank]
                waiting = []
            if len(start) < n and not self.drop_last:
                start.append(list(batch))
            if number < self.skip:
                continue
            waiting.append(list(batch))
            if len(waiting) == n and (size is None or len(batch) == size):
                yield waiting[rank]
                waiting = []
        if not waiting or (self.drop_last and len(waiting) < n):
            return
        if self.drop_last or not self.even_batches:
            yield from waiting[rank : rank + 1]
        elif size is None:
            self.remainder = sum(map(len, waiting))
            yield from islice(repeated(waiting, start), rank, rank + 1)
        else:
            self.remainder = sum(map(len, waiting))
            samples = repeated(_flat(waiting), _flat(start))
            yield list(islice(samples, rank * size, (rank + 1) * size))

    def _parts(self) -> Iterator[list[Any]]:
        size = self.batch_size
        part = size // self.num_processes
        first, end = self.process_index * part, (self.process_index + 1) * part
        start: list[Any] = []
        for number, batch in enumerate(self.source()):
            start = start or list(batch)
            if number < self.skip:
                continue
            if len(batch) >= size:
                yield list(batch[first:end])
            elif self.drop_last:
                continue
            elif self.even_batches:
                self.remainder = len(batch)
                yield list(islice(repeated(list(batch), start), first, end))
            elif len(batch) > first:
                yield list(batch[first:end])

    def _misses_the_last(self) -> int:
        """1 if the last batch is so short that nothing of it is this rank's, as far as that can be known."""
        if self.even_batches or self.drop_last or not self.total_length or not isinstance(self.sampler, Sized):
            return 0
        rest = len(self.sampler) % self.batch_size
        return int(0 < rest <= self.process_index * (self.batch_size // self.num_processes))


class IterableDatasetShard(IterableDataset[Any]):
    """One rank's samples of a stream that every rank reads whole.

    The stream is cut in chunks of one batch for each rank (``split_batches``: of one batch in all), of which each rank
    keeps its part. A short last chunk is dropped (``drop_last``), filled from the first chunk (``even_batches``), or
    given out as it is.

    Args:
        dataset: the stream, the same on every rank.
        batch_size: samples of one batch.
        drop_last: leave the short last chunk out.
        num_processes: ranks that share the stream.
        process_index: this rank among them.
        split_batches: ``batch_size`` is that of all ranks together, and a multiple of their number.
        even_batches: fill the short last chunk.
        skip: samples of the stream to leave out, which other runs of this epoch have read. The last chunk is still
            filled from the first of the epoch.

    Attributes:
        remainder: samples of the last chunk that are not repeated, 0 if none is, -1 before that is known.

    Raises:
        ConfigError: ``split_batches`` with a batch size that the ranks do not divide.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Iterable[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        skip: int = 0,
    ) -> None:
        if split_batches and batch_size % num_processes:
            raise ConfigError(
                f"split_batches cuts each batch in {num_processes} equal parts, but the batch size is {batch_size}. "
                f"Give a round multiple of {num_processes}."
            )
        self.dataset: Any = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.skip = skip
        self.remainder = -1
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch comes."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def _part(self) -> int:
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    def __len__(self) -> int:
        chunk, part = self._part * self.num_processes, self._part
        whole, rest = divmod(len(self.dataset), chunk)
        if not rest or self.drop_last:
            return whole * part
        if self.even_batches:
            return (whole + 1) * part
        return whole * part + min(part, max(0, rest - self.process_index * part))

    def __iter__(self) -> Iterator[Any]:
        self._seed()
        part = self._part
        first, end = self.process_index * part, (self.process_index + 1) * part
        samples, whole = iter(self.dataset), part * self.num_processes
        self.remainder = -1
        start = list(islice(samples, whole))
        read = chain(start, samples)
        if self.skip:
            # What was read by another run drew its random numbers there; here nothing is drawn for it.
            now = torch.get_rng_state()
            for _ in islice(read, self.skip):
                pass
            torch.set_rng_state(now)
        while chunk := list(islice(read, whole)):
            if len(chunk) == whole:
                yield from chunk[first:end]
            elif not self.drop_last:
                self.remainder = len(chunk) if self.even_batches else 0
                yield from islice(repeated(chunk, start), first, end) if self.even_batches else chunk[first:end]
        self.remainder = max(0, self.remainder)

    def _seed(self) -> None:
        """A stream with a generator and no ``set_epoch`` draws the same on every rank: from the epoch's number."""
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator):
            generator.manual_seed(self.epoch)


class SkipBatchSampler(BatchSampler):
    """What a batch sampler yields after its first batches.

    Args:
        batch_sampler: yields lists of indices.
        skip_batches: how many of them to leave out.
    """

    def __init__(self, batch_sampler: Iterable[list[Any]], skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]
        # Kept, so that what asks the loader for its size (the remainder of the last batch) gets an answer.
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def total_length(self) -> int:
        """Batches before any is left out."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return max(0, self.total_length - self.skip_batches)

    def __iter__(self) -> Iterator[list[Any]]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)


def _flat(batches: Iterable[Iterable[T]]) -> list[T]:
    return [sample for batch in batches for sample in batch]


def repeated(rest: list[T], start: list[T]) -> Iterator[T]:
    """``rest``, then ``start`` over and over."""
    yield from rest
    while start:
        yield from start
