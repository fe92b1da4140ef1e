"""`wandb`: a run of Weights & Biases."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from shardwise.errors import ConfigError

# The x axis is a value of its own. Given as wandb's step, rows that arrive after the script's own calls of
# `wandb.log` would be dropped, because that step may only grow.
SAMPLES = "Train/global_samples"


class WandbTracker:
    """Logs to a run of its own, or to the one that the script has started already (which it then leaves open).

    Args:
        project, group, team: as in the section; the team is wandb's entity.
    """

    name = "wandb"

    def __init__(self, project: str, group: str | None, team: str | None) -> None:
        self._where = {"project": project, "group": group, "entity": team}
        self._run: Any = None
        self._own = False

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin the run."""
        try:
            wandb = importlib.import_module("wandb")
            self._own = wandb.run is None
            if self._own:
                self._run = wandb.init(config=dict(config), **self._where)
            else:
                self._run = wandb.run
                self._run.config.update(dict(config), allow_val_change=True)
            self._run.define_metric(SAMPLES, hidden=True)
            self._run.define_metric("Train/Samples/*", step_metric=SAMPLES)
        except Exception as error:  # of wandb's own kinds: no login, no network
            raise ConfigError(f"wandb: the run cannot be started ({type(error).__name__}: {error}).") from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One row."""
        self._run.log({**values, SAMPLES: step})

    def flush(self) -> None:
        """Nothing: wandb's own process has the rows already."""

    def finish(self) -> None:
        """End the run, if it is this tracker's own."""
        if self._own and self._run is not None:
            self._run.finish()
        self._run = None
