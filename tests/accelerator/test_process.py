"""Processes: who they are, what runs on one of them, and what runs on one of them first."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise import CommError, ConfigError
from shardwise.accelerator.current import (
    current_accelerator,
    current_processes,
    forget,
    set_current_accelerator,
    set_current_processes,
)
from shardwise.accelerator.kinds import DistributedType
from shardwise.accelerator.process import Processes
from tests.ranks import RankPools


def test_a_process_started_alone() -> None:
    alone = Processes()
    assert (alone.num_processes, alone.process_index, alone.local_process_index, alone.local_num_processes) == (
        1,
        0,
        0,
        1,
    )
    assert alone.is_main_process and alone.is_local_main_process and alone.is_last_process
    assert alone.distributed_type is DistributedType.NO and alone.backend is None and not alone.use_distributed
    assert alone.axis.size == 1 and alone.axis.group is None and not dist.is_initialized()
    assert alone.device == torch.device("cpu") == alone.wire_device()
    alone.wait_for_everyone()
    alone.destroy_process_group()
    with alone.main_process_first(), alone.local_main_process_first(), alone.split_between_processes([1]) as part:
        assert part == [1]
    with pytest.raises(ZeroDivisionError), alone.main_process_first():
        raise ZeroDivisionError
    assert repr(alone) == (
        "Distributed environment: NO\nNum processes: 1\nProcess index: 0\nLocal process index: 0\nDevice: cpu\n"
    )
    with pytest.raises(AttributeError):
        alone.num_processes = 3  # type: ignore[misc]


def test_the_type_compares_as_text() -> None:
    assert DistributedType.MULTI_CPU == "MULTI_CPU" and DistributedType("NO") is DistributedType.NO
    assert Processes().distributed_type not in [DistributedType.MULTI_GPU, DistributedType.XLA]


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("TRUE", True), ("", False), ("no", False)])
def test_debug_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", value)
    processes = Processes()
    assert processes.debug is expected
    processes.debug = not expected
    assert processes.debug is not expected


def test_what_cannot_be_honoured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="backend: `nccl` cannot send from the CPU"):
        Processes(cpu=True, backend="nccl")
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "perhaps")
    with pytest.raises(ConfigError, match="ACCELERATE_DEBUG_MODE is `perhaps`; expected one of 1, true"):
        Processes()


def test_decorators_keep_the_function_and_take_brackets() -> None:
    alone = Processes()

    def add(a: int, b: int = 1) -> int:
        """Adds."""
        return a + b

    for decorated in (
        alone.on_main_process(add),
        alone.on_main_process()(add),
        alone.on_local_main_process(add),
        alone.on_local_main_process()(add),
        alone.on_last_process(add),
        alone.on_last_process()(add),
        alone.on_process(add, process_index=0),
        alone.on_process(process_index=3)(add),
        alone.on_local_process(add, local_process_index=0),
        alone.on_local_process(local_process_index=3)(add),
    ):
        assert decorated(1, b=2) == 3
        assert decorated.__name__ == "add" and decorated.__doc__ == "Adds."
    for index in (None, -1, True, "0"):
        with pytest.raises(
            ConfigError, match=r"process_index: .*; expected which process runs the function, 0 or more"
        ):
            alone.on_process(add, process_index=index)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backends", "of", "expected"),
    [
        ({"cpu": "gloo", "cuda": "gloo"}, "cuda", "cpu"),
        ({"cpu": "gloo", "cuda": "nccl"}, "cuda", "cuda"),
        ({"cpu": "gloo", "cuda": "nccl"}, "cpu", "cpu"),
        ({"cuda": "nccl"}, "cpu", "cuda"),
    ],
)
def test_where_tensors_travel(backends: dict[str, str], of: str, expected: str) -> None:
    processes = Processes()
    processes._backends, processes._device = backends, torch.device("cuda")
    assert processes.wire_device(torch.device(of)).type == expected
    assert processes.backend == backends["cuda"]


def test_print_prints(capsys: pytest.CaptureFixture[str]) -> None:
    Processes().print("a", 1, sep="-")
    assert capsys.readouterr().out == "a-1\n"


# -- several --


def who() -> dict[str, Any]:
    processes = Processes(timeout=timedelta(seconds=20))
    rank, size = dist.get_rank(), dist.get_world_size()
    assert processes.axis is processes.axis and processes.axis.group is dist.group.WORLD
    assert processes.axis.timeout == timedelta(seconds=20) and processes.axis.ranks == tuple(range(size))
    assert (processes.process_index, processes.local_process_index) == (rank, rank)
    assert (processes.num_processes, processes.local_num_processes) == (size, size)
    assert processes.is_main_process == (rank == 0) == processes.is_local_main_process
    assert processes.is_last_process == (rank == size - 1) and processes.use_distributed
    assert processes.backend == "gloo" and processes.distributed_type == "MULTI_CPU"
    assert repr(processes) == (
        f"Distributed environment: MULTI_CPU  Backend: gloo\nNum processes: {size}\nProcess index: {rank}\n"
        f"Local process index: {rank}\nDevice: cpu\n"
    )

    def name() -> int:
        return processes.process_index

    processes.print("printed by", rank)
    ran = {
        "main": processes.on_main_process(name)(),
        "local main": processes.on_local_main_process()(name)(),
        "last": processes.on_last_process(name)(),
        "one": processes.on_process(process_index=1)(name)(),
        "local one": processes.on_local_process(name, local_process_index=1)(),
    }
    with pytest.raises(ConfigError, match=f"process_index: {size}; expected .*0 to {size - 1}"):
        processes.on_process(name, process_index=size)
    processes.wait_for_everyone()
    return ran


@pytest.mark.parametrize("size", [2, 3])
def test_processes_of_a_group(ranks: RankPools, size: int) -> None:
    for rank, ran in enumerate(ranks(size).run(who)):
        expected = {"main": 0, "local main": 0, "last": size - 1, "one": 1, "local one": 1}
        assert ran == {what: rank if rank == only else None for what, only in expected.items()}
    assert ["printed by" in text for text in ranks(size).output] == [True, *[False] * (size - 1)]


def goes_first(local: bool, folder: Path) -> None:
    processes = Processes(timeout=timedelta(seconds=20))
    first = processes.local_main_process_first if local else processes.main_process_first
    for turn in range(3):
        path = folder / f"{turn}.txt"
        with first():
            if processes.is_main_process:
                time.sleep(0.02)
                path.write_text("first")
            else:
                assert path.read_text() == "first"
        processes.wait_for_everyone()
        # Leaving the block by `break` is leaving it.
        for _ in range(2):
            with first():
                break
    processes.wait_for_everyone()


@pytest.mark.parametrize("local", [False, True])
def test_the_main_process_goes_first(ranks: RankPools, local: bool, tmp_path: Path) -> None:
    ranks(3).run(goes_first, local, tmp_path)


def first_fails(kind: str) -> tuple[str, bool]:
    processes = Processes(timeout=timedelta(seconds=20))
    entered = False
    error: BaseException
    try:
        with processes.main_process_first():
            entered = True
            if processes.is_main_process:
                raise ZeroDivisionError("no data") if kind == "error" else SystemExit(3)
    except (ZeroDivisionError, SystemExit, CommError) as raised:
        error = raised
    # What comes after is in step on all of them: nothing of the block is left over.
    counted = torch.ones(1)
    processes.axis.sum_small(counted, "after")
    assert counted.item() == processes.num_processes
    # One that goes later and fails has nobody waiting for it.
    try:
        with processes.main_process_first():
            if not processes.is_main_process:
                raise KeyError("later")
    except KeyError:
        pass
    processes.wait_for_everyone()
    return f"{type(error).__name__}: {error}", entered


@pytest.mark.parametrize(("kind", "text"), [("error", "ZeroDivisionError: no data"), ("exit", "SystemExit: 3")])
def test_when_the_first_fails_the_others_stop_too(ranks: RankPools, kind: str, text: str) -> None:
    main, *others = ranks(3).run(first_fails, kind)
    assert main == (text, True)
    for said, entered in others:
        assert not entered and said.startswith("CommError: the block of `main_process_first` failed")
        assert said.endswith(f"rank 0: {text}")


def one_node_fails() -> str:
    # Two nodes: ranks 0 and 1, and rank 2, which is the first of its own.
    rank = int(os.environ["RANK"])
    before = {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    os.environ.update(LOCAL_RANK=str((0, 1, 0)[rank]), LOCAL_WORLD_SIZE=str((2, 2, 1)[rank]))
    try:
        processes = Processes(timeout=timedelta(seconds=20))
    finally:
        os.environ.update(before)
    assert processes.is_local_main_process == (rank != 1) and processes.local_num_processes == (2, 2, 1)[rank]
    try:
        with processes.local_main_process_first():
            if rank == 2:
                raise ZeroDivisionError("disk full")
    except (ZeroDivisionError, CommError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_node_that_fails_stops_the_others(ranks: RankPools) -> None:
    said = ranks(3).run(one_node_fails)
    assert said[2] == "ZeroDivisionError: disk full"
    assert all(
        text.startswith("CommError") and text.endswith("rank 2: ZeroDivisionError: disk full") for text in said[:2]
    )


def starts_and_ends_the_group() -> str:
    assert not dist.is_initialized()
    processes = Processes(cpu=True, timeout=timedelta(seconds=20))
    assert dist.get_backend() == "gloo" and processes.backend == "gloo"
    made = current_processes()
    assert made is current_processes() and made is not processes
    processes.wait_for_everyone()
    processes.destroy_process_group()
    assert not dist.is_initialized()
    processes.destroy_process_group()
    try:
        processes.wait_for_everyone()
    except CommError as error:
        said = str(error)
    forget()
    return said


def test_the_group_is_started_and_ended(ranks: RankPools) -> None:
    for said in ranks(2).run(starts_and_ends_the_group, fresh=True, group=False):
        assert "the process group was destroyed" in said


def test_a_group_of_one_that_comes_and_goes() -> None:
    forget()
    before = current_processes()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        found = current_processes()
        assert found is not before and found is current_processes()
        assert found.backend == "gloo" and found.distributed_type == "MULTI_CPU" and not found.use_distributed
        assert found.axis.group is None and found.is_last_process
        found.wait_for_everyone()
    finally:
        dist.destroy_process_group()
    assert current_processes() is not found and not found.alive
    with pytest.raises(CommError, match="the process group was destroyed"):
        found.wait_for_everyone()
    forget()


def test_the_current_ones() -> None:
    class Held:
        pass

    forget()
    made = current_processes()
    assert made is current_processes()
    mine = Processes()
    set_current_processes(mine)
    assert current_processes() is mine
    held = Held()
    set_current_accelerator(held)
    assert current_accelerator() is held
    del held
    assert current_accelerator() is None
    forget()
    assert current_processes() is not mine
