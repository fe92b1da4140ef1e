"""Stand-ins for the packages of services: modules that note what they are told."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Noted:
    """An object whose every method notes its call."""

    def __init__(self, calls: list[Call], prefix: str = "") -> None:
        self._calls = calls
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self._prefix}{name}"

        def call(*args: Any, **kwargs: Any) -> None:
            self._calls.append((full, args, kwargs))

        return call


class Config(dict[str, Any]):
    """wandb's: its ``update`` has an argument more than a dictionary's."""

    def update(self, values: dict[str, Any], allow_val_change: bool | None = None) -> None:  # type: ignore[override]
        super().update(values)


def installed(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Make ``import name`` find a stand-in.

    Returns:
        The calls that it gets, as they come.
    """
    calls: list[Call] = []
    module: Any = ModuleType(name)
    run: Any = Noted(calls, "run.")

    def begin(*args: Any, **kwargs: Any) -> Any:
        calls.append(("begin", args, kwargs))
        return run

    if name in ("wandb", "trackio"):
        run.config = Config() if name == "wandb" else {}
        module.init = begin
        module.Image = lambda image: f"image of {image}"
        module.Table = lambda **kwargs: kwargs
    elif name == "comet_ml":
        module.start = begin
    elif name == "mlflow":
        noted = Noted(calls)
        experiments = {"known": SimpleNamespace(experiment_id="7")}
        module.get_experiment_by_name = experiments.get
        module.create_experiment = lambda name, **kwargs: begin("experiment", name, **kwargs) and "8"
        module.start_run = begin
        for function in ("log_params", "log_metrics", "log_dict", "log_figure", "log_artifact", "log_artifacts"):
            setattr(module, function, getattr(noted, function))
        module.end_run = noted.end_run
        validation: Any = ModuleType("mlflow.utils.validation")
        validation.MAX_PARAM_VAL_LENGTH, validation.MAX_PARAMS_TAGS_PER_BATCH = 10, 2
        monkeypatch.setitem(sys.modules, "mlflow.utils", ModuleType("mlflow.utils"))
        monkeypatch.setitem(sys.modules, "mlflow.utils.validation", validation)
    module.run = run
    monkeypatch.setitem(sys.modules, name, module)
    return calls
