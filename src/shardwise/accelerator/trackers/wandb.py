"""``wandb``: a run of Weights & Biases."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from shardwise.accelerator.trackers.base import PackageTracker
from shardwise.monitor.tracker import without_secrets


class WandBTracker(PackageTracker):
    """Logs to one run, of the first process. Values go to wandb as they are, images and tables too.

    Args:
        run_name: wandb's project.
        kwargs: of ``wandb.init``.
    """

    name = "wandb"
    requires_logging_directory = False
    package = "wandb"
    install = "wandb"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    def start(self) -> None:
        """Begin the run; or go on with one that the script has begun, as ``wandb.init`` does."""
        wandb = importlib.import_module("wandb")
        self.run = wandb.init(**{"project": self.run_name, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """wandb's run."""
        return self.run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Make it the run's config."""
        self.run.config.update(without_secrets(values), allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """One row.

        Args:
            values: by name.
            step: must not be less than in the call before, or wandb drops the row.
            kwargs: of wandb's ``run.log``.
        """
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: Mapping[str, Iterable[Any]], step: int | None = None, **kwargs: Any) -> None:
        """Record lists of images (arrays, tensors or PIL's) by name."""
        wandb = importlib.import_module("wandb")
        for name, images in values.items():
            self.log({name: [wandb.Image(image) for image in images]}, step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a table: ``columns`` and rows of ``data``, or a pandas ``dataframe``."""
        wandb = importlib.import_module("wandb")
        table = wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)

    def finish(self) -> None:
        """End the run."""
        self.run.finish()
