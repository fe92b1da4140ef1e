"""Every collective against torch's own, on 2, 3 and 4 ranks."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shardwise import CommError
from shardwise.dist import Axis, Mesh
from tests.ranks import RankError, RankPools

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]
PER_RANK = [0, 1, 7, 4096]


def mesh(seconds: float = 20) -> Mesh:
    return Mesh.build(timeout=timedelta(seconds=seconds))


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: their sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)


def compare_with_torch() -> None:
    built = mesh()
    axis = built.world
    me, size = axis.position, axis.size
    tag = 0
    for dtype in DTYPES:
        for k in PER_RANK:
            shards = [values(r, k, dtype) for r in range(size)]
            wholes = [values(10 + r, k * size, dtype) for r in range(size)]
            total = sum(w.double() for w in wholes)
            assert isinstance(total, torch.Tensor)
            for in_place in (False, True):
                flat = torch.full((k * size,), 77, dtype=dtype)
                shard = axis.slice_of(flat) if in_place else shards[me].clone()
                shard.copy_(shards[me])
                axis.all_gather(flat, shard, "x", tag).wait()
                assert torch.equal(flat, torch.cat(shards)), (dtype, k)
            flat = wholes[me].clone()
            axis.reduce_scatter(flat, "x", tag + 1).wait()
            assert torch.equal(axis.slice_of(flat).double(), axis.slice_of(total)), (dtype, k)
            flat = wholes[me].clone()
            axis.all_reduce(flat, "x", tag + 2).wait()
            assert torch.equal(flat.double(), total), (dtype, k)
            for root in range(size):
                sent = wholes[me].clone()
                axis.broadcast(sent, root, "x")
                assert torch.equal(sent, wholes[root])
            tag += 3
    numbers = torch.tensor([1.0 + me, -2.0 * me, 0.5], dtype=torch.float64)
    summed, largest = numbers.clone(), numbers.clone()
    axis.sum_small(summed, "x")
    axis.max_small(largest, "x")
    dist.all_reduce(reference := numbers.clone())
    assert torch.equal(summed, reference)
    assert largest.tolist() == [float(size), 0.0, 0.5]
    axis.barrier("x")
    built.close()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives(ranks: RankPools, size: int) -> None:
    ranks(size).run(compare_with_torch)


def same_bits() -> list[torch.Tensor]:
    """Sums that do round must at least be the same on every rank."""
    built = mesh()
    axis = built.world
    torch.manual_seed(axis.position)
    found = []
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64)):
        flat = torch.randn(axis.size * 33).to(dtype)
        axis.all_reduce(flat, "x", i).wait()
        found.append(flat)
    built.close()
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduced_values_are_equal_to_the_last_bit(ranks: RankPools, size: int) -> None:
    first, *others = ranks(size).run(same_bits)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    inputs = []
    for rank in range(size):
        torch.manual_seed(rank)
        inputs.append([torch.randn(size * 33).to(d) for d in (torch.float32, torch.bfloat16, torch.float64)])
    for i, (found, ulp) in enumerate(zip(first, (1e-6, 2e-2, 1e-14), strict=True)):
        exact = torch.stack([x[i].double() for x in inputs]).sum(0)
        torch.testing.assert_close(found.double(), exact, rtol=ulp, atol=ulp)


def low_precision_sum() -> None:
    """More than two bf16 numbers are summed in float32 and rounded once."""
    built = mesh()
    axis = built.world
    flat = torch.full((axis.size,), 1.0 if axis.position == 0 else 2.0**-8, dtype=torch.bfloat16)
    axis.reduce_scatter(flat, "x", 0).wait()
    assert axis.slice_of(flat).item() == 1.0 + 2 * 2.0**-8, "in bf16 each small term alone would be lost"
    built.close()


def test_low_precision_sums_round_once(ranks: RankPools) -> None:
    ranks(3).run(low_precision_sum)


def out_of_order() -> None:
    """Several in flight; started in one order on each rank, waited for in another."""
    built = mesh()
    axis = built.world
    me, size, k = axis.position, axis.size, 1000
    flats = [torch.zeros(k * size) for _ in range(6)]
    handles = {}
    order = [(i + me) % 6 for i in range(6)] if me % 2 else list(range(6))
    for i in order:
        flats[i][me * k : (me + 1) * k] = 10 * i + me
        handles[i] = axis.all_gather(flats[i], axis.slice_of(flats[i]), f"buffer {i}", i)
    sums = [torch.full((k * size,), float(i + me)) for i in range(3)]
    reductions = [axis.reduce_scatter(s, f"sum {i}", 10 + i) for i, s in enumerate(sums)]
    for i in reversed(range(3)):
        reductions[i].wait()
        assert (axis.slice_of(sums[i]) == sum(i + r for r in range(size))).all()
    for i in reversed(order):
        handles[i].wait()
        handles[i].wait()  # again does nothing
        assert torch.equal(flats[i], torch.tensor([10.0 * i + r for r in range(size)]).repeat_interleave(k))
    built.close()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_several_in_flight(ranks: RankPools, size: int) -> None:
    ranks(size).run(out_of_order)


def traffic() -> None:
    built = mesh()
    axis = built.world
    n, k = axis.size, 1000
    flat = torch.zeros(n * k)
    for _ in range(2):
        axis.all_gather(flat, axis.slice_of(flat), "x", 0).wait()
        axis.reduce_scatter(flat, "x", 1).wait()
    axis.broadcast(flat, 0, "x")
    axis.sum_small(torch.zeros(4), "x")
    axis.barrier("x")
    found = {name: (t.calls, t.bytes_sent) for name, t in axis.traffic.items()}
    assert found == {
        "all_gather": (2, 2 * (n - 1) * k * 4),
        "reduce_scatter": (2, 2 * (n - 1) * k * 4),
        "broadcast": (1, n * k * 4 if axis.position == 0 else 0),
        "small": (1, 2 * (n - 1) * 16 // n),
        "barrier": (1, 0),
    }
    before = sum(t.bytes_sent for t in axis.traffic.values())
    axis.all_reduce(flat, "x", 2).wait()
    sent = sum(t.bytes_sent for t in axis.traffic.values()) - before
    assert sent == 2 * (n - 1) * k * 4, "a reduce-scatter and an all-gather"
    assert all(t.seconds_waiting >= 0 for t in axis.traffic.values())
    built.close()


@pytest.mark.parametrize("size", [2, 3])
def test_traffic_is_counted(ranks: RankPools, size: int) -> None:
    ranks(size).run(traffic)


def test_one_rank_needs_no_group() -> None:
    axis = Axis("alone", (0,), 0, None, timedelta(seconds=1))
    flat = torch.ones(3)
    axis.all_gather(flat, axis.slice_of(flat), "x", 0).wait()
    axis.reduce_scatter(flat, "x", 0).wait()
    axis.all_reduce(flat, "x", 0).wait()
    axis.sum_small(flat, "x")
    axis.max_small(flat, "x")
    axis.broadcast(flat, 0, "x")
    axis.barrier("x")
    assert flat.tolist() == [1, 1, 1] and axis.size == 1
    assert sum(t.bytes_sent for t in axis.traffic.values()) == 0
    axis.close()


def buffers_are_reused() -> None:
    built = mesh()
    axis = built.world
    flat = torch.zeros(axis.size * 100)
    axis.reduce_scatter(flat, "x", 0).wait()
    held = axis.pool.nbytes
    assert held == 100 * (axis.size - 1) * 4
    for _ in range(5):
        axis.reduce_scatter(flat, "x", 0).wait()
    assert axis.pool.nbytes == held
    built.close()
    assert axis.pool.nbytes == 0


def test_inboxes_are_used_again(ranks: RankPools) -> None:
    ranks(3).run(buffers_are_reused)


# ---------------------------------------------------------------- who is missing


def wait_for(op: str) -> None:
    """Rank 2 never calls."""
    axis = mesh(2).world
    flat = torch.zeros(axis.size * 1000)
    if axis.position == 2:
        time.sleep(6)
        return
    if op == "all_gather":
        axis.all_gather(flat, axis.slice_of(flat), "blocks.3", 0).wait()
    elif op == "reduce_scatter":
        axis.reduce_scatter(flat, "blocks.3", 0).wait()
    elif op == "small":
        axis.sum_small(torch.zeros(2), "blocks.3")
    else:
        axis.barrier("blocks.3")


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "small", "barrier"])
def test_a_rank_that_does_not_arrive_is_named(ranks: RankPools, op: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(3).run(wait_for, op, fresh=True, timeout=30, grace=20)
    for rank in (0, 1):
        error = caught.value.exceptions[rank]
        assert isinstance(error, CommError), caught.value
        # The rank that gives up first closes its connections: the other may see that before its own time is over.
        assert f"`{op} blocks.3`" in str(error) and "rank 2" in str(error)
    if op in ("all_gather", "reduce_scatter"):
        said = [str(caught.value.exceptions[rank]) for rank in (0, 1)]
        first = next(text for rank, text in enumerate(said) if f"rank {rank} waited 2 s in `{op} blocks.3`" in text)
        assert "on axis `world`" in first and "Did not arrive: rank 2." in first and "communication_timeout" in first


def wait_elsewhere() -> None:
    axis = mesh(2).world
    flat = torch.zeros(axis.size * 1000)
    key = f"blocks.{axis.position}"
    axis.all_gather(flat, axis.slice_of(flat), key, axis.position).wait()


def test_ranks_that_wait_for_different_things_are_named(ranks: RankPools) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(wait_elsewhere, fresh=True, timeout=30, grace=20)
    for rank in (0, 1):
        error = caught.value.exceptions[rank]
        assert isinstance(error, CommError), caught.value
        # Of the two, one may see that the other closed its connection before its own time is over.
        assert f"`all_gather blocks.{1 - rank}`" in str(error) and f"ank {1 - rank} " in str(error)
    assert any("waits in `all_gather blocks" in str(caught.value.exceptions[rank]) for rank in (0, 1))


def die() -> str:
    axis = mesh(20).world
    if axis.position == 1:
        os._exit(3)
    flat = torch.zeros(axis.size * 1000)
    with pytest.raises(CommError) as caught:
        axis.all_gather(flat, axis.slice_of(flat), "blocks.3", 0).wait()
    raise RuntimeError(f"said: {caught.value}")


def test_a_dead_rank_is_named_at_once(ranks: RankPools) -> None:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(2).run(die, fresh=True, timeout=30, grace=10)
    said = str(caught.value.exceptions[0])
    assert "rank 0 lost its connection to rank 1 in `all_gather blocks.3`" in said, caught.value
    assert time.monotonic() - started < 15, "not the timeout of 20 s"
