"""A ``DataLoader`` that gives each rank its part, knows its last batch, and can go on where it stopped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from shardwise.data.batches import to_device
from shardwise.data.order import (
    EpochStart,
    SameOrder,
    SharedSeed,
    WatchedBatches,
    drawn_again,
    generator_of,
    set_epoch,
    start_epoch,
)
from shardwise.data.split import BatchSamplerShard, IterableDatasetShard
from shardwise.dist import Axis
from shardwise.errors import ConfigError

# What a loader is made of, beside its data and its sampler.
KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


class Loops(Protocol):
    """Told of the loops that run over prepared loaders."""

    def begin(self, loader: PreparedLoader) -> None:
        """An epoch begins, perhaps within that of another loader."""

    def advanced(self, loader: PreparedLoader) -> None:
        """The loader is about to hand out a batch."""

    def end(self, loader: PreparedLoader) -> None:
        """The epoch is over, or was left early."""


class PreparedLoader(DataLoader[Any]):
    """One rank's part of what another loader would yield.

    Args:
        loader: the loader that one process would use. It is not changed.
        axis: the ranks that share the data.
        device: where the tensors of a batch go, or None to leave them.
        split_batches: the loader's batch size is that of all ranks together.
        even_batches: fill the last round from the start of the epoch, so that all ranks run equally many steps.
        non_blocking: copy without waiting (of use with ``pin_memory``).
        already_sharded: the loader yields this rank's part as it is.
        loops: told when loops begin, advance and end.

    Attributes:
        epoch: epochs that are over.
        position: batches handed out to this rank since the epoch began, or was resumed.
        end_of_dataloader: the batch that was handed out last is the epoch's last.

    Raises:
        ConfigError: the loader cannot be cut for several ranks; the message says why.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        axis: Axis,
        device: torch.device | None = None,
        split_batches: bool = False,
        even_batches: bool = True,
        non_blocking: bool = False,
        already_sharded: bool = False,
        loops: Loops | None = None,
    ) -> None:
        ranks = 1 if already_sharded else axis.size
        own_way = type(loader).__iter__ is not DataLoader.__iter__
        if own_way and ranks > 1:
            raise ConfigError(
                f"{type(loader).__name__} has an __iter__ of its own, so its batches cannot be dealt out to {ranks} "
                "ranks. Give a plain DataLoader with a sampler, a batch_sampler or an IterableDataset; or let the "
                "loader yield each rank's own part, and say already_sharded=True."
            )
        self.epoch = 0
        self.position = 0
        self.end_of_dataloader = False
        self._given = loader if own_way else None
        self._axis = axis
        self._talk = device or torch.device("cpu")
        self._device = device
        self._non_blocking = non_blocking
        self._loops = loops
        self._split = split_batches and ranks > 1
        self._ranks = ranks
        # Where the epoch was when this run of it began: batches of all ranks, and the states that its order is from.
        self._read = 0
        self._begun: EpochStart | None = None
        self._resume: tuple[int, EpochStart] | None = None
        self._stream: IterableDatasetShard | None = None
        self._shard: BatchSamplerShard | None = None
        self._watched: WatchedBatches | None = None
        kept = {name: getattr(loader, name) for name in KEPT if hasattr(loader, name)}
        even = even_batches and ranks > 1
        if isinstance(loader.dataset, IterableDataset):
            super().__init__(**self._streamed(loader, even), **kept)
        else:
            super().__init__(**self._sampled(loader, even), **kept)
        self._generator = generator_of(self._shard)

    # -- how it is cut --

    def _streamed(self, loader: DataLoader[Any], even: bool) -> dict[str, Any]:
        size = loader.batch_size
        if self._ranks == 1:
            return {"dataset": loader.dataset, "batch_size": size, "drop_last": loader.drop_last}
        if size is None and self._split:
            raise ConfigError("split_batches needs a loader with a batch size; this one's samples are batches already.")
        position = self._axis.position
        self._stream = IterableDatasetShard(
            loader.dataset, size or 1, loader.drop_last, self._ranks, position, self._split, even
        )
        part = size // self._ranks if size and self._split else size
        return {"dataset": self._stream, "batch_size": part, "drop_last": loader.drop_last}

    def _sampled(self, loader: DataLoader[Any], even: bool) -> dict[str, Any]:
        position = self._axis.position
        # Without automatic batches, the sampler yields what the dataset is asked for: whole batches, or single items.
        plain = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        single = loader.batch_sampler is None and not isinstance(plain, BatchSampler)
        base: Iterable[Any] = BatchSampler(loader.sampler, 1, False) if single else plain
        self._shard = BatchSamplerShard(self._agreed(base), self._ranks, position, self._split, even)
        self._watched = WatchedBatches(_Singles(self._shard) if single else self._shard)
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        return {"dataset": loader.dataset, name: self._watched} | ({} if name != "sampler" else {"batch_size": None})

    def _agreed(self, base: Iterable[Any]) -> Iterable[Any]:
        """The same batches on every rank, or an error."""
        if self._ranks == 1:
            return base
        sampler = getattr(base, "sampler", None)
        if type(base) is BatchSampler and type(sampler) is RandomSampler and sampler.generator is None:
            base = BatchSampler(SharedSeed(sampler, self._axis, self._talk), base.batch_size, base.drop_last)
        agreed = SameOrder(base, self._axis, self._talk)
        for name in ("sampler", "batch_size", "drop_last"):
            setattr(agreed, name, getattr(base, name, None))
        return agreed

    @property
    def even_batches(self) -> bool:
        """Whether the last round is filled. May be set between epochs."""
        cut = self._shard or self._stream
        return bool(cut is not None and cut.even_batches)

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        cut = self._shard or self._stream
        if cut is not None:
            cut.even_batches = value and self._ranks > 1

    @property
    def remainder(self) -> int:
        """Samples of the last round that no rank repeats; 0 if all are, -1 if that is not known."""
        if not self.even_batches:
            return 0
        if self._stream is not None:
            length = len(self._stream.dataset) if isinstance(self._stream.dataset, Sized) else -1
            return self._rest(length, self._stream.batch_size) if length >= 0 else self._stream.remainder
        sampler = getattr(self._shard, "sampler", None)
        size = getattr(self._shard, "batch_size", None)
        return self._rest(len(sampler), size) if isinstance(sampler, Sized) and size else -1

    def _rest(self, samples: int, size: int) -> int:
        cut = self._shard or self._stream
        if cut is None or cut.drop_last:
            return 0
        return (samples - self._read * size) % (size * self._turns)

    @property
    def _turns(self) -> int:
        """Batches of the given loader that make one of each rank."""
        return 1 if self._split else self._ranks

    # -- a loop --

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        again, self._resume = self._resume, None
        self._announce_epoch()
        self._read, self._begun = again or (0, start_epoch(self._generator, self._axis, self._talk))
        self.position, self.end_of_dataloader = 0, False
        if self._loops is not None:
            self._loops.begin(self)
        try:
            for batch, last in self._batches(resumed=again is not None):
                self.position += 1
                self.end_of_dataloader = last
                if self._loops is not None:
                    self._loops.advanced(self)
                yield batch if self._device is None else to_device(batch, self._device, self._non_blocking)
            self.epoch, self.position, self._read, self._begun = self.epoch + 1, 0, 0, None
        finally:
            # Also where the loop is left early, or raises.
            if self._loops is not None:
                self._loops.end(self)

    def _announce_epoch(self) -> None:
        if self._shard is not None and set_epoch(self._shard.batch_sampler, self.epoch):
            return
        if self._stream is not None:
            self._stream.set_epoch(self.epoch)
        elif hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)

    def _batches(self, resumed: bool) -> Iterator[tuple[Any, bool]]:
        """What is left of the epoch, each batch with whether it is the last."""
        if self._watched is None or self._shard is None or self._given is not None:
            yield from _looked_ahead(self._unsampled())
            return
        self._shard.skip = self._read
        try:
            if resumed and self._begun is not None:
                with drawn_again(self._begun, self._generator):
                    batches = super().__iter__()
                    self._watched.draw()
            else:
                batches = super().__iter__()
            for number, batch in enumerate(batches, 1):
                yield batch, self._watched.total == number
        finally:
            self._shard.skip = 0

    def _unsampled(self) -> Iterator[Any]:
        """Batches of a stream, or of a loader that iterates in its own way, without those that were read before."""
        again = self._read // self._turns
        if self._stream is not None and not self.num_workers:
            again, self._stream.skip = 0, self._read * self._stream.batch_size
        batches = super().__iter__() if self._given is None else iter(self._given)
        for _ in range(again):
            next(batches, None)
        return batches

    # -- going on later --

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is: the epoch, what all ranks have read of it, and the states that its order is from."""
        read, begun = self._read + self.position * self._turns, self._begun
        if self._resume is not None:  # loaded, and not read from since
            read, begun = self._resume
        if begun is None:
            begun = EpochStart(None if self._generator is None else self._generator.get_state(), torch.get_rng_state())
        return {
            "epoch": self.epoch,
            "batches": read,
            "batch_size": self._size(),
            "generator": begun.generator,
            "torch": begun.torch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a loader of the same data was, on as many ranks or on others.

        Raises:
            ConfigError: what was read is no whole number of batches of this loader's size; or it is a stream with
                workers, and no whole number of rounds of these ranks.
        """
        read, size, was = int(state["batches"]), self._size(), state["batch_size"]
        if read and size != was:
            if not size or not was or read * was % size:
                raise ConfigError(
                    f"{read} batches of {was} samples were read in this epoch, which are no whole batches of {size}. "
                    "Resume with the same batch size, or from the end of an epoch."
                )
            read = read * was // size
        if read % self._turns and self._stream is not None and self.num_workers:
            raise ConfigError(
                f"{read} batches of a stream were read in this epoch, which is no whole number of rounds of "
                f"{self._ranks} ranks, as it must be with num_workers={self.num_workers}: each worker reads a stream "
                "of its own. Resume on a number of ranks that divides it, or with num_workers=0."
            )
        self.epoch, self.position, self._read, self._begun = int(state["epoch"]), 0, 0, None
        start = EpochStart(state["generator"], state["torch"])
        self._resume = (read, start) if read else None
        if self._generator is not None and start.generator is not None:
            self._generator.set_state(start.generator)

    def _size(self) -> int | None:
        cut = self._shard or self._stream
        size: int | None = self.batch_size if cut is None else cut.batch_size
        return size


class _Singles:
    """A sampler of single items from batches of one."""

    def __init__(self, batches: BatchSamplerShard) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield batch[0]


def _looked_ahead(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last: of a stream that is only known when there is no next."""
    nothing = object()
    batch = next(batches, nothing)
    while batch is not nothing:
        following = next(batches, nothing)
        yield batch, following is nothing
        batch = following
