"""The report for bug reports."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import shardwise
from shardwise.cli import app


def test_the_report_is_plain_lines(no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "a secret")
    (no_settings / "shardwise").mkdir()
    (no_settings / "shardwise/config.yaml").write_text("num_processes: 2\nuse_cpu: true\n")
    done = CliRunner().invoke(app, ["env"])
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0] == f"- shardwise: {shardwise.__version__}"
    assert f"- torch: {torch.__version__}" in lines
    assert "    NCCL_DEBUG=INFO" in lines
    assert lines[-3:] == ["- config:", "    num_processes: 2", "    use_cpu: true"]
    assert "secret" not in done.output


def test_as_json() -> None:
    facts = json.loads(CliRunner().invoke(app, ["env", "--json"]).output)
    assert facts["Python"].startswith(platform.python_version())
    assert facts["config file"] == "none"
    assert facts["packages"]["pydantic"]
    assert set(facts["distributed backends"].split(", ")) >= {"gloo"}
