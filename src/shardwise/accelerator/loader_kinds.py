"""The prepared loaders under Accelerate's names, which also take what Accelerate's constructors take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from shardwise.accelerator.current import current_processes
from shardwise.accelerator.kinds import RNGType
from shardwise.accelerator.process import Processes
from shardwise.accelerator.seeds import synchronize_rng_states
from shardwise.data.dispatch import DispatchedLoader
from shardwise.data.looped import LoopedLoader
from shardwise.data.order import lone
from shardwise.data.prepared import PreparedLoader
from shardwise.errors import ConfigError


class DataLoaderShard(PreparedLoader):
    """One process's part of the data. ``prepare`` makes these from a loader; made directly, it reads what it is given.

    Args:
        dataset: as for ``DataLoader``, like the arguments not named here.
        device: where the tensors of a batch go, or None to leave them.
        rng_types: random states that all processes take over from the main one when an epoch begins.
        synchronized_generator: not used: the generator of the sampler always is synchronised.
        skip_batches: batches to leave out at the start of each epoch.
        use_stateful_dataloader: read through torchdata's ``StatefulDataLoader``.
        iteration: the number of the epoch.
        options: as for ``DataLoader``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        device: torch.device | None = None,
        rng_types: Iterable[str | RNGType] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **options: Any,
    ) -> None:
        del synchronized_generator
        everyone = current_processes()
        super().__init__(
            DataLoader(dataset, **options),
            axis=lone(everyone.axis),
            device=device,
            non_blocking=_non_blocking,
            at_epoch=synchronizing(rng_types, everyone),
            stateful=use_stateful_dataloader,
        )
        _name(self, use_stateful_dataloader, _drop_last, torch_device_mesh)
        _begin_at(self, iteration, skip_batches)

    @classmethod
    def of(cls, loader: DataLoader[Any], **options: Any) -> DataLoaderShard:
        """Prepare a loader. Args: as for :class:`PreparedLoader`."""
        made = cls.__new__(cls)
        PreparedLoader.__init__(made, loader, **options)
        _name(made, options.get("stateful", False))
        return made

    @property
    def gradient_state(self) -> Any:
        """Who is told of the loops over this loader."""
        return self._loops


class DataLoaderDispatcher(DispatchedLoader):
    """One process's part of data that the main process reads for all.

    Args: as for :class:`DataLoaderShard`, and
        split_batches: cut each batch for all processes.
        slice_fn: cuts a batch that all batches of a round were joined to.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **options: Any,
    ) -> None:
        everyone = current_processes()
        super().__init__(
            DataLoader(dataset, **options),
            axis=everyone.axis,
            device=everyone.device,
            split_batches=split_batches,
            non_blocking=_non_blocking,
            slice_fn=slice_fn,
            stateful=use_stateful_dataloader,
        )
        _name(self, use_stateful_dataloader, _drop_last, torch_device_mesh)
        _begin_at(self, iteration, skip_batches)

    @classmethod
    def of(cls, loader: DataLoader[Any], **options: Any) -> DataLoaderDispatcher:
        """Prepare a loader. Args: as for :class:`DispatchedLoader`."""
        made = cls.__new__(cls)
        DispatchedLoader.__init__(made, loader, **options)
        _name(made, options.get("stateful", False))
        return made

    @property
    def gradient_state(self) -> Any:
        """Who is told of the loops over this loader."""
        return self._loops


def _name(loader: LoopedLoader, stateful: bool, drop_last: bool = False, mesh: Any = None) -> None:
    """What Accelerate's loaders call these things."""
    loader._describe(
        use_stateful_dataloader=stateful,
        torch_device_mesh=mesh,
        _drop_last=drop_last or loader.drop_last,
        _non_blocking=loader.non_blocking,
    )


def _begin_at(loader: PreparedLoader | DispatchedLoader, epoch: int, batches: int) -> None:
    loader.epoch = epoch
    if batches:
        loader.leave_out(batches)


@dataclass(frozen=True)
class Synchronizing:
    """Gives all processes the main one's random states. The sampler's generator is not its business: it always is."""

    rng_types: list[str]
    processes: Processes | None

    def __call__(self) -> None:
        """To be called by all processes."""
        others = [name for name in self.rng_types if name != RNGType.GENERATOR.value]
        if others:
            synchronize_rng_states(others, processes=self.processes)

    def __getstate__(self) -> dict[str, Any]:
        return {"rng_types": self.rng_types, "processes": None}  # another program has its own


def synchronizing(rng_types: Iterable[str | RNGType] | None, processes: Processes) -> Synchronizing | None:
    """What a loader calls when an epoch begins, or None if there is nothing to do.

    Raises:
        ConfigError: an unknown type.
    """
    return None if rng_types is None else Synchronizing([_kind(name) for name in rng_types], processes)


def _kind(name: str | RNGType) -> str:
    try:
        return RNGType(name).value
    except ValueError as error:
        known = ", ".join(kind.value for kind in RNGType)
        raise ConfigError(f"rng_types: `{name}` is not known; expected {known}.") from error
