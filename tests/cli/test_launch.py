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
from tests.cli.started import Started

SHOW = """
import json, os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"]
names += [name for name in os.environ if name.startswith("ACCELERATE_")]
print(json.dumps({"argv": sys.argv, **{name: os.environ.get(name) for name in names}}) + "\\n", end="")
"""

STARTED = "shardwise launch: {}, CPU\n"
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


def variables(**own: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | own


def start(folder: Path, *arguments: str, **own: str) -> Started:
    return Started(folder, ("launch", *arguments), variables(**own))


def launch(folder: Path, *arguments: str, **own: str) -> tuple[int, str, str]:
    return start(folder, *arguments, **own).communicate(timeout=90)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def test_ranks_arguments_and_threads(script: Path) -> None:
    script.write_text(SHOW)
    # Options of ours, and the beginnings of some, behind the script: they are the script's.
    arguments = ["--nproc", "9", "--num", "3", "--cpu", "--", "-m", "--version", "$HOME ${local_rank} $$", "", "a b"]
    port = _free_port()
    ours = f"--cpu --num_processes 2 --mixed-precision BF16 --main_process_port {port} --debug".split()
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.cli", "launch", *ours, "script.py", *arguments],
        env=variables(CUDA_VISIBLE_DEVICES="0,1"),
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    code, out, err = done.returncode, done.stdout, done.stderr
    ranks = sorted((json.loads(line) for line in out.splitlines()), key=lambda rank: rank["RANK"])
    threads = str(max(1, available_cores() // 2))
    assert code == 0
    assert [rank["argv"] for rank in ranks] == [["script.py", *arguments]] * 2
    places = [(rank["RANK"], rank["LOCAL_RANK"], rank["WORLD_SIZE"]) for rank in ranks]
    assert places == [("0", "0", "2"), ("1", "1", "2")]
    assert [rank["OMP_NUM_THREADS"] for rank in ranks] == [threads] * 2
    assert [(rank["CUDA_VISIBLE_DEVICES"], rank["MASTER_PORT"]) for rank in ranks] == [("", str(port))] * 2
    handed_on = {"MIXED_PRECISION": "bf16", "USE_CPU": "true", "DEBUG_MODE": "true"}
    for rank in ranks:
        assert {name[11:]: value for name, value in rank.items() if name.startswith("ACCELERATE_")} == handed_on
    said = f"2 processes, CPU, OMP_NUM_THREADS={threads} for each (set it to choose), mixed precision bf16"
    assert err == f"shardwise launch: {said}\n"


def test_the_failed_rank_s_traceback_is_last_and_once(script: Path) -> None:
    script.write_text(FAIL)
    code, out, err = launch(script.parent, "--nproc", "2", "--", "script.py", "raise", OMP_NUM_THREADS="1")
    assert (code, out) == (1, "")
    head, _, traceback = err.partition("rank 1 failed (exit code 1):\n")
    assert head == STARTED.format("2 processes")  # No rank printed anything.
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
    assert err == STARTED.format("2 processes") + "rank 1 was killed by SIGKILL (possibly out of memory)\n"


def test_restarts_are_said_and_counted_and_the_last_exit_code_is_kept(script: Path) -> None:
    script.write_text(
        "import os, sys\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    raise ValueError('at first')\n"
        "print('again', flush=True)\nsys.exit(7)\n"
    )
    code, out, err = launch(
        script.parent, "--max_restarts=1", "--monitor_interval", "0.05", "script.py", CUDA_VISIBLE_DEVICES=""
    )
    assert (code, out) == (7, "again\n")
    assert err.endswith("ValueError: at first\nshardwise launch: restart 1 of 1\nrank 0 failed (exit code 7)\n")


def test_a_module_from_a_hostfile_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/show.py").write_text(SHOW)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    (tmp_path / "run.yaml").write_text("deepspeed_config: {deepspeed_hostfile: hosts, zero_stage: 3}\nuse_cpu: true\n")
    code, out, err = launch(tmp_path, "--config_file", "run.yaml", "-m", "pkg.show", "--hostfile", OMP_NUM_THREADS="5")
    ranks = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [rank["argv"][1:] for rank in ranks] == [["--hostfile"]] * 2
    assert [rank["OMP_NUM_THREADS"] for rank in ranks] == ["5"] * 2
    assert [rank["ACCELERATE_DEEPSPEED_ZERO_STAGE"] for rank in ranks] == ["3"] * 2
    assert err == STARTED.format("2 processes").rstrip() + ", ZeRO stage 3, settings from run.yaml\n"


def test_a_program_is_run_as_it_is(tmp_path: Path) -> None:
    print_rank = 'echo "$RANK $0 $1" && exit "$1"'
    code, out, err = launch(tmp_path, "-q", "--no_python", "sh", "-c", print_rank, "$x", "3")
    assert (code, out) == (3, "0 $x 3\n")
    assert err == "rank 0 failed (exit code 3, without a traceback)\n"


def test_an_interrupt_ends_all_ranks_without_a_traceback(tmp_path: Path, script: Path) -> None:
    script.write_text(
        "import os, time\nopen('started-' + os.environ['RANK'], 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    process = start(tmp_path, "--nproc", "2", "--quiet", "script.py", OMP_NUM_THREADS="1")
    marks = [tmp_path / "started-0", tmp_path / "started-1"]
    until = time.monotonic() + 60
    while not all(mark.exists() and mark.read_text() for mark in marks) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == (128 + signal.SIGINT, "", "")
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
    assert [code for code, _, _ in ends] == [0, 0]
    assert [out for _, out, _ in ends] == ["0 2\n", "1 2\n"]
    command = f"--nnodes 2 --node-rank 1 --nproc 1 --rdzv-endpoint localhost:{port} -- script.py"
    assert f"127.0.0.1: shardwise launch {command}\n" in ends[0][2]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
