"""The command line before it runs anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shardwise
from shardwise.cli import app


def test_version_and_commands() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"shardwise {shardwise.__version__}\n"
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    assert "launch" in shown.output
    assert "demo" in shown.output


def test_the_command_line_itself_does_not_import_torch() -> None:
    # The package's own __init__ is left out: what is tested is what the command line adds to it.
    program = (
        "import sys, types\npackage = types.ModuleType('shardwise')\n"
        f"package.__path__, package.__version__ = {list(shardwise.__path__)!r}, '0'\n"
        "sys.modules['shardwise'] = package\nimport shardwise.cli\nprint('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["launch", "absent.py"], "shardwise launch: no such file: absent.py"),
        (["launch", "--nnodes", "2", __file__], "add --rdzv-endpoint HOST:PORT"),
        (["launch", "--hostfile", "absent", __file__], "hostfile absent: cannot be read"),
        (["launch", "--hostfile", "absent", "--nproc", "2", __file__], "drop --nproc or --hostfile"),
        (["demo", "--text", "absent.txt"], "--text: no such file: absent.txt"),
    ],
)
def test_wrong_use_is_said_in_a_line_and_exits_with_2(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert said in done.output
    assert "Traceback" not in done.output


def test_a_malformed_hostfile_line_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("node-a slots=2\nnode-b slotz=2\n")
    done = CliRunner().invoke(app, ["launch", "--hostfile", str(path), __file__])
    assert done.exit_code == 2
    assert "line 2: expected 'host slots=N', got 'node-b slotz=2'" in done.output
