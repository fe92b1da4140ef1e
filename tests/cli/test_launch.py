"""`shardwise launch` as a user sees it: each test starts real ranks, so there are few."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.cli.plan import available_cores

SHOW = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "TORCHELASTIC_RESTART_COUNT")
print(json.dumps({"argv": sys.argv, **{name: os.environ.get(name) for name in names}}) + "\\n", end="")
"""

FAIL = """
import os, signal, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    if sys.argv[1] == "raise":
        raise ValueError("the cause")
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise.cli", "launch", *arguments],
        env=environment | variables,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def launch(folder: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    process = start(folder, *arguments, **variables)
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def test_ranks_arguments_and_threads(script: Path) -> None:
    script.write_text(SHOW)
    arguments = ["--nproc", "9", "--", "-m", "--version", "$HOME ${local_rank} $$", "", "a b"]
    code, out, err = launch(script.parent, "--nproc", "2", "script.py", *arguments)
    ranks = sorted((json.loads(line) for line in out.splitlines()), key=lambda rank: rank["RANK"])
    threads = str(max(1, available_cores() // 2))
    assert code == 0
    assert [rank["argv"] for rank in ranks] == [["script.py", *arguments]] * 2
    places = [(rank["RANK"], rank["LOCAL_RANK"], rank["WORLD_SIZE"]) for rank in ranks]
    assert places == [("0", "0", "2"), ("1", "1", "2")]
    assert [rank["OMP_NUM_THREADS"] for rank in ranks] == [threads] * 2
    assert len(err.splitlines()) == 1
    assert f"OMP_NUM_THREADS={threads}" in err


def test_the_failed_rank_s_traceback_is_last_and_once(script: Path) -> None:
    script.write_text(FAIL)
    code, out, err = launch(script.parent, "--nproc", "2", "--", "script.py", "raise", OMP_NUM_THREADS="1")
    assert (code, out) == (1, "")
    head, _, traceback = err.partition("rank 1 failed (exit code 1):\n")
    assert head == ""  # No rank printed anything, and with OMP_NUM_THREADS set neither did the launcher.
    assert traceback.splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 7, in <module>',
        '    raise ValueError("the cause")',
        "ValueError: the cause",
    ]


def test_a_killed_rank_is_named(script: Path) -> None:
    script.write_text(FAIL)
    code, out, err = launch(script.parent, "--nproc", "2", "script.py", "kill", OMP_NUM_THREADS="1")
    assert (code, out) == (128 + signal.SIGKILL, "")
    assert err == "rank 1 was killed by SIGKILL (possibly out of memory)\n"


def test_restarts_are_said_and_counted_and_the_last_exit_code_is_kept(script: Path) -> None:
    script.write_text(
        "import os, sys\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    raise ValueError('at first')\n"
        "print('again', flush=True)\nsys.exit(7)\n"
    )
    code, out, err = launch(script.parent, "--max-restarts", "1", "script.py", CUDA_VISIBLE_DEVICES="")
    assert (code, out) == (7, "again\n")
    assert err.endswith("ValueError: at first\nshardwise launch: restart 1 of 1\nrank 0 failed (exit code 7)\n")


def test_a_module_from_a_hostfile_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/show.py").write_text(SHOW)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    code, out, _ = launch(tmp_path, "--hostfile", "hosts", "-m", "pkg.show", "--hostfile", OMP_NUM_THREADS="5")
    ranks = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [rank["argv"][1:] for rank in ranks] == [["--hostfile"]] * 2
    assert [rank["OMP_NUM_THREADS"] for rank in ranks] == ["5"] * 2


def test_an_interrupt_ends_all_ranks_without_a_traceback(tmp_path: Path, script: Path) -> None:
    script.write_text(
        "import os, time\nopen('started-' + os.environ['RANK'], 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    process = start(tmp_path, "--nproc", "2", "script.py", OMP_NUM_THREADS="1")
    marks = [tmp_path / "started-0", tmp_path / "started-1"]
    until = time.monotonic() + 60
    while not all(mark.exists() and mark.read_text() for mark in marks) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (128 + signal.SIGINT, "", "")
    for mark in marks:
        with pytest.raises(ProcessLookupError):
            os.kill(int(mark.read_text()), 0)


def test_two_nodes_on_one_machine_meet(tmp_path: Path, script: Path) -> None:
    script.write_text(
        "import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "total = torch.ones(1)\ndist.all_reduce(total)\n"
        "print(os.environ['GROUP_RANK'], int(total), flush=True)\ndist.destroy_process_group()\n"
    )
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    port = _free_port()
    meet = ("--hostfile", "hosts", "--rdzv-endpoint", f"localhost:{port}")
    nodes = [start(tmp_path, *meet, "--node-rank", str(node), "script.py") for node in range(2)]
    ends = [node.communicate(timeout=90) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert [out for out, _ in ends] == ["0 2\n", "1 2\n"]
    command = f"--nnodes 2 --node-rank 1 --nproc 1 --rdzv-endpoint localhost:{port} -- script.py"
    assert f"127.0.0.1: shardwise launch {command}\n" in ends[0][1]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
