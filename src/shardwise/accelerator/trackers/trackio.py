"""``trackio``: a run in a local dashboard, or in one on a Space."""

from __future__ import annotations

import importlib
from typing import Any

from shardwise.accelerator.trackers.base import PackageTracker
from shardwise.accelerator.trackers.values import flat
from shardwise.monitor.tracker import without_secrets


class TrackioTracker(PackageTracker):
    """Logs to one run, of the first process.

    Args:
        run_name: trackio's project.
        kwargs: of ``trackio.init``.
    """

    name = "trackio"
    requires_logging_directory = False
    package = "trackio"
    install = "trackio"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    def start(self) -> None:
        """Begin the run."""
        trackio = importlib.import_module("trackio")
        self.run = trackio.init(**{"project": self.run_name, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """trackio's run."""
        return self.run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Make it the run's config, which trackio writes with the first values."""
        self.run.config.update(without_secrets(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """One row; nested names as ``outer/inner``.

        Args:
            values: by name.
            step: of the row; by default one more than in the call before.
            kwargs: of trackio's ``run.log``.
        """
        self.run.log(dict(flat(values)), step=step, **kwargs)

    def finish(self) -> None:
        """End the run; waits until everything is written."""
        self.run.finish()
