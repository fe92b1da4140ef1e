"""Buffers are used again."""

from __future__ import annotations

import torch

from shardwise.dist.pool import BufferPool

CPU = torch.device("cpu")


def test_a_returned_buffer_is_handed_out_again() -> None:
    pool = BufferPool()
    first = pool.take(100, torch.float32, CPU)
    assert first.shape == (100,) and first.dtype is torch.float32 and pool.nbytes == 0
    pool.give(first)
    assert pool.nbytes == 400
    again = pool.take(60, torch.float32, CPU)
    assert again.shape == (60,) and again.data_ptr() == first.data_ptr() and pool.nbytes == 0
    pool.give(again)  # the part that was taken gives all of it back
    assert pool.nbytes == 400
    assert pool.take(100, torch.float32, CPU).data_ptr() == first.data_ptr()


def test_two_in_use_are_two() -> None:
    pool = BufferPool()
    a, b = pool.take(10, torch.float32, CPU), pool.take(10, torch.float32, CPU)
    assert a.data_ptr() != b.data_ptr()
    pool.give(a)
    pool.give(b)
    again = {pool.take(10, torch.float32, CPU).data_ptr() for _ in range(2)}
    assert again == {a.data_ptr(), b.data_ptr()}


def test_the_smallest_that_is_large_enough() -> None:
    pool = BufferPool()
    sizes = {n: pool.take(n, torch.float32, CPU) for n in (100, 10, 50)}
    for buffer in sizes.values():
        pool.give(buffer)
    assert pool.take(30, torch.float32, CPU).data_ptr() == sizes[50].data_ptr()
    assert pool.take(30, torch.float32, CPU).data_ptr() == sizes[100].data_ptr()


def test_a_larger_one_replaces_the_smallest() -> None:
    pool = BufferPool()
    pool.give(pool.take(10, torch.float32, CPU))
    pool.give(pool.take(1000, torch.float32, CPU))
    assert pool.nbytes == 4000


def test_dtypes_are_apart() -> None:
    pool = BufferPool()
    first = pool.take(100, torch.float32, CPU)
    pool.give(first)
    other = pool.take(100, torch.bfloat16, CPU)
    assert other.dtype is torch.bfloat16 and pool.nbytes == 400


def test_clear() -> None:
    pool = BufferPool()
    pool.give(pool.take(100, torch.float32, CPU))
    pool.clear()
    assert pool.nbytes == 0


def test_nothing() -> None:
    pool = BufferPool()
    empty = pool.take(0, torch.float32, CPU)
    assert empty.numel() == 0
    pool.give(empty)
    assert pool.take(5, torch.float32, CPU).numel() == 5
