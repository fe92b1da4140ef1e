"""The self-check: it passes here, and it can fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli import app, self_check, test
from shardwise.cli.plan import LaunchPlan
from tests.cli.started import Started


def test_this_installation_trains_on_two_processes(tmp_path: Path) -> None:
    code, out, err = Started(tmp_path, ("test", "--cpu"), dict(os.environ)).communicate(timeout=100)
    assert code == 0, out + err
    lines = out.splitlines()
    assert [line.split()[-1] for line in lines[:-1]] == ["ok"] * 5
    assert lines[0].startswith("2 processes on cpu")
    assert lines[-1] == "ok: this installation trains"


def test_one_process_and_what_goes_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert self_check.main(1) == 0
    assert capsys.readouterr().out.endswith("ok: this installation trains\n")
    right = self_check.losses_at

    def off_at_stage_3(stage: int, world: int, rank: int) -> list[float]:
        losses = right(stage, world, rank)
        return [loss * (1 + 2e-4 * (stage == 3)) for loss in losses]

    monkeypatch.setattr(self_check, "losses_at", off_at_stage_3)
    assert self_check.main(2) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "FAILED" in line] == [lines[0], lines[4]]
    assert lines[0].endswith("FAILED: 1 came together, 2 were started")
    assert "stage 3" in lines[4]
    assert lines[-1] == "2 of 5 checks failed"


def test_what_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[LaunchPlan, list[str]]] = []
    monkeypatch.setattr(test, "launch", lambda plan, argv, **_: calls.append((plan, argv)) or 0)
    (tmp_path / "run.yaml").write_text("num_processes: 3\nuse_cpu: true\n")
    # The order of upstream's bug: the option behind the command is heard.
    for arguments in ([], ["--num-processes", "4"], ["--config_file", str(tmp_path / "run.yaml")]):
        assert CliRunner().invoke(app, ["test", *arguments]).exit_code == 0
    assert [plan.nproc for plan, _ in calls] == [2, 4, 3]
    assert [argv for _, argv in calls] == [[str(test.SCRIPT), str(n)] for n in (2, 4, 3)]
    assert test.SCRIPT.is_file()
    wrong = CliRunner().invoke(app, ["test", "--config_file", "absent.yaml"])
    assert wrong.exit_code == 2
    assert "absent.yaml: cannot be read" in wrong.output
