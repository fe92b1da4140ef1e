"""Loaders without their first batches, for a loop that goes on in the middle of an epoch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardwise.data.looped import LoopedLoader, kept_options
from shardwise.data.split import SkipBatchSampler
from shardwise.data.stateful import stateful_reader


class SkipDataLoader(DataLoader[Any]):
    """A loader that reads its first batches and throws them away.

    Args:
        dataset: as for ``DataLoader``, like the arguments not named here.
        skip_batches: how many to throw away, whenever it is iterated.
        use_stateful_dataloader: read through torchdata's ``StatefulDataLoader``.
        options: as for ``DataLoader``.
    """

    def __init__(
        self, dataset: Dataset[Any], skip_batches: int = 0, use_stateful_dataloader: bool = False, **options: Any
    ) -> None:
        self.skip_batches = skip_batches
        self._reader: Any = stateful_reader({"dataset": dataset} | options) if use_stateful_dataloader else None
        super().__init__(dataset, **options)

    @classmethod
    def of(cls, loader: DataLoader[Any], skip_batches: int) -> SkipDataLoader:
        """The batches of a loader without the first ones."""
        made = cls(loader.dataset, skip_batches, batch_size=loader.batch_size, **kept_options(loader))
        made._reader = loader
        return made

    def __len__(self) -> int:
        return max(0, (super().__len__() if self._reader is None else len(self._reader)) - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return islice(super().__iter__() if self._reader is None else iter(self._reader), self.skip_batches, None)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader without the first batches of its epoch; everything else is as in the one given, which is not changed.

    Of a prepared loader it reads the epoch that the given one is in, and the given one then goes on with the next.
    Batches that a loaded state says were read are not left out in addition: both count from the start of the epoch.

    Args:
        dataloader: prepared or not.
        num_batches: how many batches of this rank to leave out. Those of a map-style dataset are not read; those of a
            stream must be.
    """
    if isinstance(dataloader, LoopedLoader):
        return dataloader.without_first(num_batches)
    own_way = type(dataloader).__iter__ is not DataLoader.__iter__
    if own_way or isinstance(dataloader.dataset, IterableDataset):
        return SkipDataLoader.of(dataloader, num_batches)
    skipped = copy.copy(dataloader)
    name = "batch_sampler" if dataloader.batch_sampler is not None else "sampler"
    sampler: Any = getattr(dataloader, name)
    vars(skipped).update({name: SkipBatchSampler(sampler, num_batches), "_iterator": None})
    return skipped
