"""Each tracker: what it writes, or what it calls."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise import ConfigError
from shardwise.accelerator.trackers import TensorBoardTracker, Tracking
from shardwise.accelerator.trackers.values import on_host
from tests.accelerator.fake_services import installed
from tests.monitor.listening import Listening

CONFIG = {"lr": 0.1, "model": {"layers": [1, 2], "name": "gpt"}, "seed": None, "hub": {"api_key": "s3cret"}}


class Place:
    is_main_process = True


def tracking(log_with: str, logging_dir: Any = None) -> Tracking:
    return Tracking(log_with, logging_dir, Place())


def rows(path: Path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EXPERIMENT_NAME", "RUN_ID", "TAGS", "NESTED_RUN"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What shardwise says."""
    with Listening() as said:
        yield said


def test_numbers_of_every_kind() -> None:
    image = np.zeros((2, 2))
    given = {
        "bf16": torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True),
        "one": torch.tensor([2]),
        "flag": torch.tensor(True),
        "np": np.float32(0.25),
        "npi": np.int64(3),
        "array": np.array(1.5),
        "nested": {"a": torch.tensor(7), 3: 4},
        "text": "x",
        "image": image,
    }
    found = on_host(given)
    assert found.pop("image") is image
    assert found == {
        "bf16": 0.5, "one": 2, "flag": True, "np": 0.25, "npi": 3, "array": 1.5,
        "nested": {"a": 7, "3": 4}, "text": "x",
    }  # fmt: skip
    assert [type(found[k]) for k in ("bf16", "one", "flag", "np", "npi")] == [float, int, bool, float, int]
    assert list(on_host({"b": torch.tensor(1), "a": 2, "c": torch.tensor(3)})) == ["b", "a", "c"]


def test_tensorboard(tmp_path: Path, heard: list[str]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = tracking("tensorboard", tmp_path)
    found.init_trackers("p", CONFIG, {"tensorboard": {"flush_secs": 3}})
    assert isinstance(found.get_tracker("tensorboard"), TensorBoardTracker)
    for step in (5, 7):
        found.log({"loss": torch.tensor(1 / step), "note": "hi", "eval": {"a": 1, "b": 2.5}, "x": None}, step)
    found.log({"deep": {"er": {"a": 1}, "text": "t"}}, step=8)
    found.get_tracker("tensorboard").log_images({"img": torch.zeros(2, 3, 4, 4)}, step=9)
    writer = found.get_tracker("tensorboard", unwrap=True)
    assert writer is found.trackers[0].writer and os.path.samefile(writer.log_dir, tmp_path / "p")
    found.end()

    events = accumulator.EventAccumulator(str(tmp_path / "p")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (5, pytest.approx(1 / 5, rel=1e-6)),  # stored in 32 bits
        (7, pytest.approx(1 / 7, rel=1e-6)),
    ]
    assert events.Tags()["images"] == ["img"]
    texts = {
        tag: events.Tensors(tag)[0].tensor_proto.string_val[0] for tag in ("note/text_summary", "config/text_summary")
    }
    assert texts["note/text_summary"] == b"hi"
    assert b'"layers": [' in texts["config/text_summary"] and b"s3cret" not in texts["config/text_summary"]
    hparams = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"model/layers" in hparams and b"[1, 2]" in hparams and b"s3cret" not in hparams
    inner = accumulator.EventAccumulator(str(tmp_path / "p" / "eval_b")).Reload()
    assert [(e.step, e.value) for e in inner.Scalars("eval")] == [(5, 2.5), (7, 2.5)]
    assert heard == ["tensorboard: 'x' is not recorded: it takes numbers, texts and dictionaries of them, not NoneType"]


def test_csv_columns_grow(tmp_path: Path) -> None:
    found = tracking("csv", tmp_path)
    found.init_trackers("p/run 1", CONFIG)
    found.log({"loss": 0.5}, step=1)
    found.log({"eval": {"acc": 0.25}, "note": 'a "b",\nc'}, step=2)
    found.log({"loss": float("nan"), "step": 3})
    found.log({"loss": 1, "step": 30}, step=4)
    path = found.get_tracker("csv", unwrap=True)
    expected = [
        ["step", "loss", "eval/acc", "note", "values/step"],
        ["1", "0.5", "", "", ""],
        ["2", "", "0.25", 'a "b",\nc', ""],
        ["3", "nan", "", "", ""],
        ["4", "1", "", "", "30"],
    ]
    assert path == tmp_path / "p" / "run 1" / "metrics.csv"
    assert rows(path) == expected, "also before it is finished"
    found.end()
    assert sorted(p.name for p in path.parent.iterdir()) == ["config.json", "metrics.csv"]
    assert json.loads((path.parent / "config.json").read_text()) == CONFIG | {"hub": {"api_key": "***"}}


def test_csv_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "p" / "metrics.csv"
    for step in (1, 2):
        found = tracking("csv", tmp_path)
        found.init_trackers("p")
        found.log({"loss": 0.5, f"n{step}": step}, step=step)
        found.end()
        path.write_text(path.read_text() + "9,0.")  # cut off while it was written
    found = tracking("csv", tmp_path)
    found.init_trackers("p")
    found.log({"n2": 3}, step=3)
    found.end()
    assert rows(path) == [
        ["step", "loss", "n1", "n2"], ["1", "0.5", "1", ""], ["9", "0.", "", ""], ["2", "0.5", "", "2"], ["9", "0."],
        ["3", "", "", "3"],
    ]  # fmt: skip
    path.write_text("a,b\n")
    with pytest.raises(ConfigError, match="does not begin with the column `step`"):
        found.init_trackers("p")


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = installed("wandb", monkeypatch)
    found = tracking("wandb")
    found.init_trackers("p", CONFIG, {"wandb": {"name": "first"}})
    found.log({"loss": torch.tensor(0.5), "eval": {"acc": 1}}, step=4, log_kwargs={"wandb": {"commit": False}})
    tracker = found.get_tracker("wandb")
    tracker.log_images({"img": ["a", "b"]}, step=5)
    tracker.log_table("t", columns=["x"], data=[[1]], step=6)
    run = found.get_tracker("wandb", unwrap=True)
    assert run is tracker.run and run.config == CONFIG | {"hub": {"api_key": "***"}}
    found.end()
    assert calls == [
        ("begin", (), {"project": "p", "name": "first"}),
        ("run.log", ({"loss": 0.5, "eval": {"acc": 1}},), {"step": 4, "commit": False}),
        ("run.log", ({"img": ["image of a", "image of b"]},), {"step": 5}),
        ("run.log", ({"t": {"columns": ["x"], "data": [[1]], "dataframe": None}},), {"step": 6}),
        ("run.finish", (), {}),
    ]


def test_trackio_is_told_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = installed("trackio", monkeypatch)
    found = tracking("trackio")
    found.init_trackers("p", {"lr": 1}, {"trackio": {"space_id": "a/b"}})
    found.log({"loss": 0.5, "eval": {"acc": 1}}, step=np.int64(40))  # type: ignore[arg-type]
    assert found.get_tracker("trackio", unwrap=True).config == {"lr": 1}
    found.end()
    assert calls == [
        ("begin", (), {"project": "p", "space_id": "a/b"}),
        ("run.log", ({"loss": 0.5, "eval/acc": 1},), {"step": 40}),
        ("run.finish", (), {}),
    ]


def test_comet(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = installed("comet_ml", monkeypatch)
    found = tracking("comet")
    found.init_trackers("p", {"lr": 1, "sizes": [1]}, {"comet": {"workspace": "w"}})
    found.log({"loss": 0.5, "eval": {"acc": 1}, "note": "hi"}, step=4)
    assert found.get_tracker("comet") is found.get_tracker("comet_ml")
    found.end()
    assert calls == [
        ("begin", (), {"project_name": "p", "workspace": "w"}),
        ("run.log_parameters", ({"lr": 1, "sizes": "[1]"},), {}),
        ("run.set_step", (4,), {}),
        ("run.log_metric", ("loss", 0.5), {"step": 4}),
        ("run.log_metric", ("eval/acc", 1), {"step": 4}),
        ("run.log_other", ("note", "hi"), {}),
        ("run.end", (), {}),
    ]
    monkeypatch.delattr(sys.modules["comet_ml"], "start")
    with pytest.raises(ConfigError, match="this comet_ml has no `start`"):
        found.init_trackers("p")


def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = installed("mlflow", monkeypatch)
    found = tracking("mlflow")
    found.init_trackers("known", {"lr": 1, "model": {"name": "a long name"}, "n": None})
    found.log({"loss": 0.5, "eval": {"acc": True}, "note": "hi"}, step=4, log_kwargs={"mlflow": {"synchronous": False}})
    found.get_tracker("mlflow").log_artifact("a.txt")
    found.end()
    run = {"run_id": None, "run_name": None, "nested": False, "tags": None, "description": None}
    assert calls == [
        ("begin", (), run | {"experiment_id": "7"}),
        ("log_params", ({"lr": "1", "model/name": "a long ..."},), {}),
        ("log_params", ({"n": "None"},), {}),
        ("log_dict", ({"model/name": "a long name"}, "long_parameters.json"), {}),
        ("log_metrics", ({"loss": 0.5, "eval/acc": 1.0},), {"step": 4, "synchronous": False}),
        ("log_artifact", ("a.txt", None), {}),
        ("end_run", (), {}),
    ]


def test_mlflow_heeds_its_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = installed("mlflow", monkeypatch)
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "a"}')
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "True")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "new")
    monkeypatch.setenv("MLFLOW_RUN_ID", "r")
    tracking("mlflow").init_trackers("known", init_kwargs={"mlflow": {"logging_dir": tmp_path, "run_name": "x"}})
    assert calls == [
        ("begin", ("experiment", "new"), {"artifact_location": str(tmp_path), "tags": {"team": "a"}}),
        (
            "begin",
            (),
            {
                "run_id": "r",
                "experiment_id": "8",
                "run_name": "x",
                "nested": True,
                "tags": {"team": "a"},
                "description": None,
            },
        ),
    ]
    for name, value, match in (
        ("TAGS", "{", "is no JSON"),
        ("TAGS", "[]", "JSON object"),
        ("NESTED_RUN", "?", "true or"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=match):
            patch.setenv(f"MLFLOW_{name}", value)
            tracking("mlflow").init_trackers("known")
