"""``prepare`` for loaders: which kind of loader gives this process its part, with Accelerate's names and defaults."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from shardwise.accelerator.current import current_processes
from shardwise.accelerator.kinds import RNGType
from shardwise.accelerator.loader_kinds import DataLoaderDispatcher, DataLoaderShard, synchronizing
from shardwise.accelerator.process import Processes
from shardwise.data.looped import LoopedLoader, Loops
from shardwise.data.order import lone
from shardwise.data.seedable import SeedableRandomSampler
from shardwise.data.skipping import SkipDataLoader, skip_first_batches
from shardwise.data.split import BatchSamplerShard, IterableDatasetShard, SkipBatchSampler
from shardwise.errors import ConfigError, NotYetSupported

DataLoaderStateMixin = LoopedLoader


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Iterable[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    *,
    already_sharded: bool = False,
    loops: Loops | None = None,
    processes: Processes | None = None,
) -> DataLoader[Any]:
    """A loader of this process's part of the data.

    Args:
        dataloader: the loader that one process would use. It is not changed; one that is prepared is handed back.
        device: where the tensors of a batch go, if ``put_on_device``; by default that of the processes.
        num_processes: that share the data, by default all.
        process_index: of this one among them.
        split_batches: the batch size is that of all processes together.
        put_on_device: move batches to the device.
        rng_types: random states that all processes take over from the main one when an epoch begins. The generator of
            the sampler always is.
        dispatch_batches: the main process reads for all; by default for an iterable dataset if ``put_on_device``.
        even_batches: fill the last round from the start, so that all processes run equally many steps.
        slice_fn_for_dispatch: cuts a dispatched batch: ``f(batch, slice, process_index=, num_processes=)``.
        use_seedable_sampler: shuffle by the seed and the number of the epoch (:class:`SeedableRandomSampler`).
        data_seed: the seed of that, by default torch's.
        non_blocking: copy batches without waiting.
        use_stateful_dataloader: read through torchdata's ``StatefulDataLoader``.
        torch_device_mesh: processes along its dimensions ``tp`` and ``cp`` read the same.
        already_sharded: the loader yields this process's part as it is.
        loops: told when loops over the loader begin, advance and end.
        processes: all processes, by default those of the program.

    Raises:
        ConfigError: the loader cannot be cut like this; the message says why, and what to do.
    """
    if isinstance(dataloader, LoopedLoader):
        return dataloader
    if not isinstance(dataloader, DataLoader):
        raise ConfigError(f"dataloader: expected a torch.utils.data.DataLoader, got a {type(dataloader).__name__}.")
    everyone = current_processes() if processes is None else processes
    axis = everyone.axis
    part = _part(axis.size, axis.position, num_processes, process_index, torch_device_mesh)
    dispatch = isinstance(dataloader.dataset, IterableDataset) if dispatch_batches is None else dispatch_batches
    if dispatch and not put_on_device:
        if dispatch_batches:
            raise ConfigError("dispatch_batches=True needs put_on_device=True: batches arrive on the device.")
        dispatch = False
    if part[0] != axis.size and torch_device_mesh is None:
        axis = lone(axis)  # how the processes that do not take part read is not known: there is nobody to agree with
    if use_seedable_sampler:
        dataloader = _seedable(dataloader, data_seed)
    if part[0] > 1 and not already_sharded:
        already_sharded = _cut_by_rank(dataloader)
    to = (device or everyone.device) if put_on_device else None
    common: dict[str, Any] = {
        "device": to,
        "even_batches": even_batches,
        "non_blocking": non_blocking,
        "loops": loops,
        "at_epoch": synchronizing(rng_types, everyone),
        "stateful": use_stateful_dataloader,
    }
    if dispatch and not already_sharded:
        if part != (axis.size, axis.position):
            raise NotYetSupported(
                f"dispatch_batches=True sends to all {everyone.num_processes} processes, not to {part[0]} parts. Use "
                "dispatch_batches=False."
            )
        return DataLoaderDispatcher.of(
            dataloader, axis=axis, split_batches=split_batches, slice_fn=slice_fn_for_dispatch, **common
        )
    if part[0] > 1 and not split_batches and not already_sharded and _has_shards(dataloader.dataset, part[0]):
        data: Any = dataloader.dataset
        dataloader = _changed(dataloader, dataset=data.shard(num_shards=part[0], index=part[1]))
        already_sharded = True
    return DataLoaderShard.of(
        dataloader, axis=axis, split_batches=split_batches, already_sharded=already_sharded, part=part, **common
    )


def _part(size: int, position: int, count: int | None, index: int | None, mesh: Any) -> tuple[int, int]:
    """How many parts the data is cut in, and which one is this process's."""
    parts, mine = size if count is None else count, position if index is None else index
    names = () if mesh is None else tuple(mesh.mesh_dim_names or ())
    together = 1
    for name in ("tp", "cp"):
        if name in names:
            together *= mesh[name].size()
    parts, mine = parts // together, mine // together
    if not 0 <= mine < parts:
        raise ConfigError(f"process_index: {mine} is not one of {parts} parts.")
    return parts, mine


def _changed(loader: DataLoader[Any], **values: Any) -> DataLoader[Any]:
    """A copy of a loader with other data or another sampler."""
    changed = copy.copy(loader)
    vars(changed).update(values, _iterator=None)
    return changed


def _seedable(loader: DataLoader[Any], data_seed: int | None) -> DataLoader[Any]:
    """The loader with a shuffle that depends on a seed and the epoch only, if it shuffles."""
    if isinstance(loader.dataset, IterableDataset):
        return loader
    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    outer: Any = getattr(loader, name)
    batched = loader.batch_sampler is not None or isinstance(outer, BatchSampler)
    sampler = getattr(outer, "sampler", None) if batched else outer
    if not isinstance(sampler, RandomSampler) or (isinstance(sampler, SeedableRandomSampler) and data_seed is None):
        return loader
    seedable = SeedableRandomSampler(
        sampler.data_source, sampler.replacement, sampler._num_samples, sampler.generator, data_seed
    )
    if not batched:
        return _changed(loader, sampler=seedable)
    outer = copy.copy(outer)
    outer.sampler = seedable
    return _changed(loader, **{name: outer}, **({"sampler": seedable} if name == "batch_sampler" else {}))


def _cut_by_rank(loader: DataLoader[Any]) -> bool:
    """Whether a loader gives each process its own part already, which a warning then says."""
    data: Any = loader.dataset
    why = ""
    if not isinstance(data, IterableDataset):
        for sampler in (loader.sampler, getattr(loader.sampler, "sampler", None), loader.batch_sampler):
            for found in (sampler, getattr(sampler, "sampler", None)):
                if isinstance(found, DistributedSampler) and found.num_replicas > 1:
                    why = f"its sampler is a DistributedSampler for {found.num_replicas} ranks"
    elif getattr(getattr(data, "_distributed", None), "world_size", 1) > 1:
        why = "its dataset was split by `split_dataset_by_node`"
    if why:
        warnings.warn(
            f"the loader gives each process its own part already ({why}), so it is not cut again. Give already_sharded="
            "True to say so, or a loader without that to have it cut here.",
            stacklevel=3,
        )
    return bool(why)


def _has_shards(dataset: Any, parts: int) -> bool:
    """Whether a dataset is a stream of Hugging Face's datasets whose files suffice for all processes."""
    module = sys.modules.get("datasets")  # who has such a dataset has imported it
    kind = getattr(module, "IterableDataset", None)
    if not isinstance(kind, type) or not isinstance(dataset, kind):
        return False
    # Older ones call it n_shards.
    data: Any = dataset
    return int(data.num_shards if hasattr(data, "num_shards") else data.n_shards) >= parts


__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "prepare_data_loader",
    "skip_first_batches",
]
