"""What runs on a rank: as `python script.py` would, with a report instead of a printed traceback. No torch here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import _worker


def work(tmp_path: Path, *argv: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    report = tmp_path / "report.json"
    environment = {**os.environ, _worker.REPORT_VARIABLE: str(report), **variables}
    done = subprocess.run(
        [sys.executable, _worker.__file__, *argv],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done, json.loads(report.read_text()) if report.exists() else {}


def script(tmp_path: Path, text: str) -> str:
    (tmp_path / "script.py").write_text(text)
    return "script.py"


def test_a_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    show = "import sys, os; print([sys.argv, __name__, __file__, sys.path[0], 'SHARDWISE_RANK_REPORT' in os.environ])"
    plain = subprocess.run(
        [sys.executable, script(tmp_path, show), "-m", "--", "a b"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    ours, report = work(tmp_path, "script.py", "-m", "--", "a b")
    assert ours.stdout == plain.stdout
    assert "False" in ours.stdout
    assert report["kind"] == "done"


def test_a_traceback_is_reported_from_the_script_on_and_not_printed(tmp_path: Path) -> None:
    source = "def inner():\n    raise ValueError('why')\ninner()\n"
    plain = subprocess.run(
        [sys.executable, script(tmp_path, source)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ours, report = work(tmp_path, "script.py")
    assert (ours.returncode, ours.stdout, ours.stderr) == (1, "", "")
    assert report["text"] == plain.stderr
    assert report["consequence"] is False


@pytest.mark.parametrize(
    ("statement", "code", "kind", "text"),
    [
        ("sys.exit()", 0, "done", ""),
        ("sys.exit(0)", 0, "done", ""),
        ("sys.exit(5)", 5, "exit", ""),
        ("sys.exit('no data')", 1, "exit", "no data\n"),
    ],
)
def test_exits_keep_their_code(tmp_path: Path, statement: str, code: int, kind: str, text: str) -> None:
    ours, report = work(tmp_path, script(tmp_path, f"import sys\n{statement}\n"))
    assert (ours.returncode, ours.stderr) == (code, "")
    assert (report["kind"], report["code"], report["text"]) == (kind, code, text)


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    # A job that a shell started in the background ignores interrupts, and so would this script.
    heed = "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    ours, report = work(tmp_path, script(tmp_path, heed + "os.kill(os.getpid(), signal.SIGINT)\n"))
    assert (ours.returncode, ours.stderr, report) == (130, "", {})


def test_a_module_runs_and_its_failure_starts_at_its_own_frame(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/run.py").write_text("import sys\nprint(__spec__.name, sys.argv[1:])\n1 / 0\n")
    ours, report = work(tmp_path, "-m", "pkg.run", "--nproc", "3")
    assert ours.stdout == "pkg.run ['--nproc', '3']\n"
    lines = report["text"].splitlines()
    assert lines[1].startswith(f'  File "{tmp_path}/pkg/run.py", line 3')
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_exit_handlers_and_crash_reporters_still_run(tmp_path: Path) -> None:
    source = (
        "import atexit, sys\n"
        "def hook(kind, error, frames):\n    print('reported', error)\n    print('noise', file=sys.stderr)\n"
        "sys.excepthook = hook\natexit.register(lambda: print('left', __name__))\nraise ValueError('why')\n"
    )
    ours, report = work(tmp_path, script(tmp_path, source))
    assert ours.stdout == "reported why\nleft __main__\n"
    assert ours.stderr == ""
    assert report["text"].endswith("ValueError: why\n")


def test_a_lost_connection_is_a_consequence_also_behind_another_error() -> None:
    class CommError(Exception): ...

    lost = RuntimeError("[pair.cc:5] Connection closed by peer [127.0.0.1]:1. Check the logs")
    wrapped = ValueError("step failed")
    wrapped.__cause__ = lost
    for error in (lost, wrapped, CommError(), ConnectionResetError("Broken pipe")):
        assert _worker.is_consequence(error)
    assert not _worker.is_consequence(ValueError("Connection closed by peer"))
    assert not _worker.is_consequence(RuntimeError("shapes differ"))
