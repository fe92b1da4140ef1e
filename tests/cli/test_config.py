"""The questionnaire: what is asked, what is written, and that the launcher reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from shardwise.cli import app, config
from shardwise.cli.config_file import load, merge
from shardwise.cli.flags import Flags
from shardwise.cli.resolve import resolve


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    visible = [0]
    monkeypatch.setattr(config, "visible_gpus", lambda: visible[0])
    return visible


def run(*arguments: str, answers: str = "") -> tuple[int, str]:
    done = CliRunner().invoke(app, ["config", *arguments], input=answers)
    return done.exit_code, done.output


def written(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def test_answers_by_return_are_the_machine_s_defaults(no_settings: Path) -> None:
    code, output = run(answers="\n" * 10)
    path = no_settings / "shardwise" / "config.yaml"
    assert code == 0
    assert output.endswith(f"written: {path}\nstart with: shardwise launch SCRIPT\n")
    assert written(path) == config.defaults(0)
    assert resolve(merge(Flags(), load(path)), lambda: 0).plan.nproc == 1


def test_two_machines_with_gpus_and_zero(tmp_path: Path, gpus: list[int]) -> None:
    gpus[0] = 4
    path = tmp_path / "run.yaml"
    answers = "2\n1\nnode-a\n\n\n7\n8\nbf16\n\n9\n3\n4\n0.5\n"  # 7 does not divide by two, 9 is no stage.
    code, output = run("--config_file", str(path), answers=answers)
    assert code == 0, output
    assert "expected a multiple of 2" in output
    assert f"start with: shardwise launch --config_file {path} SCRIPT" in output
    assert written(path) == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "use_cpu": False,
        "num_machines": 2,
        "num_processes": 8,
        "mixed_precision": "bf16",
        "machine_rank": 1,
        "main_process_ip": "node-a",
        "main_process_port": 29500,
        "deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5},
    }
    plan = resolve(merge(Flags(), load(path)), lambda: 4).plan
    assert (plan.nproc, plan.max_nodes, plan.node_rank) == (4, 2, 1)


def test_a_ds_config_says_the_rest_itself(tmp_path: Path, gpus: list[int]) -> None:
    gpus[0] = 2
    (tmp_path / "ds.json").write_text("{}")
    path = tmp_path / "run.yaml"
    answers = f"1\nn\n3\n\nabsent.json\n{tmp_path}/ds.json\n"
    code, output = run("--config-file", str(path), answers=answers)
    assert code == 0, output
    assert "absent.json: no such file" in output
    content = written(path)
    assert content["deepspeed_config"] == {"deepspeed_config_file": f"{tmp_path}/ds.json"}
    assert (content["use_cpu"], content["num_processes"]) == (True, 3)
    load(path)


def test_accumulation_without_zero_reaches_the_script(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    assert run("--config_file", str(path), answers="1\n2\nfp16\n\nnone\n8\n")[0] == 0
    environment = resolve(merge(Flags(), load(path)), lambda: 0).plan.environment
    assert environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "8"
    assert environment["ACCELERATE_USE_CPU"] == "true"
    assert "ACCELERATE_USE_DEEPSPEED" not in environment


def test_default_asks_nothing_and_leaves_a_file_alone(tmp_path: Path, gpus: list[int]) -> None:
    gpus[0] = 2
    path = tmp_path / "deep" / "run.yaml"
    arguments = ("default", "--config_file", str(path), "--mixed_precision", "bf16")
    assert run(*arguments)[0] == 0
    assert written(path) == config.defaults(2, "bf16")
    path.write_text("mine: true\n")
    code, output = run(*arguments)
    assert code == 2
    assert "exists and is left alone; --force writes over it" in output
    assert path.read_text() == "mine: true\n"
    assert run(*arguments, "--force")[0] == 0
    assert written(path)["distributed_type"] == "MULTI_GPU"


def test_writing_over_a_file_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("mine: true\n")
    code, output = run("--config_file", str(path), answers="n\n")
    assert code == 1
    assert "Write over it?" in output
    assert path.read_text() == "mine: true\n"


def test_nothing_else_can_be_asked_for() -> None:
    code, output = run("update")
    assert code == 2
    assert "update: expected nothing, or default" in output
