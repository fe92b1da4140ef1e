"""Batch sizes that fit: which are tried, alone and together, and what is said when none does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from shardwise import CommError, ConfigError
from shardwise.accelerator.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)
from shardwise.accelerator.process import Processes
from tests.ranks import RankPools

NINE_TENTHS = [128, 115, 103, 92, 82, 73, 65, 58, 52, 46, 41, 36, 32, 28, 25, 22, 19, 17, 15, 13, 11, 9, 8]


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """What modules hold is left out of the collections, of which there is one for each try."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def out_of_memory() -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")


def test_nine_tenths_of_the_last_until_it_fits() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=128)
    def train(batch_size: int, greeting: str, *, loud: bool = False) -> tuple[int, str, bool]:
        """Trains."""
        tried.append(batch_size)
        if batch_size != 8:
            out_of_memory()
        return batch_size, greeting, loud

    assert train("hello", loud=True) == (8, "hello", True) and tried == NINE_TENTHS
    assert train("again") == (8, "again", False) and tried[-1] == 8, "what worked last is tried first"
    assert train.__name__ == "train" and train.__doc__ == "Trains."


@pytest.mark.parametrize("form", ["direct", "with arguments"])
def test_another_way_to_reduce_is_used_in_both_forms(form: str) -> None:
    tried, sizes = [], iter([64, 32, 16, 8])

    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > 16:
            out_of_memory()
        return batch_size

    def following() -> int:
        return next(sizes)

    if form == "direct":
        run = find_executable_batch_size(train, 128, following)
    else:
        run = find_executable_batch_size(starting_batch_size=128, reduce_batch_size_fn=following)(train)
    assert run() == 16 and tried == [128, 64, 32, 16]


def test_without_brackets_it_begins_at_128() -> None:
    @find_executable_batch_size
    def train(batch_size: int) -> int:
        return batch_size

    assert train() == 128


@pytest.mark.parametrize("start", [0, 16])
def test_no_size_is_left(start: int) -> None:
    @find_executable_batch_size(starting_batch_size=start)
    def train(batch_size: int) -> None:
        out_of_memory()

    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        train()


def test_errors_of_the_caller_and_of_the_function() -> None:
    @find_executable_batch_size
    def train(batch_size: int, one: str, two: str) -> None:
        raise ValueError("Oops")

    with pytest.raises(TypeError, match="Batch size was passed into `train` as the first argument") as error:
        train(128, "hello", "world")
    assert "`train(one='hello', two='world')`" in str(error.value)
    with pytest.raises(ValueError, match="Oops"):
        train("hello", "world")

    @find_executable_batch_size
    def takes_any(batch_size: int, *rest: int) -> int:
        return batch_size + sum(rest)

    assert takes_any(1, 2, 3) == 134
    for wrong in (128, 200, "64"):
        run = find_executable_batch_size(lambda size: out_of_memory(), 128, lambda wrong=wrong: wrong)
        with pytest.raises(ConfigError, match=r"reduce_batch_size_fn gave .*; expected a whole number below 128"):
            run()


def test_which_errors_are_of_memory() -> None:
    for error in (
        torch.OutOfMemoryError("x"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error"),
    ):
        assert should_reduce_batch_size(error)
    assert not should_reduce_batch_size(RuntimeError("shape mismatch")) and not should_reduce_batch_size(ValueError())


def test_a_failed_try_is_freed_before_the_next() -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        alive.extend(ref() is not None for ref in held)
        big = torch.ones(batch_size)
        held.append(weakref.ref(big))
        if batch_size > 2:
            out_of_memory()

    train()
    assert len(held) == 3 and alive == [False] * 3


def test_releasing() -> None:
    class Node:
        def __init__(self) -> None:
            self.me = self  # only the collector frees it

    node: Any = Node()
    ref = weakref.ref(node)
    gc.disable()
    try:
        node, other = release_memory(node, [1])
        assert node is None and other is None
        clear_device_cache(garbage_collection=True)
    finally:
        gc.enable()
    assert ref() is None and release_memory() == []


def together(fail_on: int, how: str) -> tuple[list[int], Any]:
    processes = Processes(timeout=timedelta(seconds=20))
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=100, processes=processes)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if processes.process_index == fail_on and batch_size > 81:
            if how == "memory":
                out_of_memory()
            raise ValueError("no such file")
        return batch_size

    try:
        result: Any = train()
    except (ValueError, CommError) as error:
        result = f"{type(error).__name__}: {error}"
    processes.wait_for_everyone()
    return tried, result


@pytest.mark.parametrize("size", [2, 3])
def test_processes_try_together(ranks: RankPools, size: int) -> None:
    assert ranks(size).run(together, size - 1, "memory") == [([100, 90, 81], 81)] * size
    *others, failed = ranks(size).run(together, size - 1, "error")
    assert failed == ([100], "ValueError: no such file")
    assert all(tried == [100] and f"rank {size - 1}: ValueError: no such file" in said for tried, said in others)


def uneven() -> int:
    processes = Processes(timeout=timedelta(seconds=20))
    rank = processes.process_index
    sizes = iter([60, 30] if rank == 0 else [70, 20])
    tried: list[int] = []

    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if rank == 1 and batch_size > 20:
            out_of_memory()
        return batch_size

    run = find_executable_batch_size(train, 100, lambda: next(sizes), processes=processes)
    assert run() == 20 and tried == [100, 60, 20]
    bad = find_executable_batch_size(
        lambda size: out_of_memory(), 100, lambda: 200 if rank == 1 else 50, processes=processes
    )
    with pytest.raises(ConfigError, match="gave 200"):
        bad()
    processes.wait_for_everyone()
    return tried[-1]


def test_the_smallest_of_the_next_sizes_is_tried(ranks: RankPools) -> None:
    assert ranks(2).run(uneven) == [20, 20]
