"""The loader that `initialize(training_data=...)` builds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from shardwise.dist import Axis


def build_loader(
    dataset: Dataset[Any],
    *,
    batch_size: int,
    axis: Axis,
    drop_last: bool,
    seed: int,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> DataLoader[Any]:
    """A loader that gives each rank its own samples, shuffled anew each epoch (call ``sampler.set_epoch``).

    Args:
        dataset: map-style or iterable. An iterable dataset is read as it is: it must split itself by rank.
        batch_size: samples per micro-step of one rank.
        axis: the ranks that share the data.
        drop_last: leave out the last short batch.
        seed: of the shuffling, the same on every rank.
        collate_fn: as in ``DataLoader``.
    """
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, batch_size=batch_size, drop_last=drop_last, collate_fn=collate_fn)
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=axis.size, rank=axis.position, shuffle=True, seed=seed, drop_last=drop_last
    )
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=drop_last, collate_fn=collate_fn)
