"""What all prepared loaders have in common: epochs, the loop that runs over them, the device of their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from shardwise.data.order import Company, set_epoch
from shardwise.data.placing import place, place_on_cpu
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


def kept_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """The options of a loader that another one of the same data takes over."""
    return {name: getattr(loader, name) for name in KEPT if hasattr(loader, name)}


class Loops(Protocol):
    """Told of the loops that run over prepared loaders."""

    def begin(self, loader: LoopedLoader) -> None:
        """An epoch begins, perhaps within that of another loader."""

    def advanced(self, loader: LoopedLoader) -> None:
        """The loader is about to hand out a batch."""

    def end(self, loader: LoopedLoader) -> None:
        """The epoch is over, or was left early."""


class LoopedLoader(DataLoader[Any]):
    """A loader of one rank that counts its epochs and batches, and says when a loop over it begins, advances and ends.

    Attributes:
        epoch: epochs that are over.
        position: batches handed out to this rank since the epoch began, or was resumed.
        end_of_dataloader: the batch that was handed out last is the epoch's last.
        device: where the tensors of a batch go, or None if they stay.
        non_blocking: whether they go without waiting.
        rng_types: which random states the ranks take over from the first one when an epoch begins, for information.
    """

    def _prepare(
        self,
        axis: Axis,
        device: torch.device | None,
        non_blocking: bool,
        loops: Loops | None,
        at_epoch: Callable[[], None] | None,
    ) -> None:
        """Set what does not depend on the data. To be called before ``DataLoader.__init__``."""
        self.epoch = 0
        self.position = 0
        self.end_of_dataloader = False
        self.device = device
        self.non_blocking = non_blocking
        self.rng_types: list[str] | None = getattr(at_epoch, "rng_types", None)
        self._company = Company(axis, device or torch.device("cpu"))
        self._loops = loops
        self._at_epoch = at_epoch
        # For a loader that leaves the first batches of each epoch out: how many of this rank's, and of which loader.
        self._skipped = 0
        self._whole: LoopedLoader | None = None
        # The copy that reads this one's epoch, without its first batches.
        self._running: LoopedLoader | None = None
        # Whether the state that was loaded is of an epoch that was over, and the script comes back to that one.
        self._loaded_over = self._empty = False

    def watched_by(self, loops: Loops | None) -> None:
        """Tell somebody else of the loops over this loader, from the next one on."""
        self._loops = loops

    def _describe(self, **values: Any) -> None:
        """Set attributes that ``DataLoader`` forgets when it is given a batch sampler: they only describe."""
        vars(self).update(values)

    @property
    def iteration(self) -> int:
        """The number of the epoch, as Accelerate calls it."""
        return self.epoch

    @iteration.setter
    def iteration(self, value: int) -> None:
        self.epoch = value

    @property
    def split_batches(self) -> bool:
        """Whether each batch is cut for all ranks, and not whole batches dealt out."""
        raise NotImplementedError

    @property
    def even_batches(self) -> bool:
        """Whether the last round is filled. May be set between epochs."""
        raise NotImplementedError

    @property
    def remainder(self) -> int:
        """Samples of the last round that no rank repeats; 0 if none is repeated, -1 if that is not known (yet)."""
        raise NotImplementedError

    @property
    def rows(self) -> int | None:
        """Samples of each rank in a last round that repeats some, where that is not the batch size; else None."""
        raise NotImplementedError

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all ranks together read in a step; None if the loader has no batch size."""
        raise NotImplementedError

    @property
    def total_dataset_length(self) -> int:
        """Samples of the data before it was cut for the ranks.

        Raises:
            TypeError: the data has no length.
        """
        data: Any = getattr(self.dataset, "dataset", self.dataset) if self._cut_stream else self.dataset
        return int(data.total_length) if hasattr(data, "total_length") else len(data)

    @property
    def _cut_stream(self) -> bool:
        return False

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next. One that was to be gone on with is then begun anew, unless it is this one.

        A shuffle depends on this number only if its sampler does: :class:`SeedableRandomSampler` does, a
        ``RandomSampler`` draws on.
        """
        if self._is_over(epoch):
            return
        if self._whole is not None:
            self._whole.set_epoch(epoch)
        if epoch != self.epoch:
            self._forget()
            self._running = None
        self.epoch = epoch
        self._announce()

    def _is_over(self, epoch: int) -> bool:
        """Whether this is the epoch with whose last batch the state was saved that was loaded.

        A script that keeps the epoch's number itself comes back to it: its next loop is then empty.
        """
        self._empty = self._loaded_over and epoch == self.epoch - 1
        return self._empty

    def _announce(self) -> None:
        if not set_epoch(self._listener(), self.epoch) and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)

    def _listener(self) -> Any:
        """The (batch) sampler that is told of epochs."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Drop a position to go on from."""

    def _start(self) -> None:
        """Get ready for an epoch. All ranks are there."""
        raise NotImplementedError

    def _finish(self) -> None:
        """The epoch was read to its end."""

    def _batches(self) -> Iterator[tuple[Any, bool]]:
        """What is left of the epoch for this rank, each batch with whether it is the last."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        empty, self._empty, self._loaded_over = self._empty, False, False
        if empty:
            return
        if self._at_epoch is not None:
            self._at_epoch()
        self._running = None
        if self._whole is not None:
            self.epoch, self._whole._running = self._whole.epoch, self
        self._announce()
        self._start()
        loops, device, non_blocking = self._loops, self.device, self.non_blocking
        advanced = None if loops is None else loops.advanced
        moved = place_on_cpu if device is not None and device.type == "cpu" else place
        mine = vars(self)  # `DataLoader.__setattr__` checks names, for each batch
        mine["position"], mine["end_of_dataloader"] = 0, False
        if loops is not None:
            loops.begin(self)
        try:
            for batch, last in self._batches():
                mine["position"] += 1
                if last:
                    mine["end_of_dataloader"] = True
                if advanced is not None:
                    advanced(self)
                yield batch if device is None else moved(batch, device, non_blocking)
            self.epoch, self.position = self.epoch + 1, 0
            self._finish()
            if self._whole is not None:
                self._whole.epoch, self._whole._running = self.epoch, None
        finally:
            # Also where the loop is left early, or raises.
            if loops is not None:
                loops.end(self)

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a loader was."""
        raise NotImplementedError

    def without_first(self, batches: int) -> LoopedLoader:
        """This loader without the first batches of each epoch, with everything else as it is here.

        It reads the epoch that this one is in, in the order that this one would. When it has read an epoch to its
        end, this one goes on with the next.

        Args:
            batches: how many of this rank's to leave out, counted from the start of the epoch.
        """
        skipped = object.__new__(type(self))
        vars(skipped).update(vars(self))
        skipped._whole = self if self._whole is None else self._whole
        skipped._running = None
        skipped.leave_out(batches)
        return skipped

    def leave_out(self, batches: int) -> None:
        """Read each epoch without its first batches, in addition to those that are left out already.

        Args:
            batches: of this rank.
        """
        self._skipped += batches
        self._recut()

    def _recut(self) -> None:
        """Make what changes while an epoch runs this loader's own, after it began as a copy of another."""
        vars(self)["_iterator"] = None

    def __getstate__(self) -> dict[str, Any]:
        # Workers and a loop that is running stay behind.
        return vars(self) | {"_iterator": None}

    def _read_in_samples(self, read: int, was: int | None, size: int | None) -> int:
        """Batches of this loader's size that are what another one has read.

        Raises:
            ConfigError: it is no whole number of them.
        """
        if not read or size == was:
            return read
        if not size or not was or read * was % size:
            raise ConfigError(
                f"{read} batches of {was} samples were read in this epoch, which are no whole batches of {size}. "
                "Resume with the same batch size, or from the end of an epoch."
            )
        return read * was // size
