"""A ``DataLoader`` that gives each rank its part, knows its last batch, and can go on where it stopped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from shardwise.data.looped import LoopedLoader, Loops, kept_options
from shardwise.data.order import (
    Company,
    EpochStart,
    Singles,
    WatchedBatches,
    drawn_again,
    generator_of,
    lone,
    seeded_in,
    start_epoch,
)
from shardwise.data.split import IterableDatasetShard
from shardwise.data.stateful import Reader, ResumableShard, has_state, stateful_reader
from shardwise.dist import Axis
from shardwise.errors import ConfigError


class PreparedLoader(LoopedLoader):
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
        at_epoch: called when an epoch begins, before its order is drawn.
        part: ``(number of parts, this one)`` where they are not the axis's ranks: some of those then read the same.
        stateful: read through torchdata's ``StatefulDataLoader``, which keeps the state of a dataset that has one.

    Raises:
        ConfigError: the loader cannot be cut for several ranks, or torchdata is not installed; the message says why.
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
        at_epoch: Callable[[], None] | None = None,
        part: tuple[int, int] | None = None,
        stateful: bool = False,
    ) -> None:
        ranks, index = (1, 0) if already_sharded else part or (axis.size, axis.position)
        own_way = type(loader).__iter__ is not DataLoader.__iter__
        if own_way and ranks > 1:
            raise ConfigError(
                f"{type(loader).__name__} has an __iter__ of its own, so its batches cannot be dealt out to {ranks} "
                "ranks. Give a plain DataLoader with a sampler, a batch_sampler or an IterableDataset; or let the "
                "loader yield each rank's own part, and say already_sharded=True."
            )
        # Ranks that do not share an order have nothing to agree on: they may read when they like.
        self._prepare(axis if ranks > 1 else lone(axis), device, non_blocking, loops, at_epoch)
        self._given = loader if own_way else None
        self._owners = (part[0] if part else axis.size) if already_sharded else 0
        self._split = split_batches and ranks > 1
        self._even = even_batches
        self._ranks, self._index = ranks, index
        # Where the epoch was when this run of it began: batches of all ranks, and the states that its order is from.
        self._read = 0
        self._begun: EpochStart | None = None
        self._resume: _Position | None = None
        self._redraw = False
        self._first_read: Any = None  # of an epoch of which a stream's first batches were read again
        self._base = 0  # of `_read`, what a state of the reader does not count
        self._stateful = stateful
        self._reader: Reader | None = None
        self._snapshot: dict[str, Any] | None = None
        self._stream: IterableDatasetShard | None = None
        self._shard: WatchedBatches | None = None
        kept = kept_options(loader)
        if isinstance(loader.dataset, IterableDataset):
            made = self._streamed(loader)
        else:
            made = self._sampled(loader)
        super().__init__(**made, **kept)
        if stateful:
            self._reader = stateful_reader(made | kept)
        size = self._size()
        self._describe(
            batch_size=size // ranks if size and self._split else size,
            drop_last=loader.drop_last or bool(self._shard is not None and self._shard.drop_last),
            **({"sampler": loader.sampler} if self.batch_sampler is not None and self._shard is not None else {}),
        )

    def __len__(self) -> int:
        left_out = self._skipped if self._shard is None else 0  # the shard counts for itself
        return max(0, super().__len__() - left_out)

    # -- how it is cut --

    @property
    def _together(self) -> Company | None:
        """The ranks that must read one order, if there are any."""
        return self._company if self._ranks > 1 and self._company.axis.size > 1 else None

    def _streamed(self, loader: DataLoader[Any]) -> dict[str, Any]:
        size = loader.batch_size
        if self._ranks == 1:
            return {"dataset": loader.dataset, "batch_size": size, "drop_last": loader.drop_last}
        if size is None and self._split:
            raise ConfigError("split_batches needs a loader with a batch size; this one's samples are batches already.")
        kind = ResumableShard if self._stateful and has_state(loader.dataset) else IterableDatasetShard
        self._stream = kind(
            loader.dataset, size or 1, loader.drop_last, self._ranks, self._index, self._split, self._even
        )
        part = size // self._ranks if size and self._split else size
        return {"dataset": self._stream, "batch_size": part, "drop_last": loader.drop_last}

    def _sampled(self, loader: DataLoader[Any]) -> dict[str, Any]:
        # Without automatic batches, the sampler yields what the dataset is asked for: whole batches, or single items.
        plain = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        single = loader.batch_sampler is None and not isinstance(plain, BatchSampler)
        base: Iterable[Any] = BatchSampler(loader.sampler, 1, False) if single else plain
        self._shard = WatchedBatches(base, self._ranks, self._index, self._split, self._even, self._together)
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        found = {"dataset": loader.dataset, name: Singles(self._shard) if single else self._shard}
        return found | ({} if name != "sampler" else {"batch_size": None})

    @property
    def _cut(self) -> WatchedBatches | IterableDatasetShard | None:
        return self._stream if self._shard is None else self._shard

    @property
    def _drawer(self) -> Any:
        """What draws the order: a sampler, or a stream that may have a generator."""
        if self._shard is not None:
            return self._shard
        return self.dataset if self._stream is None else self._stream.dataset

    @property
    def _cut_stream(self) -> bool:
        return self._stream is not None

    def _listener(self) -> Any:
        return self._shard

    @property
    def split_batches(self) -> bool:
        """Whether each batch is cut for all ranks, and not whole batches dealt out."""
        return self._split

    @property
    def even_batches(self) -> bool:
        """Whether the last round is filled. May be set between epochs."""
        cut = self._cut
        return self._even if cut is None else cut.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        cut = self._cut
        self._even = value
        if cut is not None:
            cut.even_batches = value

    @property
    def remainder(self) -> int:
        """Samples of the last round that no rank repeats; 0 if none is repeated, -1 if that is not known (yet)."""
        cut = self._cut
        if self._ranks == 1 or cut is None:
            return self._padded_by_its_sampler()
        if not cut.even_batches or cut.drop_last:
            return 0
        data: Any = self._stream.dataset if self._stream is not None else None
        if self._shard is not None and type(self._shard.batch_sampler) is BatchSampler:
            data = self._shard.batch_sampler.sampler
        size = cut.batch_size
        if isinstance(data, Sized) and size:
            return (len(data) - self._read * size) % (size * self._turns)
        return cut.remainder

    @property
    def rows(self) -> int | None:
        """Samples of each rank in a last round that repeats some, where that is not the batch size; else None."""
        return None if self._shard is None or self._shard.batch_size is not None else self._shard.rows

    def _padded_by_its_sampler(self) -> int:
        """0, or -1 if torch's sampler for several ranks repeats samples, which are then not the last of a round."""
        sampler = getattr(self._shard, "sampler", None)
        if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
            return 0
        return -1 if len(sampler.dataset) % sampler.num_replicas else 0  # type: ignore[arg-type]

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all ranks together read in a step; None if the loader has no batch size."""
        size = self._size()
        return None if size is None else size * (self._owners or self._turns)

    @property
    def _turns(self) -> int:
        """Batches of the given loader that make one of each rank."""
        return 1 if self._split else self._ranks

    # -- a loop --

    def _start(self) -> None:
        again, self._resume = self._resume, None
        if isinstance(self._whole, PreparedLoader):
            # What is left out is counted from the start of the epoch, also of one that another run began.
            again, self._whole._resume = self._whole._resume, None
            if again is not None:
                again = _Position(self._skipped * self._turns, again.start)
        begun = start_epoch(self._drawer, self._company)
        self._redraw, self._snapshot = again is not None, None
        if again is None:
            again = _Position(self._skipped * self._turns, begun)
        self._read, self._begun, self._base = again.read, again.start, again.read
        if self._reader is not None:
            self._reader.load_state_dict(again.reader or {})
            self._base = again.base if again.reader else again.read

    def _finish(self) -> None:
        self._read, self._begun, self._snapshot, self._first_read = 0, None, None, None

    def _batches(self) -> Iterator[tuple[Any, bool]]:
        shard = self._shard
        if shard is None or self._given is not None:
            yield from self._unsampled()
            return
        shard.skip = self._base
        try:
            if self._redraw and self._begun is not None:
                with drawn_again(self._begun, generator_of(shard)):
                    batches = self._reading()
                    shard.draw()
            else:
                batches = self._reading()
            for number, batch in enumerate(batches, 1 + (self._read - self._base) // self._turns):
                yield batch, shard.total == number
        finally:
            shard.skip = self._skipped * self._turns

    def _reading(self) -> Iterator[Any]:
        return DataLoader.__iter__(self) if self._reader is None else iter(self._reader)

    def _unsampled(self) -> Iterator[tuple[Any, bool]]:
        """What is left of a stream, or of a loader that iterates in its own way."""
        again = self._base // self._turns
        if self._stream is not None and not self.num_workers:
            again, self._stream.skip = 0, self._base * self._stream.batch_size
        batches = self._reading() if self._given is None else iter(self._given)
        for number in range(again):
            batch = next(batches, None)
            if number == 0:
                self._first_read = batch
        # That a batch is the last is only known when there is no next.
        nothing = object()
        batch = next(batches, nothing)
        while batch is not nothing:
            if self._reader is not None and has_state(self.dataset):
                self._snapshot = self._reader.state_dict()
            following = next(batches, nothing)
            yield batch, following is nothing
            batch = following

    # -- going on later --

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is: the epoch, what all ranks have read of it, and the states that its order is from."""
        if isinstance(self._running, PreparedLoader):
            return self._running.state_dict()
        if self._resume is None and self._begun is not None and self.end_of_dataloader and self.position:
            # With its last batch an epoch is over for whoever goes on: what comes is the next one.
            return self.next_epoch(self.epoch + 1) | {"over": True}
        return self._state(self.epoch, self._resume or self._position_now())

    def next_epoch(self, epoch: int) -> dict[str, Any]:
        """The state from which an epoch begins that is the next one to be drawn."""
        return self._state(epoch, self._next_start())

    def _state(self, epoch: int, at: _Position) -> dict[str, Any]:
        seeded = seeded_in(self._shard)
        state: dict[str, Any] = {
            "epoch": epoch,
            "batches": at.read,
            "batch_size": self._size(),
            "generator": at.start.generator,
            "torch": at.start.torch,
            "seed": None if seeded is None else seeded.initial_seed,
            "owners": self._owners,
        }
        if self._reader is not None:
            state["reader"] = at.reader
            state["reader_of"] = [at.base, self._ranks, self._index]
        return state

    def _next_start(self) -> _Position:
        generator = generator_of(self._drawer)
        begun = EpochStart(None if generator is None else generator.get_state(), torch.get_rng_state())
        return _Position(0, begun)

    def _position_now(self) -> _Position:
        if self._begun is None:
            return replace(self._next_start(), read=self._read)
        read, state = self._read + self.position * self._turns, None
        # A stream without a state is read again up to here, which we count ourselves: torchdata counts what it reads
        # again twice, which shows when one goes on a second time. A stream at its end may have begun anew already.
        useful = self._shard is not None or (has_state(self.dataset) and not self.end_of_dataloader)
        if self._reader is not None and self.position and useful:
            state = self._reader.state_dict() if self._shard is not None else self._snapshot
        return _Position(read, self._begun, state, self._base)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a loader of the same data was, on as many ranks or on others.

        Raises:
            ConfigError: what was read is no whole number of batches of this loader's size; or it is a stream with
                workers, and no whole number of rounds of these ranks; or each rank's loader has its own part of the
                data, and there were others.
        """
        read = self._read_in_samples(int(state["batches"]), state["batch_size"], self._size())
        if read % self._turns and self._stream is not None and self.num_workers:
            raise ConfigError(
                f"{read} batches of a stream were read in this epoch, which is no whole number of rounds of "
                f"{self._ranks} ranks, as it must be with num_workers={self.num_workers}: each worker reads a stream "
                "of its own. Resume on a number of ranks that divides it, or with num_workers=0."
            )
        if read and state.get("owners", 0) != self._owners:
            raise ConfigError(
                f"the epoch was begun by {state.get('owners', 0) or 'ranks that share one loader, not'} loaders with a "
                f"part of their own each, and cannot be finished by {self._owners or 'ranks that share one'}. Resume "
                "on the same number of ranks, or from the end of an epoch."
            )
        self.epoch, self.position, self._read, self._begun = int(state["epoch"]), 0, 0, None
        self._running, self._loaded_over = None, bool(state.get("over"))
        start = EpochStart(state["generator"], state["torch"])
        self._resume = _Position(read, start) if read else None
        base, *part = state.get("reader_of") or [0, 0, 0]
        if read and part == [self._ranks, self._index] and read == int(state["batches"]):
            # Of another rank, it says where in another part that one was; the number of batches holds for all.
            self._resume = _Position(read, start, state["reader"], base)
        generator, seeded = generator_of(self._drawer), seeded_in(self._shard)
        if generator is not None and start.generator is not None:
            generator.set_state(start.generator)
        if seeded is not None and state.get("seed") is not None:
            seeded.initial_seed = int(state["seed"])

    def _forget(self) -> None:
        self._resume = None

    def _recut(self) -> None:
        super()._recut()
        self._resume = None
        mine = vars(self)
        for cut in (self._shard, self._stream):
            if cut is None:
                continue
            fresh: Any = copy.copy(cut)
            fresh.skip = self._skipped * self._turns * (self._stream.batch_size if cut is self._stream else 1)
            for name in ("_shard", "_stream", "batch_sampler", "sampler", "dataset"):
                if mine[name] is cut:
                    mine[name] = fresh
                elif isinstance(mine[name], Singles):
                    mine[name] = Singles(fresh)
        if self._reader is not None:
            made: dict[str, Any] = {"dataset": self.dataset}
            if self._shard is None:
                made |= {"batch_size": self.batch_size, "drop_last": self.drop_last}
            elif self.batch_sampler is not None:
                made["batch_sampler"] = self.batch_sampler
            else:
                made |= {"sampler": self.sampler, "batch_size": None}
            self._reader = stateful_reader(made | kept_options(self))

    def _size(self) -> int | None:
        cut = self._cut
        return self.batch_size if cut is None else cut.batch_size


@dataclass(frozen=True)
class _Position:
    """Where in an epoch: what all ranks have read of it, the states that its order is from, the state of the reader."""

    read: int
    start: EpochStart
    reader: dict[str, Any] | None = None
    base: int = 0
