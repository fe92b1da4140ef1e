"""``mlflow``: a run of an MLflow experiment."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from typing import Any

from shardwise.accelerator.trackers.base import PackageTracker
from shardwise.accelerator.trackers.values import Skipped, flat, parameters
from shardwise.errors import ConfigError
from shardwise.messages import logger
from shardwise.monitor.tracker import without_secrets

# Where the parameters are written whole that are longer than MLflow allows.
LONG_PARAMETERS = "long_parameters.json"
TRUE, FALSE = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f", "")


class MLflowTracker(PackageTracker):
    """Logs to the active run of MLflow, which it begins.

    The variables ``MLFLOW_EXPERIMENT_NAME``, ``MLFLOW_RUN_ID``, ``MLFLOW_TAGS`` (JSON) and ``MLFLOW_NESTED_RUN`` are
    heeded before the arguments; where the server is says ``MLFLOW_TRACKING_URI``.

    Args:
        experiment_name: the project's name. The experiment is made if there is none.
        logging_dir: where a new experiment keeps its artifacts.
        run_id: of a run to go on with.
        tags: of the run, and of a new experiment; a dictionary, or JSON.
        nested_run: whether the run is part of the one that is active.
        run_name: shown in MLflow.
        description: of the run.

    Raises:
        ConfigError: tags or ``MLFLOW_NESTED_RUN`` cannot be read.
    """

    name = "mlflow"
    requires_logging_directory = False
    package = "mlflow"
    install = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        self.experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = os.environ.get("MLFLOW_RUN_ID", run_id)
        self.tags = _tags(os.environ.get("MLFLOW_TAGS", tags))
        self.nested_run = _flag(os.environ.get("MLFLOW_NESTED_RUN", nested_run))
        self.run_name = run_name
        self.description = description
        self.active_run: Any = None
        self._skipped = Skipped(self.name, "numbers and dictionaries of them")

    def start(self) -> None:
        """Begin, or go on with, the run."""
        mlflow = importlib.import_module("mlflow")
        name = "Default" if self.experiment_name is None else self.experiment_name
        known = mlflow.get_experiment_by_name(name)
        if known is not None:
            experiment = known.experiment_id
        else:
            where = None if self.logging_dir is None else os.fspath(self.logging_dir)
            experiment = mlflow.create_experiment(name, artifact_location=where, tags=self.tags)
        self.active_run = mlflow.start_run(
            run_id=self.run_id,
            experiment_id=experiment,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    @property
    def tracker(self) -> Any:
        """MLflow's run."""
        return self.active_run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record parameters, nested names as ``outer/inner``.

        Of a value that is longer than MLflow allows the parameter has the beginning; whole it is in an artifact.
        """
        mlflow = importlib.import_module("mlflow")
        limits = importlib.import_module("mlflow.utils.validation")
        longest, together = limits.MAX_PARAM_VAL_LENGTH, limits.MAX_PARAMS_TAGS_PER_BATCH
        params = {name: str(value) for name, value in parameters(without_secrets(values)).items()}
        too_long = {name: text for name, text in params.items() if len(text) > longest}
        params.update((name, text[: longest - 3] + "...") for name, text in too_long.items())
        names = list(params)
        for i in range(0, len(names), together):
            mlflow.log_params({name: params[name] for name in names[i : i + together]})
        if too_long:
            logger.warning(
                "mlflow: a parameter has at most %d characters; cut off were %s, which the artifact %s has whole",
                longest,
                ", ".join(too_long),
                LONG_PARAMETERS,
            )
            mlflow.log_dict(too_long, LONG_PARAMETERS)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers, in one request; nested names as ``outer/inner``.

        Args:
            values: by name.
            step: of the values.
            kwargs: of ``mlflow.log_metrics``.
        """
        metrics = {}
        for name, value in flat(values):
            if isinstance(value, int | float):
                metrics[name] = float(value)
            else:
                self._skipped.say(name, value)
        importlib.import_module("mlflow").log_metrics(metrics, step=step, **kwargs)

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Record a figure of matplotlib or plotly as the artifact ``artifact_file``."""
        importlib.import_module("mlflow").log_figure(figure, artifact_file, **save_kwargs)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Record the files of a folder, in the folder ``artifact_path`` of the run."""
        importlib.import_module("mlflow").log_artifacts(local_dir, artifact_path)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Record a file, in the folder ``artifact_path`` of the run."""
        importlib.import_module("mlflow").log_artifact(local_path, artifact_path)

    def finish(self) -> None:
        """End the run."""
        importlib.import_module("mlflow").end_run()


def _tags(given: dict[str, Any] | str | None) -> dict[str, Any] | None:
    if not isinstance(given, str):
        return given
    try:
        found = json.loads(given)
    except json.JSONDecodeError as error:
        raise ConfigError(f"mlflow tags (MLFLOW_TAGS): this is no JSON: {given!r} ({error}).") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"mlflow tags (MLFLOW_TAGS): give a JSON object of texts, not {given!r}.")
    return dict(found)


def _flag(given: bool | str) -> bool:
    if isinstance(given, bool):
        return given
    if given.lower() not in TRUE + FALSE:
        raise ConfigError(f"mlflow nested_run (MLFLOW_NESTED_RUN): give true or false, not {given!r}.")
    return given.lower() in TRUE
