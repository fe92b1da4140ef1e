"""The demo end to end, with few steps on a small text."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import hjson
import pytest

from shardwise.cli import app, demo
from tests.cli.started import Started


@pytest.mark.timeout(240)  # A quarter of a minute on two free cores, and much more on busy ones.
def test_a_short_demo_trains_samples_and_reports(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("for i in range(10):\n    print(i)\n" * 2000)
    examples = demo.examples_folder()
    assert examples is not None
    # The demo's own config but for the batch: most of the time goes there.
    config = hjson.loads((examples / "ds_config.json").read_text())
    (tmp_path / "ds_config.json").write_text(json.dumps(config | {"train_micro_batch_size_per_gpu": 3}))
    (tmp_path / "cwd").mkdir()
    arguments = ("--nproc", "2", "--steps", "25", "--text", str(text), "--config", str(tmp_path / "ds_config.json"))
    environment = os.environ | {"COLUMNS": "120", "PYTHONIOENCODING": "utf-8"}
    code, out, err = Started(tmp_path / "cwd", ("demo", *arguments), environment).communicate(timeout=220)
    assert code == 0, err
    lines = [line for line in out.splitlines() if line.startswith("step ")]
    assert [line.split(" ")[1] for line in lines] == ["25/25"]  # Piped: a line now and then, no bar.
    heldout = re.search(r"held-out loss: (\d+\.\d+) nats a byte", out)
    # A uniform guess over bytes costs ln 256 = 5.55 nats; two lines repeated are learnt to below one in 25 steps.
    assert heldout is not None
    assert float(heldout[1]) < 1.0
    assert "def " in out
    rows = [re.findall(r"[\d.]+", line) for line in out.splitlines() if re.match(r"│ +\d", line)]
    assert [row[0] for row in rows] == ["0", "1"]
    for _, *kinds, total, formula, _rss in rows:
        # Small parameters stay whole on every rank: a little over the formula is right, a copy of the model is not.
        assert float(total) <= float(formula) * 1.1
        assert len(kinds) == 3


def test_an_installed_copy_says_that_it_needs_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    monkeypatch.setattr(demo, "__file__", str(tmp_path / "site-packages/shardwise/cli/demo.py"))
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 2
    assert "run this from a checkout" in done.output
