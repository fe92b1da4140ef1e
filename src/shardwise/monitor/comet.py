"""`comet`: an experiment of Comet."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.monitor.tracker import leaves


class CometTracker:
    """Logs to an experiment; each name at most once in so many samples.

    Args:
        samples_log_interval: samples between two values of a name.
        experiment_name: shown in Comet.
        options: of ``comet_ml.start``; what is None is left to Comet's own settings.
    """

    name = "comet"

    def __init__(self, samples_log_interval: int, experiment_name: str | None, **options: Any) -> None:
        self._interval = samples_log_interval
        self._title = experiment_name
        self._options = {name: value for name, value in options.items() if value is not None}
        self._experiment: Any = None
        self._last: dict[str, int] = {}

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin, or go on with, the experiment."""
        try:
            comet = importlib.import_module("comet_ml")
            self._experiment = comet.start(**self._options)
            if self._title is not None:
                self._experiment.set_name(self._title)
            self._experiment.log_parameters(dict(leaves(config)))
        except Exception as error:  # of Comet's own kinds: no key, no network
            raise ConfigError(f"comet: the experiment cannot be started ({type(error).__name__}: {error}).") from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        """The values whose turn it is."""
        for name, value in values.items():
            last = self._last.get(name)
            if last is None or step - last >= self._interval:
                self._last[name] = step
                self._experiment.log_metric(name, value, step=step)

    def flush(self) -> None:
        """Nothing: Comet's own thread sends the values."""

    def finish(self) -> None:
        """End the experiment; waits until everything is sent."""
        if self._experiment is not None:
            self._experiment.end()
            self._experiment = None
