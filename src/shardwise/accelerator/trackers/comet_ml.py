"""``comet_ml``: an experiment of Comet."""

from __future__ import annotations

import importlib
from typing import Any

from shardwise.accelerator.trackers.base import PackageTracker
from shardwise.accelerator.trackers.values import Skipped, flat, parameters
from shardwise.errors import ConfigError
from shardwise.monitor.tracker import without_secrets


class CometMLTracker(PackageTracker):
    """Logs to an experiment. Keys are in Comet's own settings.

    Args:
        run_name: Comet's project.
        kwargs: of ``comet_ml.start``.
    """

    name = "comet_ml"
    requires_logging_directory = False
    package = "comet_ml"
    install = "'comet_ml>=3.41.0'"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.writer: Any = None
        self._skipped = Skipped(self.name, "numbers, texts and dictionaries of them")

    def start(self) -> None:
        """Begin, or go on with, the experiment.

        Raises:
            ConfigError: the package is too old.
        """
        comet = importlib.import_module("comet_ml")
        if not hasattr(comet, "start"):
            raise ConfigError(f"log_with: this comet_ml has no `start`; run\n    pip install -U {self.install}")
        self.writer = comet.start(**{"project_name": self.run_name, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """Comet's experiment."""
        return self.writer

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record parameters, nested names as ``outer/inner``."""
        self.writer.log_parameters(parameters(without_secrets(values)))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers by ``log_metric``, texts by ``log_other``; nested names as ``outer/inner``.

        Args:
            values: by name.
            step: of the values, and of what Comet records by itself after them.
            kwargs: of these methods.
        """
        if step is not None:
            self.writer.set_step(step)
        for name, value in flat(values):
            if isinstance(value, int | float):
                self.writer.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            else:
                self._skipped.say(name, value)

    def finish(self) -> None:
        """End the experiment; waits until everything is sent."""
        self.writer.end()
