"""Loaders whose workers and data keep a state of their own, with torchdata's ``StatefulDataLoader``.

Without it a position in the data is a number of batches, and a stream is read again up to there. A dataset with
``state_dict`` and ``load_state_dict`` can do better; torchdata knows how to ask it, also in workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import chain, islice
from typing import Any, Protocol

from shardwise.data.split import IterableDatasetShard, repeated
from shardwise.errors import ConfigError


class Reader(Protocol):
    """What is used of a ``StatefulDataLoader``."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]:
        """Where the workers and the data are."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Be there when iterated next."""


def stateful_reader(options: Mapping[str, Any]) -> Reader:
    """A ``StatefulDataLoader`` with these options.

    Raises:
        ConfigError: torchdata is not installed.
    """
    try:
        module = import_module("torchdata.stateful_dataloader")
    except ImportError as error:
        raise ConfigError(
            "use_stateful_dataloader=True reads through `StatefulDataLoader` of the package torchdata, which cannot be "
            f"imported here ({error}). Install torchdata (0.8 or newer), or leave use_stateful_dataloader off: loaders "
            "then still go on where they were, but read a stream again up to there."
        ) from error
    reader: Reader = module.StatefulDataLoader(**options)
    return reader


def has_state(dataset: Any) -> bool:
    """Whether a dataset can say where it is, and go there."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


class ResumableShard(IterableDatasetShard):
    """One rank's samples of a stream with a state, which then has one too: that of the stream before a chunk, and how
    many samples of the chunk were given out.

    Args: as for :class:`IterableDatasetShard`; the ``dataset`` has ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._loaded: dict[str, Any] | None = None
        self._at: dict[str, Any] = {"dataset": None, "start": [], "given": 0}

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is: the state that it had before the chunk that is being given out, None at its start."""
        return dict(self._at) if self._loaded is None else self._loaded

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Be there when iterated next."""
        self._loaded = dict(state)

    def __iter__(self) -> Iterator[Any]:
        self._seed()
        loaded, self._loaded = self._loaded or {"dataset": None, "start": [], "given": 0}, None
        if loaded["dataset"] is not None:
            self.dataset.load_state_dict(loaded["dataset"])
        samples, start, given = iter(self.dataset), list(loaded["start"]), int(loaded["given"])
        before, whole = loaded["dataset"], self._part * self.num_processes
        if before is None:
            # From the start, perhaps without some samples. A state has left them out already.
            start = list(islice(samples, whole))
            samples = islice(chain(start, samples), self.skip, None)
        self.remainder = -1
        while True:
            self._at = {"dataset": before, "start": start, "given": given}
            chunk = list(islice(samples, whole))
            if not chunk:
                break
            for sample in self._mine(chunk, start)[given:]:
                given += 1
                self._at = {"dataset": before, "start": start, "given": given}
                yield sample
            before, given = self.dataset.state_dict(), 0
        self.remainder = max(0, self.remainder)

    def _mine(self, chunk: list[Any], start: list[Any]) -> list[Any]:
        part = self._part
        first, end = self.process_index * part, (self.process_index + 1) * part
        if len(chunk) < part * self.num_processes:
            if self.drop_last:
                return []
            if self.even_batches:
                self.remainder = len(chunk)
                return list(islice(repeated(chunk, start), first, end))
        return chunk[first:end]
