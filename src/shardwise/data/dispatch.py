"""A ``DataLoader`` whose data one rank reads for all: streams that cannot be read twice, or that only one can reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from shardwise.data.looped import LoopedLoader, Loops, kept_options
from shardwise.data.order import lone
from shardwise.data.parcels import Parcels
from shardwise.data.prepared import PreparedLoader
from shardwise.data.rounds import Dealer, Round, SliceFn
from shardwise.dist import Axis
from shardwise.errors import ConfigError


class DispatchedLoader(LoopedLoader):
    """One rank's part of what another loader yields on the first rank. The others do not read any data.

    Each rank gets whole batches as they are, of whatever kinds :func:`shardwise.dist.values.pack` takes; they may
    differ in the length of their sequences. Only a last round that is short is joined, completed from the first batch
    of the epoch, and cut in equal parts; where its batches do not fit together, ranks without one get the first batch.

    Args:
        loader: the loader that one process would use. It is not changed.
        axis: the ranks.
        device: where the tensors of a batch go, or None for where they are.
        split_batches: cut each batch for all ranks; its size is that of all together.
        even_batches: complete the last round. Without that, ranks with nothing in it stop a step earlier.
        non_blocking: copy without waiting.
        slice_fn: see :class:`shardwise.data.rounds.Dealer`.
        loops: told when loops begin, advance and end.
        at_epoch: called when an epoch begins.
        stateful: read through torchdata's ``StatefulDataLoader``.

    Raises:
        ConfigError: ``split_batches`` with a batch size that the ranks do not divide.
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
        slice_fn: SliceFn | None = None,
        loops: Loops | None = None,
        at_epoch: Callable[[], None] | None = None,
        stateful: bool = False,
    ) -> None:
        self._prepare(axis, device, non_blocking, loops, at_epoch)
        self._source = PreparedLoader(loader, axis=lone(axis), stateful=stateful)
        self._stateful = stateful
        self.slice_fn = slice_fn
        self._split, self._even, self._ranks = split_batches and axis.size > 1, even_batches, axis.size
        self._read = 0
        self._remainder, self._rows = -1, 0
        # Of the rank that reads: the state of its loader after some number of batches of this run. One tells from
        # where the order is drawn; if data and workers have a state too, each batch not handed out yet has its own.
        self._states: dict[int, dict[str, Any]] = {}
        size = self._size()
        if self._split and size is not None and size % axis.size:
            raise ConfigError(
                f"split_batches cuts each batch in {axis.size} equal parts, but the batch size is {size}. Give the "
                f"loader a batch size that is a round multiple of {axis.size}, or leave split_batches off."
            )
        made: dict[str, Any] = {"dataset": loader.dataset}
        if isinstance(loader.dataset, IterableDataset):
            made |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        elif loader.batch_sampler is not None:
            made["batch_sampler"] = loader.batch_sampler
        else:
            made |= {"sampler": loader.sampler, "batch_size": None}
        super().__init__(**made, **kept_options(loader))
        drop_last = self._source.drop_last
        self._describe(
            batch_size=size // axis.size if size and self._split else size, drop_last=drop_last, sampler=loader.sampler
        )

    def __len__(self) -> int:
        total, n = super().__len__(), self._ranks
        if self._split:
            rounds = total
        elif self.drop_last:
            rounds = total // n
        else:
            rounds = total // n + (total % n > (0 if self._even else self._company.axis.position))
        return max(0, rounds - self._skipped)

    def _listener(self) -> Any:
        return self.batch_sampler

    @property
    def _turns(self) -> int:
        return 1 if self._split else self._ranks

    @property
    def split_batches(self) -> bool:
        """Whether each batch is cut for all ranks, and not whole batches dealt out."""
        return self._split

    @property
    def even_batches(self) -> bool:
        """Whether the last round is completed. May be set between epochs."""
        return self._even

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._even = value

    @property
    def remainder(self) -> int:
        """Samples of the last round that no rank repeats; 0 if none is repeated, -1 before the last round."""
        return 0 if self._ranks == 1 or self.drop_last or not self._even else self._remainder

    @property
    def rows(self) -> int | None:
        """Samples of each rank in the last round, if it repeats some; else, and where ranks differ, None."""
        return self._rows or None

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all ranks together read in a step; None if the loader has no batch size."""
        size = self._size()
        return None if size is None else size * self._turns

    def _size(self) -> int | None:
        return self._source.total_batch_size

    # -- a loop --

    def _announce(self) -> None:
        pass  # the loader that reads does, on the rank that reads

    def _sources(self) -> list[PreparedLoader]:
        whole = self._source._whole
        return [self._source, whole] if isinstance(whole, PreparedLoader) else [self._source]

    def _start(self) -> None:
        pending = self._source._resume
        self._read = self._skipped * self._turns or (pending.read if pending is not None else 0)
        self._remainder, self._rows, self._states = -1, 0, {}
        for loader in self._sources():
            loader.epoch = self.epoch
            if self._company.axis.position:
                loader._forget()

    def _finish(self) -> None:
        self._read, self._states = 0, {}
        for loader in self._sources():
            # Its last batch was the last of all: it is not asked for another, with which it would find out itself.
            loader.epoch, loader.position = self.epoch, 0
            loader._finish()

    def _batches(self) -> Iterator[tuple[Any, bool]]:
        axis = self._company.axis
        for turn in self._rounds() if axis.position == 0 else self._received():
            mine, self._remainder, self._rows = turn.parts[0], turn.remainder, turn.rows
            for number, batch in enumerate(mine, 1):
                yield batch, turn.last and number == len(mine)

    def _rounds(self) -> Iterator[Round]:
        """Read, deal out, keep this rank's part."""
        parcels = Parcels(self._company.axis, self._company.device) if self._ranks > 1 else None
        has_indices = self._source._shard is not None
        dealer = Dealer(
            self._ranks,
            self._split,
            self._even,
            self.drop_last,
            self._size(),
            whole=self._size() is None and self.batch_sampler is None,
            slice_fn=self.slice_fn,
            # A stream that goes on by its state does not see its first batch again.
            first_again=self._first_again if self._read and (has_indices or not self._stateful) else None,
        )
        turns = dealer.deal(self._noted())
        while True:
            try:
                turn = next(turns, None)
                mine = turn if parcels is None else parcels.send(turn)
            except Exception as error:
                # The others wait for a batch: they must learn that there is none before this rank goes.
                if parcels is not None and not self._company.axis.failed:
                    parcels.fail(error)
                raise
            if mine is None:
                return
            yield mine
            if mine.last:
                return

    def _noted(self) -> Iterator[tuple[Any, bool]]:
        source = self._source
        for count, batch in enumerate(source, 1):
            if self._stateful or count == 1:
                handed_out = self.position * self._turns
                self._states = {k: v for k, v in self._states.items() if k >= handed_out} | {count: source.state_dict()}
            yield batch, source.end_of_dataloader

    def _received(self) -> Iterator[Round]:
        parcels = Parcels(self._company.axis, self._company.device)
        while (turn := parcels.receive()) is not None:
            yield turn
            if turn.last:
                return

    def _first_again(self) -> Any:
        """The epoch's first batch, of which another run had read: it may be needed to complete the last."""
        shard = self._source._shard
        if shard is None:
            return self._source._first_read
        with torch.random.fork_rng(devices=[]):
            if self.batch_sampler is not None:
                return self.collate_fn([self.dataset[i] for i in shard.first])
            whole = isinstance(self.sampler, BatchSampler)
            return self.collate_fn(self.dataset[shard.first if whole else shard.first[0]])

    # -- going on later --

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is. Of the rank that reads: it alone knows from where the order was drawn."""
        if isinstance(self._running, DispatchedLoader):
            return self._running.state_dict()
        if self._source._resume is not None:  # loaded, and not read from since
            return self._source.state_dict()
        if self.end_of_dataloader and self.position:
            # With its last batch an epoch is over for whoever goes on: what comes next is the next one.
            return self._source.next_epoch(self.epoch + 1) | {"over": True}
        handed_out, states = self.position * self._turns, self._states
        found = [n for n in states if n <= handed_out] or list(states)
        state = states[max(found)] if found else self._source.state_dict()
        return state | {"epoch": self.epoch, "batches": self._read + handed_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a loader of the same data was, on as many ranks or on others.

        Args:
            state: of the rank that read, on all ranks.

        Raises:
            ConfigError: what was read is no whole number of batches of this loader's size.
        """
        self._source.load_state_dict(state)
        self._source._loaded_over = False  # it is this one that is looped over
        self._loaded_over = bool(state.get("over"))
        self.epoch, self.position, self._read = self._source.epoch, 0, 0
        self._states, self._running = {}, None

    def set_epoch(self, epoch: int) -> None:
        """See :meth:`LoopedLoader.set_epoch`."""
        if self._is_over(epoch):
            return
        super().set_epoch(epoch)
        if self._company.axis.position == 0:
            self._source.set_epoch(epoch)

    def _forget(self) -> None:
        for loader in self._sources():
            loader._forget()

    def _recut(self) -> None:
        super()._recut()
        vars(self)["_source"] = self._sources()[-1].without_first(self._skipped * self._turns)
