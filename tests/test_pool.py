"""The pool of ranks itself: what it returns, what it says when something goes wrong, and that it goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankDied, RankError, RankLeak, RankPools, RankTimeout


class OddError(Exception):
    """Cannot be rebuilt by pickle: its arguments are not those of ``__init__``."""

    def __init__(self, name: str, limit: int) -> None:
        super().__init__(f"{name} is over {limit}")


def total(start: int, *, factor: int = 1) -> tuple[int, float]:
    mine = torch.tensor(float(start + dist.get_rank()))
    dist.all_reduce(mine)
    return dist.get_rank(), mine.item() * factor


def pid() -> int:
    return os.getpid()


def settings() -> dict[str, object]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    found: dict[str, object] = {name: os.environ.get(name) for name in names}
    return found | {"group": dist.is_initialized(), "threads": torch.get_num_threads(), "draw": torch.rand(3)}


def slices() -> dict[str, torch.Tensor]:
    buffer = torch.zeros(1_000_000)
    return {
        "view": buffer[10:12].fill_(3.0),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "grad": (torch.ones(2, requires_grad=True) * 2),
        "empty": torch.empty(0, 4, dtype=torch.int8),
        "scalar": torch.tensor(7),
    }


def echo(value: torch.Tensor) -> torch.Tensor:
    return value + 1


def fail_on(rank: int, then_wait: bool) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"bad shard on rank {rank}")
    if then_wait:
        dist.barrier()
    return dist.get_rank()


def fail_everywhere() -> None:
    raise OddError(f"unit.{dist.get_rank()}", 5)


def compare(value: int) -> None:
    assert value * 2 == 7


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def hang_in_barrier(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.barrier()
    else:
        time.sleep(600)


def die(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leak(kind: str) -> None:
    if kind == "group":
        dist.new_group([0, 1])
    elif kind == "default group":
        dist.destroy_process_group()
    elif kind == "variable":
        os.environ["SHARDWISE_LEFT"] = "1"
        del os.environ["MASTER_ADDR"]
    elif kind == "thread":
        threading.Thread(target=time.sleep, args=(600,), name="left-behind", daemon=True).start()
    elif kind == "file":
        Path(f"left-{dist.get_rank()}.bin").write_text("x")
    elif kind == "dtype":
        torch.set_default_dtype(torch.float64)
    elif kind == "folder":
        os.chdir("/")
    elif kind == "collective" and dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1, dtype=torch.int64), async_op=True)


def short_thread() -> None:
    threading.Thread(target=time.sleep, args=(0.2,)).start()


def speak() -> None:
    print(f"hello from {dist.get_rank()}")
    os.system("echo from a child")


def start_group_from_environment() -> int:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    dist.destroy_process_group()
    return size


def break_group() -> None:
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_results_by_rank(ranks: RankPools, world_size: int) -> None:
    expected = sum(range(10, 10 + world_size)) * 2.0
    assert ranks(world_size).run(total, 10, factor=2) == [(rank, expected) for rank in range(world_size)]


def test_processes_are_reused(ranks: RankPools) -> None:
    first = ranks(2).run(pid)
    assert len({*first, os.getpid()}) == 3
    assert ranks(2).run(pid) == first


def test_environment_is_torchruns(ranks: RankPools) -> None:
    found = ranks(2).run(settings)
    for rank in range(2):
        draw = found[rank].pop("draw")
        assert torch.equal(draw, torch.rand(3, generator=torch.Generator().manual_seed(1234)))
        assert found[rank] == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "group": True,
            "threads": 1,
        }


def test_one_rank_has_no_group_and_no_variables(ranks: RankPools) -> None:
    (found,) = ranks(1).run(settings)
    assert found["group"] is False
    assert found["RANK"] is None and found["WORLD_SIZE"] is None


def test_tensors_travel_by_value(ranks: RankPools) -> None:
    found = ranks(2).run(slices)[1]
    assert found["view"].tolist() == [3.0, 3.0]
    assert found["view"].untyped_storage().nbytes() == 8
    assert found["half"].dtype is torch.bfloat16 and found["half"].item() == 1.5
    assert found["grad"].tolist() == [2.0, 2.0] and not found["grad"].requires_grad
    assert found["empty"].shape == (0, 4) and found["empty"].dtype is torch.int8
    assert found["scalar"].item() == 7
    assert torch.equal(ranks(2).run(echo, torch.arange(3))[0], torch.tensor([1, 2, 3]))


def test_output_is_shown_by_rank(ranks: RankPools, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(2).run(speak)
    assert ranks(2).output[1].splitlines() == ["hello from 1", "from a child"]
    assert "[rank 1] hello from 1" in capsys.readouterr().out


def test_exception_on_one_rank_has_its_traceback(ranks: RankPools) -> None:
    before = ranks(2).run(pid)
    with pytest.raises(RankError, match="rank 1 of 2 raised ValueError: bad shard on rank 1") as caught:
        ranks(2).run(fail_on, 1, then_wait=False)
    assert "in fail_on" in str(caught.value) and "raise ValueError" in str(caught.value)
    assert list(caught.value.exceptions) == [1]
    assert ranks(2).run(pid) == before  # every rank answered and the group is in step: the processes are kept


def test_ranks_that_wait_for_a_failed_one_are_ended_and_shown(ranks: RankPools) -> None:
    before = ranks(3).run(pid)
    with pytest.raises(RankError, match="rank 0 of 3 raised ValueError") as caught:
        ranks(3).run(fail_on, 0, then_wait=True, grace=0.3)
    assert "rank 2 was still running" in str(caught.value) and "barrier" in str(caught.value)
    after = ranks(3).run(pid)
    assert not set(before) & set(after)
    assert not any(psutil.pid_exists(p) for p in before)


def test_expected_exceptions(ranks: RankPools) -> None:
    found = ranks(2).run_expecting(Exception, fail_everywhere, match="over 5")
    assert [str(e) for e in found] == ["OddError: unit.0 is over 5", "OddError: unit.1 is over 5"]
    with pytest.raises(RankError, match="rank 0 did not raise KeyError matching ''"):
        ranks(2).run_expecting(KeyError, fail_everywhere)
    with pytest.raises(RankError, match="rank 0 did not raise ValueError"):
        ranks(2).run_expecting(ValueError, fail_on, 1, then_wait=False)
    with pytest.raises(RankError, match="no rank raised ValueError"):
        ranks(2).run_expecting(ValueError, total, 1)


def test_a_failed_assert_shows_its_values(ranks: RankPools) -> None:
    with pytest.raises(RankError, match=r"assert \(3 \* 2\) == 7"):
        ranks(2).run(compare, 3)


def test_local_functions_are_refused(ranks: RankPools) -> None:
    with pytest.raises(TypeError, match="top level of the test module"):
        ranks(2).run(lambda: None)


def test_a_hang_shows_the_stacks_of_every_rank(ranks: RankPools) -> None:
    before = ranks(2).run(pid)
    with pytest.raises(RankTimeout, match="rank 0, rank 1 of 2 did not end within 1 s") as caught:
        ranks(2).run(hang_in_barrier, 1, timeout=1)
    first, second = str(caught.value).split("rank 1 was still running", 1)
    assert "rank 0 was still running" in first and "barrier" in first
    assert "in hang_in_barrier" in second
    assert not set(before) & set(ranks(2).run(pid))


def test_a_hang_of_one_rank_shows_those_that_returned(ranks: RankPools) -> None:
    with pytest.raises(RankTimeout, match="rank 1 of 2 did not end within 1 s") as caught:
        ranks(2).run(sleep_on, 1, timeout=1)
    assert "rank 0 had returned" in str(caught.value) and "in sleep_on" in str(caught.value)
    assert ranks(2).run(total, 1) == [(0, 3.0), (1, 3.0)]


@pytest.mark.parametrize(("how", "code"), [("exit", 7), ("kill", -9)])
def test_a_dead_rank_is_named(ranks: RankPools, how: str, code: int) -> None:
    with pytest.raises(RankDied, match=f"rank 1 of 2 died with exit code {code}") as caught:
        ranks(2).run(die, 1, how)
    assert caught.value.exit_codes == {1: code}
    assert ranks(2).run(total, 1) == [(0, 3.0), (1, 3.0)]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("group", r"rank 1: process group not destroyed: group '\w+' of ranks \[0, 1\]"),
        ("default group", "rank 0: process group destroyed: the default group"),
        ("variable", "rank 0: environment variable MASTER_ADDR was removed.*\n.*_LEFT was set to '1'"),
        ("thread", r"rank 1: thread 'left-behind' \(daemon\) running .* is still alive"),
        ("file", "file 'left-0.bin' in the working directory\n.*'left-1.bin'"),
        ("dtype", "torch's default dtype was changed from torch.float32 to torch.float64"),
        ("folder", "rank 0: the working directory was changed to /"),
        ("collective", "all-reduce after the test"),
    ],
)
def test_leaks_fail_the_test_and_do_not_reach_the_next(ranks: RankPools, kind: str, said: str) -> None:
    with pytest.raises(RankLeak, match=said):
        ranks(2).run(leak, kind)
    assert ranks(2).run(total, 1) == [(0, 3.0), (1, 3.0)]
    assert ranks(2).run(leak, "nothing") == [None, None]


def test_a_thread_that_ends_soon_is_no_leak(ranks: RankPools) -> None:
    ranks(2).run(short_thread)


def test_fresh_processes_are_for_one_run_only(ranks: RankPools) -> None:
    shared = ranks(2).run(pid)
    own = ranks(2).run(pid, fresh=True)
    assert not set(own) & set(shared)
    assert not any(psutil.pid_exists(p) for p in own)
    assert ranks(2).run(pid) == shared
    with pytest.raises(RankLeak, match="process group destroyed"):
        ranks(2).run(break_group, fresh=True)
    assert ranks(2).run(pid) == shared


def test_fresh_processes_without_a_group(ranks: RankPools) -> None:
    assert ranks(2).run(start_group_from_environment, fresh=True, group=False) == [2, 2]
    with pytest.raises(TypeError, match="needs fresh=True"):
        ranks(2).run(start_group_from_environment, group=False)


def test_a_rank_that_died_between_runs_is_replaced(ranks: RankPools) -> None:
    victim = ranks(2).run(pid)[1]
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(victim) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ranks(2).run(total, 1) == [(0, 3.0), (1, 3.0)]


CHILD_OF_PYTEST = """
import os, signal, sys
from tests.ranks import RankPools
from tests import test_pool
pools = RankPools()
print(*pools(2).run(test_pool.pid), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_rank_outlives_a_killed_pytest(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", CHILD_OF_PYTEST]
    env = os.environ | {"TMPDIR": str(tmp_path)}  # its scratch folder stays behind
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(p) for p in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(psutil.pid_exists(p) for p in pids)


IN_PROCESS = """
import os, threading, time
import torch, torch.distributed as dist

def test_variable(): os.environ["LEFT_HERE"] = "1"
def test_thread(): threading.Thread(target=time.sleep, args=(30,), name="stays", daemon=True).start()
def test_file(): open("left.txt", "w").close()
def test_dtype(): torch.set_default_dtype(torch.float64)
def test_clean(monkeypatch, tmp_path):
    monkeypatch.setenv("LEFT_HERE", "1")
    monkeypatch.chdir(tmp_path)
    open("fine.txt", "w").close()
def test_group():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
"""


def test_leaks_in_the_test_process_fail_the_test(tmp_path: Path) -> None:
    (tmp_path / "test_leaky.py").write_text(textwrap.dedent(IN_PROCESS))
    (tmp_path / "conftest.py").write_text("from tests.conftest import no_leaks, scratch\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", str(tmp_path)]
    env = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}
    env |= {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90, check=False
    )
    for said in (
        "environment variable LEFT_HERE was set to '1'",
        "thread 'stays' (daemon) running time.sleep",
        "file 'left.txt' in the working directory",
        "torch's default dtype was changed",
        "process group not destroyed: the default group",
        "6 passed, 5 errors",
    ):
        assert said in done.stdout, done.stdout + done.stderr
