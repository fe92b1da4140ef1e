"""The trackers by themselves: what they write, and what they call."""

from __future__ import annotations

import csv
import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardwise import Config, ConfigError
from shardwise.monitor import check_packages, configured, without_secrets
from shardwise.monitor.comet import CometTracker
from shardwise.monitor.csv_files import CsvTracker
from shardwise.monitor.wandb import SAMPLES, WandbTracker

CONFIG = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "scheduler": None}
LOSS, NORM = "Train/Samples/train_loss", "Train/Samples/grad_norm"
LOSSES = "Train_Samples_train_loss.csv"


def rows(path: Path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_csv_files_have_the_names_and_headers_of_upstream(tmp_path: Path) -> None:
    tracker = CsvTracker(str(tmp_path), "job")
    tracker.start(CONFIG)
    tracker.log({LOSS: 0.5, NORM: float("inf")}, 4)
    tracker.log({LOSS: 0.25}, 8)
    tracker.flush()
    assert rows(tmp_path / "job" / LOSSES) == [["step", "train_loss"], ["4", "0.5"], ["8", "0.25"]]
    assert rows(tmp_path / "job" / "Train_Samples_grad_norm.csv") == [["step", "grad_norm"], ["4", "inf"]]
    tracker.finish()
    assert json.loads((tmp_path / "job" / "config.json").read_text()) == CONFIG


def test_csv_files_are_continued(tmp_path: Path) -> None:
    for step in (4, 8):
        tracker = CsvTracker(str(tmp_path), "job")
        tracker.start(CONFIG)
        tracker.log({LOSS: 1.0}, step)
        tracker.finish()
    assert rows(tmp_path / "job" / LOSSES) == [["step", "train_loss"], ["4", "1.0"], ["8", "1.0"]]


def test_csv_goes_to_the_working_directory_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tracker,) = configured(Config.load({"train_batch_size": 4, "csv_monitor": {"enabled": True}}))
    tracker.start(CONFIG)
    tracker.finish()
    assert (tmp_path / "DeepSpeedJobName" / "config.json").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"csv_monitor\.output_path: cannot write to .*file"):
        CsvTracker(str(tmp_path / "file"), "job").start(CONFIG)


def test_tensorboard(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    (tracker,) = configured(Config.load({"train_batch_size": 4, "tensorboard": section}))
    tracker.start(CONFIG)
    tracker.log({LOSS: 0.5}, 4)
    tracker.log({LOSS: 0.25, NORM: 2.0}, 8)
    tracker.finish()
    (file,) = (tmp_path / "job").iterdir()
    found: dict[str, list[Any]] = {}
    for event in loader.LegacyEventFileLoader(str(file)).Load():
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value))
    scalars = {tag: [(step, v.simple_value) for step, v in values] for tag, values in found.items()}
    assert scalars[LOSS] == [(4, 0.5), (8, 0.25)] and scalars[NORM] == [(8, 2.0)]
    (text,) = found["config/text_summary"]
    assert '"type": "AdamW"' in text[1].tensor.string_val[0].decode()


class Recording:
    """Stands for a package, its runs and experiments: remembers every call, by name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def called(self, name: str, returns: Any = None) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return returns

        return call

    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]


def fake_wandb(monkeypatch: pytest.MonkeyPatch, *, running: bool = False) -> Recording:
    seen = Recording()
    module: Any = ModuleType("wandb")
    run: Any = ModuleType("run")
    for name in ("log", "define_metric", "finish"):
        setattr(run, name, seen.called(f"Run.{name}"))
    run.config = ModuleType("config")
    run.config.update = seen.called("config.update")
    module.run = run if running else None
    module.init = seen.called("init", run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return seen


def use_wandb() -> None:
    tracker = WandbTracker("project", "group", "team")
    tracker.start(CONFIG)
    tracker.log({LOSS: 0.5}, 4)
    tracker.flush()
    tracker.finish()
    tracker.finish()


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fake_wandb(monkeypatch)
    use_wandb()
    assert seen.calls == [
        ("init", (), {"config": CONFIG, "project": "project", "group": "group", "entity": "team"}),
        ("Run.define_metric", (SAMPLES,), {"hidden": True}),
        ("Run.define_metric", ("Train/Samples/*",), {"step_metric": SAMPLES}),
        ("Run.log", ({LOSS: 0.5, SAMPLES: 4},), {}),
        ("Run.finish", (), {}),
    ]


def test_wandb_joins_a_run_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fake_wandb(monkeypatch, running=True)
    use_wandb()
    assert seen.names() == ["config.update", "Run.define_metric", "Run.define_metric", "Run.log"], "and leaves it open"


def test_wandb_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wandb(monkeypatch)

    def fail(**_kwargs: Any) -> None:
        raise RuntimeError("no API key")

    monkeypatch.setattr(sys.modules["wandb"], "init", fail)
    with pytest.raises(ConfigError, match=r"wandb: the run cannot be started \(RuntimeError: no API key\)"):
        use_wandb()


def fake_comet(monkeypatch: pytest.MonkeyPatch) -> Recording:
    seen = Recording()
    module: Any = ModuleType("comet_ml")
    experiment: Any = ModuleType("experiment")
    for name in ("set_name", "log_parameters", "log_metric", "end"):
        setattr(experiment, name, seen.called(f"CometExperiment.{name}"))
    module.start = seen.called("start", experiment)
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    return seen


def use_comet() -> None:
    tracker = CometTracker(10, "name", api_key="key", project="project", workspace=None, mode="create", online=False)
    tracker.start(CONFIG)
    for step in (4, 8, 12, 16, 20, 24):
        tracker.log({LOSS: step / 4} if step < 24 else {LOSS: 6.0, NORM: 1.0}, step)
    tracker.flush()
    tracker.finish()
    tracker.finish()


def test_comet_logs_every_so_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fake_comet(monkeypatch)
    use_comet()
    flat = {"train_batch_size": 4, "optimizer.type": "AdamW", "optimizer.params.lr": 0.1, "scheduler": None}
    assert seen.calls == [
        ("start", (), {"api_key": "key", "project": "project", "mode": "create", "online": False}),
        ("CometExperiment.set_name", ("name",), {}),
        ("CometExperiment.log_parameters", (flat,), {}),
        ("CometExperiment.log_metric", (LOSS, 1.0), {"step": 4}),
        ("CometExperiment.log_metric", (LOSS, 4.0), {"step": 16}),
        ("CometExperiment.log_metric", (NORM, 1.0), {"step": 24}),
        ("CometExperiment.end", (), {}),
    ]


@pytest.mark.parametrize(
    ("package", "fake", "use"), [("wandb", fake_wandb, use_wandb), ("comet_ml", fake_comet, use_comet)]
)
def test_the_calls_fit_the_real_package(package: str, fake: Any, use: Any) -> None:
    real = pytest.importorskip(package, exc_type=ImportError)
    if package == "wandb":
        assert hasattr(real, "run") and hasattr(importlib.import_module("wandb").Config, "update")
    with pytest.MonkeyPatch.context() as patch:
        seen = fake(patch)
        use()
    for name, args, kwargs in seen.calls:
        owner, _, method = name.rpartition(".")
        holder = getattr(real, owner) if owner else real
        inspect.signature(getattr(holder, method)).bind(*([None] if owner else []), *args, **kwargs)


@pytest.mark.parametrize(
    ("section", "package", "install"),
    [
        ("tensorboard", "tensorboard", "pip install tensorboard"),
        ("wandb", "wandb", "pip install wandb"),
        ("comet", "comet_ml", "pip install 'comet_ml>=3.41.0'"),
    ],
)
def test_a_missing_package(section: str, package: str, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    config = Config.load({"train_batch_size": 4, section: {"enabled": True}})
    with pytest.raises(ConfigError) as error:
        check_packages(config)
    assert f"{section}.enabled: true needs the package `{package}`" in str(error.value)
    assert install in str(error.value)
    check_packages(Config.load({"train_batch_size": 4, section: {"enabled": False}}))


def test_every_section_becomes_its_tracker() -> None:
    sections = ("tensorboard", "csv_monitor", "wandb", "comet")
    on = Config.load({"train_batch_size": 4, **{name: {"enabled": True} for name in sections}})
    assert [tracker.name for tracker in configured(on)] == list(sections)
    off = Config.load({"train_batch_size": 4, **{name: {"enabled": False} for name in sections}})
    assert configured(off) == []


def test_keys_of_services_are_not_recorded() -> None:
    config = Config.load({"train_batch_size": 4, "comet": {"api_key": "geheim"}}).as_dict()
    assert config["comet"]["api_key"] == "geheim"
    assert without_secrets(config)["comet"]["api_key"] == "***" and "geheim" not in str(without_secrets(config))
