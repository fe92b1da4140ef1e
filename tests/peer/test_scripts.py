"""The peer's own test scripts, with this library in its place; and that the documents name all that it has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peer import alias

ROOT = Path(__file__).resolve().parents[2]
RUN = Path(__file__).with_name("run.py")

# What cannot pass, with the reason in docs/accelerate.md.
REFUSED = {"test_distributed_data_loop.test_stateful_dataloader_save_state": "different folders"}
# On one process there are the four scripts and two functions; on two also what upstream runs on two GPUs.
COUNTS = {1: 6, 2: 32}


@pytest.mark.parametrize("size", [1, 2])
def test_scripts_of_the_peer_pass(size: int, tmp_path: Path) -> None:
    if alias.folder() is None:
        pytest.skip("the peer is not installed")
    pytest.importorskip("torchdata")
    result = tmp_path / "result"
    command = [sys.executable, "-m", "shardwise.cli", "launch", "--cpu", "--num_processes", str(size)]
    done = subprocess.run(
        [*command, str(RUN), str(result)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for rank in range(size):
        outcome = json.loads(Path(f"{result}.{rank}").read_text())
        failed = {name: problem for name, problem in outcome.items() if problem and name not in REFUSED}
        assert not failed, f"rank {rank}: {len(failed)} of {len(outcome)} failed: {failed}\n{done.stderr[-4000:]}"
        for name, why in REFUSED.items():
            assert name not in outcome or why in outcome[name]
        assert len(outcome) == COUNTS[size]


def names_in_the_documents() -> set[str]:
    text = (ROOT / "docs" / "accelerate.md").read_text()
    found = set(re.findall(r"`([A-Za-z_][\w.]*)", text))
    return found | {name.rpartition(".")[2] for name in found}


# In a process of its own: importing the peer leaves traces.
LIST = """
import accelerate, inspect, json
public = lambda o: [n for n in dir(o) if not n.startswith("_") and not inspect.ismodule(getattr(o, n))]
names = public(accelerate) + public(accelerate.Accelerator) + list(inspect.signature(accelerate.Accelerator).parameters)
print(json.dumps(names))
"""


def test_every_name_of_the_peer_is_in_the_documents() -> None:
    found = alias.folder()
    if found is None:
        pytest.skip("the peer is not installed")
    environment = {**os.environ, "PYTHONPATH": str(found.parent)}
    done = subprocess.run([sys.executable, "-c", LIST], env=environment, capture_output=True, text=True, check=True)
    wanted = set(json.loads(done.stdout.splitlines()[-1]))
    assert len(wanted) > 100
    documented = names_in_the_documents()
    missing = {n for n in wanted if n not in documented and not re.fullmatch(r"is_\w+_available", n)}
    assert not missing


def test_what_the_documents_say_works_is_there() -> None:
    import shardwise
    from shardwise import utils

    text = (ROOT / "docs" / "accelerate.md").read_text()
    for heading, home in (
        ("### Methods and properties", shardwise.Accelerator),
        ("### Top level", shardwise),
        ("### `utils`", utils),
    ):
        section = text[text.index(heading) :].split("\n### ")[0 if heading.startswith("### ") else 1]
        works = next(line for line in section.splitlines() if line.endswith("| works |"))
        names = re.findall(r"`([A-Za-z_]\w*)`", works)
        assert len(names) > 15
        for name in names:
            assert hasattr(home, name), f"{heading}: {name}"
