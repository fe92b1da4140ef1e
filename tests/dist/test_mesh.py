"""Which ranks are on which axis, and how the default group starts."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import ConfigError
from shardwise.dist import Mesh
from shardwise.dist.mesh import default_device
from tests.ranks import RankPools

TIMEOUT = timedelta(seconds=20)


def axes(shard: int, secondary: int) -> tuple[Any, ...]:
    mesh = Mesh.build(shard_size=shard, secondary_size=secondary, timeout=TIMEOUT)
    rank = dist.get_rank()
    found = []
    for axis in (mesh.world, mesh.shard, mesh.replicate, mesh.secondary):
        if axis is None:
            found.append(None)
            continue
        assert axis.ranks[axis.position] == rank
        total = torch.tensor([float(rank)])
        axis.sum_small(total, "ranks")
        assert total.item() == sum(axis.ranks)
        found.append(axis.ranks)
    assert len(mesh.axes()) == len({id(a) for a in mesh.axes()})
    mesh.close()
    return tuple(found)


def test_all_ranks_share_by_default(ranks: RankPools) -> None:
    everyone = (0, 1, 2, 3)
    assert ranks(4).run(axes, 0, 1) == [(everyone, everyone, (r,), None) for r in range(4)]


def test_replicas(ranks: RankPools) -> None:
    everyone = (0, 1, 2, 3)
    found = ranks(4).run(axes, 2, 1)
    assert found == [
        (everyone, row, column, None)
        for row, column in zip([(0, 1), (0, 1), (2, 3), (2, 3)], [(0, 2), (1, 3), (0, 2), (1, 3)], strict=True)
    ]
    assert ranks(4).run(axes, 1, 1) == [(everyone, (r,), everyone, None) for r in range(4)]


def test_secondary(ranks: RankPools) -> None:
    everyone = (0, 1, 2, 3)
    rows = [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert ranks(4).run(axes, 0, 2) == [(everyone, everyone, (r,), rows[r]) for r in range(4)]
    assert ranks(4).run(axes, 0, 4)[0][3] is None, "all ranks: the first copy serves"


@pytest.mark.parametrize(("shard", "secondary", "key"), [(3, 1, "mics_shard_size"), (0, 3, "zero_hpz_partition_size")])
def test_sizes_that_do_not_divide(ranks: RankPools, shard: int, secondary: int, key: str) -> None:
    ranks(4).run_expecting(ConfigError, axes, shard, secondary, match=f"zero_optimization.{key}: 3 does not divide")


def test_one_process_has_no_groups() -> None:
    mesh = Mesh.build(timeout=TIMEOUT)
    assert [a.ranks for a in mesh.axes()] == [(0,), (0,)] and mesh.secondary is None
    assert mesh.world.group is None
    mesh.close()


def from_environment() -> tuple[int, str]:
    shardwise.init_distributed()
    first = dist.group.WORLD
    shardwise.init_distributed()
    assert dist.group.WORLD is first, "again does nothing"
    found = dist.get_world_size(), dist.get_backend()
    dist.destroy_process_group()
    return found


def test_init_distributed_from_the_environment(ranks: RankPools) -> None:
    assert ranks(2).run(from_environment, fresh=True, group=False) == [(2, "gloo"), (2, "gloo")]


def test_init_distributed_alone_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shardwise.init_distributed()
    assert not dist.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "1")
    shardwise.init_distributed()
    assert not dist.is_initialized()


def test_default_device() -> None:
    assert default_device().type == ("cuda" if torch.cuda.is_available() else "cpu")


def starts_again(times: int) -> list[float]:
    sums = []
    for number in range(times):
        shardwise.init_distributed(timeout=timedelta(seconds=20))
        value = torch.tensor(float(number + dist.get_rank()))
        dist.all_reduce(value)
        sums.append(float(value))
        dist.destroy_process_group()
    return sums


def test_a_group_may_be_started_again_in_one_run(ranks: RankPools) -> None:
    """The launcher's store outlives a group; the next one must not find the addresses of the last."""
    assert ranks(2).run(starts_again, 5, fresh=True, group=False) == [[1.0, 3.0, 5.0, 7.0, 9.0]] * 2


ENDS = """
import atexit, torch.distributed as dist, shardwise
atexit.register(lambda: print("left open:", dist.is_initialized()))
shardwise.init_distributed("gloo", rank=0, world_size=1, store=dist.HashStore())
print("started:", dist.is_initialized())
"""


def test_a_group_ends_with_the_program() -> None:
    """One that is left open aborts some exits of torch's, after all that the script had to do."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["started: True", "left open: False"]
