"""The mesh: which ranks hold which part of the model, as named axes."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise import _torch
from shardwise.errors import ConfigError
from shardwise.dist.comm import Axis


def init_distributed(dist_backend: str | None = None, timeout: timedelta = timedelta(minutes=10), **group: Any) -> None:
    """Start the default process group from the environment that ``shardwise launch`` or ``torchrun`` sets.

    Does nothing when a group exists already, or when this process was started alone.

    Args:
        dist_backend: ``"nccl"``, ``"gloo"``, ...; by default NCCL when there is a GPU for each rank, else gloo.
        timeout: how long a collective waits for the other ranks.
        group: ``rank``, ``world_size``, ``init_method`` or ``store`` for a script that was not started by a launcher;
            handed to ``torch.distributed.init_process_group``.
    """
    # Not for a run on the CPU: choosing a GPU takes memory on it, and fails in a process that was forked.
    if dist_backend != "gloo" and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if dist.is_initialized() or (not group and int(os.environ.get("WORLD_SIZE", "1")) == 1):
        return
    if dist_backend is None:
        one_each = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        dist_backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and one_each else "gloo"
    if not group:
        group = _fresh_place(timeout)
    dist.init_process_group(dist_backend, timeout=timeout, **group)
    atexit.unregister(_end_gloo)  # one is enough
    atexit.register(_end_gloo)


def _end_gloo() -> None:
    """End the group with the program: a gloo group that is left open aborts one exit in ten (torch 2.13)."""
    if not dist.is_initialized():
        return
    # Not NCCL's: its end waits for what is in flight, also where a rank is gone.
    if all(entry.endswith(":gloo") for entry in dist.get_backend_config().split(",")):
        dist.destroy_process_group()


def _fresh_place(timeout: timedelta) -> dict[str, Any]:
    """Where the ranks meet: a part of the launcher's store that no earlier group of this run has used.

    torch names groups from 0 again after the default group was destroyed. In a store that outlives it, as that of an
    elastic agent does, the ranks would then find the old group's addresses, and wait for it.
    """
    store, rank, size = _torch.env_store(timeout)
    number = store.add(f"shardwise/groups of rank {rank}", 1)
    part: Any = dist.distributed_c10d.PrefixStore(f"shardwise/{number}", store)
    return {"store": part, "rank": rank, "world_size": size}


def default_device() -> torch.device:
    """The device of this rank: its GPU if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(frozen=True)
class Mesh:
    """The data-parallel ranks, cut as ``replicate x shard``.

    Attributes:
        world: all ranks. Gradient norms and flags are agreed on here.
        shard: the ranks among which each unit is cut.
        replicate: the ranks that hold the same slice (size 1 unless MiCS).
        secondary: the ranks among which ZeRO++ hpZ keeps its second copy of the parameters, or None.
    """

    world: Axis
    shard: Axis
    replicate: Axis
    secondary: Axis | None

    @classmethod
    def build(cls, *, shard_size: int = 0, secondary_size: int = 1, timeout: timedelta) -> Mesh:
        """Make the process groups.

        Args:
            shard_size: ranks per shard group; 0 means all of them. Consecutive ranks form a group.
            secondary_size: ranks per hpZ group; 1 means none.
            timeout: how long a collective waits for the other ranks.

        Raises:
            ConfigError: a size that does not divide the number of ranks.
        """
        size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        shard_size = shard_size or size
        for name, value in (("mics_shard_size", shard_size), ("zero_hpz_partition_size", secondary_size)):
            if size % value:
                raise ConfigError(f"zero_optimization.{name}: {value} does not divide the {size} ranks.")
        everyone = tuple(range(size))
        world = _axis("world", [everyone], rank, timeout)
        if shard_size == size:
            shard, replicate = world, _axis("replicate", [(r,) for r in everyone], rank, timeout)
        else:
            blocks = [tuple(range(i, i + shard_size)) for i in range(0, size, shard_size)]
            shard = _axis("shard", blocks, rank, timeout)
            replicate = _axis("replicate", list(zip(*blocks, strict=True)), rank, timeout)
        secondary = None
        if 1 < secondary_size < size:
            rows = [tuple(range(i, i + secondary_size)) for i in range(0, size, secondary_size)]
            secondary = _axis("secondary", rows, rank, timeout)
        return cls(world, shard, replicate, secondary)

    @classmethod
    def over(cls, world: Axis) -> Mesh:
        """A mesh without groups of its own, over the ranks of an axis that exists."""
        alone = Axis("replicate", (world.ranks[world.position],), 0, None, world.timeout)
        return cls(world, world, alone, None)

    def axes(self) -> list[Axis]:
        """Every distinct axis."""
        found = {id(a): a for a in (self.world, self.shard, self.replicate, self.secondary) if a is not None}
        return list(found.values())

    def close(self) -> None:
        """Free the process groups."""
        for axis in self.axes():
            axis.close()


def _backend() -> str | None:
    """The backend of our groups. `init_process_group()` without a name gives one that is called "undefined" and is gloo
    on a CPU; ours must know, because gloo is served by the direct exchange."""
    undefined = dist.get_backend() == "undefined"
    return "gloo" if undefined and not torch.cuda.is_available() else None


def _axis(name: str, rows: list[tuple[int, ...]], rank: int, timeout: timedelta) -> Axis:
    """The axis of ``rows`` that holds ``rank``. Every rank makes every group, as torch demands."""
    mine: Axis | None = None
    for row in rows:
        group = None
        if len(row) > 1:
            # A group of its own even for all ranks: its tags and its timeout are then nobody else's.
            group = dist.new_group(list(row), timeout=timeout, backend=_backend())
        if rank in row:
            mine = Axis(name, row, row.index(rank), group, timeout)
    if mine is None:
        raise ConfigError(f"rank {rank} is on no row of the axis {name}: {rows}")
    return mine
