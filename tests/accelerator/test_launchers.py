"""Functions called in several processes: their results, their failures, and that nothing is left behind."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import handed_on
from shardwise.accelerator import launchers
from shardwise.accelerator.launchers import RankFailed, debug_launcher, notebook_launcher
from shardwise.dist import init_distributed
from shardwise.errors import ConfigError, NotYetSupported

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES[:-1]:
        monkeypatch.delenv(name, raising=False)


def total(folder: Path, start: float) -> None:
    """Adds up the ranks, and writes down what each saw."""
    init_distributed()
    mine = torch.tensor(start + dist.get_rank())
    dist.all_reduce(mine)
    said = " ".join([str(mine.item()), *(os.environ.get(name, "-") for name in NAMES)])
    (folder / f"{dist.get_rank()}-of-{dist.get_world_size()}").write_text(said)
    dist.destroy_process_group()


def fail(kind: str) -> None:
    init_distributed()
    if dist.get_rank() == 1:
        if kind == "raise":
            raise KeyError("the cause")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "long":
            raise ValueError("x" * 300_000)
        sys.exit(7)
    dist.all_reduce(torch.ones(1))
    time.sleep(60)


def once(folder: Path) -> None:
    mark = folder / f"tried-{os.environ['RANK']}"
    if not mark.exists():
        mark.write_text("")
        time.sleep(0.2)  # So that both have tried before the failed one takes the other along.
        raise ValueError("at first")
    (folder / f"done-{os.environ['RANK']}").write_text("")


def said(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("*-of-*"))]


def test_two_ranks_on_the_cpu(tmp_path: Path) -> None:
    before, children = dict(os.environ), mp.active_children()
    assert debug_launcher(total, (tmp_path, 1.0)) is None
    assert said(tmp_path) == ["3.0 0 0 2 no true ", "3.0 1 1 2 no true "]
    assert dict(os.environ) == before
    assert mp.active_children() == children


def test_a_function_of_a_notebook_is_found_by_its_ranks(tmp_path: Path) -> None:
    seen = 5.0  # What a new interpreter could not know.

    def cell(folder: Path) -> None:
        total(folder, seen)

    notebook_launcher(cell, (tmp_path,), num_processes=2, mixed_precision="BF16")
    assert said(tmp_path) == ["11.0 0 0 2 bf16 true ", "11.0 1 1 2 bf16 true "]


def test_one_process_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    notebook_launcher(
        lambda value: seen.extend([value, os.getpid(), os.environ["ACCELERATE_MIXED_PRECISION"]]), (3,), 1, "bf16"
    )
    assert seen == [3, os.getpid(), "bf16"]
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert "ACCELERATE_USE_CPU" not in os.environ


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("raise", "KeyError", "KeyError: 'the cause'$"),
        ("kill", "SIGKILL", "rank 1 was killed by SIGKILL"),
        ("long", "ValueError", "x{300000}$"),
    ],
)
def test_the_cause_is_raised_and_no_rank_is_left(kind: str, name: str, text: str) -> None:
    start, children = time.monotonic(), mp.active_children()
    with pytest.raises(RankFailed, match=text) as caught:
        debug_launcher(fail, (kind,))
    assert (caught.value.rank, caught.value.kind) == (1, name)
    if kind == "raise":
        lines = str(caught.value).splitlines()
        assert lines[0] == "rank 1 failed:"
        assert ", in fail" in lines[2], "the traceback starts in the function"
    assert time.monotonic() - start < 30, "the rank that slept was ended, not waited for"
    assert mp.active_children() == children


def test_ranks_are_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook_launcher(once, (tmp_path,), num_processes=2, max_restarts=1)
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0", "done-1"}
    assert "ValueError: at first\nnotebook_launcher: restart 1 of 1\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "kind", "text"),
    [
        ({"mixed_precision": "bf61"}, ConfigError, "mixed_precision='bf61': expected one of no, fp16, bf16.*'bf16'"),
        ({"mixed_precision": "fp8"}, ConfigError, "fp8 has not landed yet"),
        ({"num_processes": 0}, ConfigError, "num_processes=0"),
        ({"node_rank": 2, "num_nodes": 2}, ConfigError, "node_rank=2: expected 0 to 1"),
        ({"num_nodes": 2, "max_restarts": 1}, NotYetSupported, "on one node only"),
        ({"rdzv_backend": "c10d"}, NotYetSupported, "rdzv_backend='c10d'"),
        ({"log_line_prefix_template": "x"}, NotYetSupported, "log_line_prefix_template"),
        ({"use_port": "http"}, ConfigError, "use_port='http'"),
        ({"rdzv_endpoint": "there"}, ConfigError, "rdzv_endpoint='there'"),
    ],
)
def test_arguments_that_do_not_fit(keys: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        notebook_launcher(print, (), **{"num_processes": 2, **keys})


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="1 visible GPUs; a rank needs one of its own"):
        notebook_launcher(print, (), 2)


def test_what_is_on_the_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        device = torch.device("cuda:0")

    def cell() -> None: ...

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setitem(sys.modules, "bitsandbytes", sys)
    monkeypatch.setattr(sys.modules["__main__"], "features", OnGpu(), raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "net", nn.Linear(1, 1), raising=False)
    with pytest.raises(ConfigError) as caught:
        notebook_launcher(cell, (), 2)
    message = str(caught.value)
    assert "`features` is on cuda:0; `bitsandbytes` is imported" in message
    assert "`net`" not in message
    # A function of a module is found by a new interpreter; on the CPU nothing hinders a fork.
    assert [launchers._start_method(total, gpus) for gpus in (2, 0)] == ["spawn", "spawn"]
    assert launchers._start_method(cell, 0) == "fork"


def test_an_open_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="a process group is open in this process"):
        debug_launcher(print)


def test_what_is_handed_on_is_what_the_command_line_hands_on() -> None:
    assert launchers.PRECISIONS == handed_on.PRECISIONS
    names = {row.variable for row in handed_on.TABLE}
    assert {"ACCELERATE_MIXED_PRECISION", *launchers._on_cpu()} - names == {"CUDA_VISIBLE_DEVICES"}


def test_ranks_can_be_spawned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "_start_method", lambda *_: "spawn")
    debug_launcher(total, (tmp_path, 0.0))
    assert said(tmp_path) == ["1.0 0 0 2 no true ", "1.0 1 1 2 no true "]
