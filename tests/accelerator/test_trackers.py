"""Trackers: what they are told, where, and how often."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import ConfigError, ShardwiseError
from shardwise.accelerator.process import Processes
from shardwise.accelerator.trackers import (
    CsvTracker,
    GeneralTracker,
    Tracking,
    on_main_process,
    register_tracker_class,
    registry,
)
from tests.accelerator.fake_services import installed
from tests.monitor.listening import Listening
from tests.ranks import RankPools

CONFIG = {"lr": 0.1, "model": {"layers": [1, 2], "name": "gpt"}, "seed": None, "hub": {"api_key": "s3cret"}}


class Place:
    def __init__(self, is_main_process: bool = True) -> None:
        self.is_main_process = is_main_process


def tracking(log_with: Any, logging_dir: Any = None, main: bool = True) -> Tracking:
    return Tracking(log_with, logging_dir, Place(main))


def rows(path: Path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What shardwise says."""
    with Listening() as said:
        yield said


class Mine:
    """A tracker as upstream's documentation has them: no start, no finish, a constructor of its own."""

    name = "mine"
    requires_logging_directory = False

    def __init__(self, where: str) -> None:
        self.where = where
        self.calls: list[Any] = []

    @property
    def tracker(self) -> str:
        return self.where

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append((values, step, kwargs))


class Derived(GeneralTracker):
    name = "derived"
    requires_logging_directory = True

    def __init__(self, project: str, folder: str, *, color: str = "red") -> None:
        super().__init__()
        self.tracker = (project, folder, color)
        self.calls: list[Any] = []

    def start(self) -> None:
        self.calls.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append((values, step))

    def finish(self) -> None:
        self.calls.append("finish")


# -- which --


def test_names_that_log_with_does_not_know() -> None:
    with pytest.raises(ConfigError, match=r"no tracker 'tensorbord'; did you mean 'tensorboard'\? There are tensorb"):
        tracking("tensorbord", "x")
    for name in ("aim", "clearml", "dvclive", "swanlab"):
        with pytest.raises(ConfigError, match=rf"'{name}' is not supported.*derived from.*GeneralTracker"):
            tracking([name])
    with pytest.raises(ConfigError, match=r"log_with: int is no tracker: it lacks `name`"):
        tracking(3)
    with pytest.raises(ConfigError, match=r"'csv' writes files and needs to know where: give `project_dir`"):
        tracking("csv")


@pytest.mark.parametrize("name", ["wandb", "mlflow", "comet_ml", "comet", "trackio", "tensorboard"])
def test_a_package_that_is_missing_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = "comet_ml" if name == "comet" else name
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    for main in (True, False):
        with pytest.raises(
            ConfigError, match=rf"needs the package `{package}`, which is not installed; run\n.*pip inst"
        ):
            tracking(name, "x", main)


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_service").mkdir()  # as wandb leaves one in the working folder
    monkeypatch.syspath_prepend(tmp_path)
    assert not registry.is_installed("a_service") and registry.is_installed("torch")


def test_all_are_those_that_can_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, heard: list[str]) -> None:
    for name in ("wandb", "comet_ml", "trackio", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    assert tracking("all", tmp_path).names == ["tensorboard", "csv"]
    with pytest.raises(ConfigError, match=r'of "all" there is none that can be used: tensorboard, csv need'):
        tracking("all")
    installed("wandb", monkeypatch)
    mine = Mine("here")
    assert tracking([mine, "all", "csv"], tmp_path).names == ["mine", "tensorboard", "wandb", "csv"]
    assert tracking("all").names == ["wandb"]
    assert heard == ['log_with: "all" is without tensorboard, csv, which need `project_dir`']


class Kind(str, Enum):
    CSV = "csv"


def test_what_log_with_takes(tmp_path: Path) -> None:
    for log_with in (Kind.CSV, "csv", ["csv", "csv"], ("csv",), {"csv"}, CsvTracker):
        assert tracking(log_with, tmp_path).names == ["csv"]
    assert tracking(None).names == [] == tracking([]).names
    both = tracking([Mine("a"), Mine("b")])
    both.init_trackers("p")
    assert [tracker.where for tracker in both.trackers] == ["a", "b"]


# -- trackers of the script's own --


def test_a_tracker_that_the_script_constructed() -> None:
    mine = Mine("here")
    found = tracking(mine)
    found.init_trackers("p", CONFIG)
    found.log({"loss": torch.tensor(0.5)}, step=3, log_kwargs={"mine": {"color": "red"}})
    assert mine.calls == [CONFIG, ({"loss": 0.5}, 3, {"color": "red"})]
    assert found.get_tracker("mine") is mine and found.get_tracker("mine", unwrap=True) == "here"
    with pytest.raises(ConfigError, match="constructed by the script"):
        found.init_trackers("p", init_kwargs={"mine": {"color": "red"}})
    found.end()
    assert found.trackers == []


def test_a_class_or_its_registered_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tracker 'derived'"):
        tracking("derived")
    register_tracker_class(Derived)
    for log_with in ("derived", Derived):
        with pytest.raises(ConfigError, match="'derived' writes files"):
            tracking(log_with)
        found = tracking(log_with, "folder")
        found.init_trackers("p", {"lr": 1}, {"derived": {"color": "blue"}})
        found.log({"x": 1})
        tracker = found.get_tracker("derived")
        found.end()
        assert tracker.tracker == ("p", "folder", "blue")
        assert tracker.calls == ["start", {"lr": 1}, ({"x": 1}, None), "finish"]
        found.init_trackers("another")
        assert found.get_tracker("derived") is not tracker
    with pytest.raises(ConfigError, match=r"derived: cannot be started with init_kwargs \['colour'\] \(TypeError"):
        tracking(Derived, "folder").init_trackers("p", init_kwargs={"derived": {"colour": "blue"}})


def test_what_is_no_tracker_class(heard: list[str]) -> None:
    class NoLog(GeneralTracker):
        name = "no_log"
        requires_logging_directory = False

    with pytest.raises(NotImplementedError, match=r"NoLog is no whole tracker: define `log\(values, step\)`"):
        NoLog()
    with pytest.raises(ConfigError, match=r"the class NoLog lacks `log\(values, step\)`"):
        register_tracker_class(NoLog)
    with pytest.raises(ConfigError, match="give a subclass of GeneralTracker, not"):
        register_tracker_class(Mine)  # type: ignore[arg-type]

    class All(Derived):
        name = "all"

    class Csv(Derived):
        name = "csv"

    with pytest.raises(ConfigError, match="'all' has a meaning"):
        register_tracker_class(All)
    register_tracker_class(Csv)
    assert heard == ["register_tracker_class: Csv takes the place of the tracker 'csv'"]
    found = tracking("csv", "folder")
    found.init_trackers("p")
    assert type(found.get_tracker("csv")) is Csv


def test_the_decorator_of_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    class Decorated:
        main_process_only = True

        @on_main_process
        def say(self, what: str) -> str:
            return what

    assert Decorated().say("x") == "x"
    monkeypatch.setenv("RANK", "1")
    assert Decorated().say("x") is None
    monkeypatch.setattr(Decorated, "main_process_only", False)
    assert Decorated().say("x") == "x"


# -- Tracking --


def test_the_configuration_is_recorded_once(tmp_path: Path) -> None:
    mine, late = Mine("here"), Mine("late")
    found = tracking([mine, late, "csv"], tmp_path)
    found.init_trackers("p")
    found.init_trackers("p", {"lr": torch.tensor(1)})
    found.init_trackers("p", {"lr": 2})
    assert mine.calls == late.calls == [{"lr": 1}] and len(found.trackers) == 3
    assert json.loads((tmp_path / "p" / "config.json").read_text()) == {"lr": 1}
    with pytest.raises(
        ConfigError, match="trackers of the project 'p' are open; call end_training before those of 'q'"
    ):
        found.init_trackers("q", {"lr": 3})
    found.end()
    found.end()
    found.init_trackers("q", {"lr": 3})
    assert mine.calls == [{"lr": 1}, {"lr": 3}]
    found.end()


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    found = tracking("csv", tmp_path)
    with pytest.raises(ConfigError, match=r"init_kwargs: there is no tracker 'wand'; did you mean 'wandb'\?"):
        found.init_trackers("p", init_kwargs={"wand": {}})
    with pytest.raises(ConfigError, match=r"init_kwargs\['csv'\]: give a dictionary of arguments, not str"):
        found.init_trackers("p", init_kwargs={"csv": "x"})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="config: give a dictionary of values by name, not list"):
        found.init_trackers("p", [1])  # type: ignore[arg-type]
    found.init_trackers("p", init_kwargs={"wandb": {"name": "of another run"}, "aim": {}})
    with pytest.raises(ConfigError, match="values: give a dictionary"):
        found.log(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"log_kwargs: there is no tracker 'cvs'"):
        found.log({"a": 1}, log_kwargs={"cvs": {}})
    with pytest.raises(ConfigError, match="takes no arguments, but there are color"):
        found.log({"a": 1}, log_kwargs={"csv": {"color": 1}})
    found.end()


@pytest.mark.parametrize("main", [True, False])
def test_get_tracker(main: bool, tmp_path: Path) -> None:
    found = tracking(["csv"], tmp_path, main)
    with pytest.raises(ConfigError, match="'csv' is not started; call init_trackers before"):
        found.get_tracker("csv")
    found.init_trackers("p")
    with pytest.raises(ConfigError, match="there is no tracker 'wandb'; log_with has csv"):
        found.get_tracker("wandb")
    assert bool(found.get_tracker("csv")) == main
    found.end()


def test_the_blank_tracker_does_nothing_at_all() -> None:
    blank = tracking(None).get_tracker("wandb", unwrap=True)
    blank.run.summary["best"] = 1
    blank.config.update({"a": 1}, allow_val_change=True)
    blank.color = "red"
    with blank.group("x") as group:
        group.add_image("a", 1)
    blank.log({"a": 1}, step=1)
    blank.finish()
    assert not blank and not blank.run
    with pytest.raises(AttributeError):
        blank.__array__()


def test_values_without_trackers_are_said_once(tmp_path: Path, heard: list[str]) -> None:
    for main in (True, False):
        found = tracking("csv", tmp_path, main)
        for _ in range(2):
            found.log({"a": 1})
    tracking(None).log({"a": 1})
    assert heard == ["log: nothing is recorded: csv not started; call init_trackers before"]


def test_one_that_cannot_be_finished_does_not_keep_the_others() -> None:
    class Broken(Mine):
        name = "broken"

        def finish(self) -> None:
            raise OSError("disk is full")

    class Finished(Mine):
        def finish(self) -> None:
            self.calls.append("finish")

    last = Finished("x")
    found = tracking([Broken("x"), last])
    found.init_trackers("p")
    with pytest.raises(ShardwiseError, match=r"broken: could not be finished \(OSError: disk is full\)") as error:
        found.end()
    assert last.calls == ["finish"] and isinstance(error.value.__cause__, OSError)
    found.end()


def test_one_that_cannot_be_started() -> None:
    class Offline(Mine):
        name = "offline"
        tries = 0

        def start(self) -> None:
            self.tries += 1
            if self.tries == 1:
                raise OSError("no network")

    first, second = Mine("x"), Offline("x")
    found = tracking([first, second])
    with pytest.raises(ConfigError, match=r"offline: cannot be started \(OSError: no network\)"):
        found.init_trackers("p", {"lr": 1})
    found.init_trackers("p", {"lr": 1})
    assert len(found.trackers) == 2 and first.calls == second.calls == [{"lr": 1}]


# -- ranks --


class Everywhere(Mine):
    name = "everywhere"
    main_process_only = False


def on_ranks(folder: str) -> Any:
    processes = Processes(cpu=True)
    mine, everywhere = Mine("x"), Everywhere("x")
    found = Tracking([mine, everywhere, "csv"], folder, processes)
    traffic = {op: t.calls for op, t in processes.axis.traffic.items()}
    found.init_trackers("p", {"lr": 1})
    if processes.is_main_process:  # no rank waits for another in it
        found.log({"loss": torch.tensor(0.5)}, step=1)
    found.log({"rank": processes.process_index}, step=2)
    csv_tracker = found.get_tracker("csv")
    csv_tracker.log({"rank": processes.process_index}, step=3)
    names = [tracker.name for tracker in found.trackers]
    found.end()
    assert traffic == {op: t.calls for op, t in processes.axis.traffic.items()}, "there was a collective"
    return names, mine.calls, everywhere.calls


def test_only_the_first_rank_writes(ranks: RankPools, tmp_path: Path) -> None:
    first, second = ranks(2).run(on_ranks, str(tmp_path))
    assert first[0] == ["mine", "everywhere", "csv"] and second[0] == ["everywhere"]
    logged = [{"lr": 1}, ({"loss": 0.5}, 1, {}), ({"rank": 0}, 2, {})]
    assert first[1:] == (logged, logged)
    assert second[1:] == ([], [{"lr": 1}, ({"rank": 1}, 2, {})])
    assert rows(tmp_path / "p" / "metrics.csv") == [
        ["step", "loss", "rank"],
        ["1", "0.5", ""],
        ["2", "", "0"],
        ["3", "", "0"],
    ]
