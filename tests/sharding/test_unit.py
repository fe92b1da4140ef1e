"""Layout of a unit: where parameters lie, what each rank owns."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwise.dist import Axis, Mesh
from shardwise.sharding import POLICIES, Unit
from tests.ranks import RankPools

CPU = torch.device("cpu")


def fake_mesh(size: int, rank: int) -> Mesh:
    """Axes that know their size and have no group: enough for the layout."""
    axis = Axis("world", tuple(range(size)), rank, None, timedelta(seconds=1))
    return Mesh(axis, axis, Axis("replicate", (rank,), 0, None, timedelta(seconds=1)), None)


def unit_of(shapes: list[tuple[int, ...]], size: int, rank: int, stage: int, dtype: torch.dtype) -> Unit:
    params = [(f"p{i}", nn.Parameter(torch.randn(shape).to(dtype))) for i, shape in enumerate(shapes)]
    return Unit(3, "u", params, dtype, POLICIES[stage], fake_mesh(size, rank), CPU)


shape = st.one_of(st.just(()), st.tuples(st.integers(0, 40)), st.tuples(st.integers(0, 9), st.integers(1, 9)))


@given(
    shapes=st.lists(shape, min_size=1, max_size=6),
    size=st.integers(1, 5),
    stage=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@settings(max_examples=80, deadline=None)
def test_every_element_has_one_owner(shapes: Any, size: int, stage: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = [torch.randn(s).to(dtype) for s in shapes]
    owned: dict[str, list[torch.Tensor]] = {f"p{i}": [] for i in range(len(shapes))}
    for rank in range(size):
        torch.manual_seed(0)
        unit = unit_of(shapes, size, rank, stage, dtype)
        unit.fill(with_master=False)
        assert unit.numel % size == 0
        assert all(s.offset * dtype.itemsize % 64 == 0 for s in unit.slots), "aligned"
        assert all(a.end <= b.offset for a, b in zip(unit.slots, unit.slots[1:], strict=False)), "no overlap"
        for slot, value in zip(unit.slots, values, strict=True):
            assert torch.equal(slot.param.data, value) and slot.param.shape == value.shape
            if slot.numel:
                assert slot.param.data_ptr() == unit.flat.data_ptr() + slot.offset * dtype.itemsize
        for piece in unit.pieces():
            assert 0 < piece.numel <= piece.slot.numel and piece.whole == (piece.numel == piece.slot.numel)
            view = piece.view(unit.shard)
            assert view.shape == piece.slot.shape if piece.whole else view.dim() == 1
            owned[piece.slot.name].append(view.reshape(-1).clone())
    for i, value in enumerate(values):
        copies = 1 if POLICIES[stage].shard_optimizer else size
        parts = torch.cat(owned[f"p{i}"]) if owned[f"p{i}"] else torch.empty(0, dtype=dtype)
        assert torch.equal(parts, value.reshape(-1).repeat(copies))


def test_padding_is_zero() -> None:
    unit = unit_of([(3,), (5,)], 3, 1, 2, torch.float32)
    unit.fill(with_master=False)
    covered = torch.zeros(unit.numel, dtype=torch.bool)
    for slot in unit.slots:
        covered[slot.offset : slot.end] = True
    assert (unit.flat[~covered] == 0).all() and covered.sum() == 8


def test_the_master_takes_values_from_before_the_cast() -> None:
    value = torch.tensor([1.0 + 2**-20, 3.0])
    params = [("p", nn.Parameter(value.clone()))]
    unit = Unit(0, "u", params, torch.bfloat16, POLICIES[2], fake_mesh(1, 0), CPU)
    unit.fill(with_master=True)
    assert unit.master is not None and unit.master.dtype is torch.float32
    assert torch.equal(unit.master[:2], value) and torch.equal(unit.flat[:2], value.bfloat16())
    assert params[0][1].dtype is torch.bfloat16


def test_tags_of_units_differ() -> None:
    seen = set()
    for index in range(4):
        unit = Unit(index, "u", [], torch.float32, POLICIES[2], fake_mesh(2, 0), CPU)
        seen |= {unit.tag(kind) for kind in range(4)}
    assert len(seen) == 16


def gather_and_release() -> None:
    mesh = Mesh.build(timeout=timedelta(seconds=20))
    values = [torch.arange(10.0), torch.arange(6.0).view(2, 3) + 100, torch.empty(0)]
    params = [(f"p{i}", nn.Parameter(v.clone())) for i, v in enumerate(values)]
    unit = Unit(0, "u", params, torch.float32, POLICIES[3], mesh, CPU)
    unit.fill(with_master=False)
    assert unit.releases and unit.live
    for _ in range(2):
        unit.release()
        unit.release()
        assert not unit.live and unit.flat.untyped_storage().nbytes() == 0
        assert unit.nbytes == unit.numel * 4 // dist.get_world_size()
        assert [p.shape for _, p in params] == [v.shape for v in values]
        unit.start_gather()
        unit.start_gather()
        unit.finish_gather()
        assert all(torch.equal(p.data, v) for (_, p), v in zip(params, values, strict=True))
    unit.pins += 1
    unit.release()
    assert unit.live, "pinned"
    unit.pins -= 1
    unit.start_gather()
    unit.release()
    unit.start_gather()
    unit.release()  # while it travels
    assert not unit.live
    # What changes on the shards is what is gathered next.
    unit.shard.add_(1.0)
    unit.publish()
    unit.finish_gather()
    assert torch.equal(params[0][1].data, values[0] + 1)
    unit.dissolve()
    assert all(p.untyped_storage().nbytes() == p.numel() * 4 for _, p in params)
    mesh.close()


@pytest.mark.parametrize("size", [2, 3])
def test_gather_and_release(ranks: RankPools, size: int) -> None:
    ranks(size).run(gather_and_release)
