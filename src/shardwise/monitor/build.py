"""The trackers that a configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.monitor.comet import CometTracker
from shardwise.monitor.csv_files import CsvTracker
from shardwise.monitor.tensorboard import TensorBoardTracker
from shardwise.monitor.tracker import Tracker, require
from shardwise.monitor.wandb import WandbTracker

if TYPE_CHECKING:
    from shardwise.config import Config

# Section, module, what to give pip.
PACKAGES = (
    ("tensorboard", "tensorboard", "tensorboard"),
    ("wandb", "wandb", "wandb"),
    ("comet", "comet_ml", "'comet_ml>=3.41.0'"),
)


def check_packages(config: Config) -> None:
    """Refuse what cannot be tracked. Every rank asks, so that all of them stop alike.

    Raises:
        ConfigError: a section is enabled and its package is missing.
    """
    for section, package, install in PACKAGES:
        if getattr(config, section).enabled:
            require(section, package, install)


def configured(config: Config) -> list[Tracker]:
    """The trackers of the enabled sections, not started."""
    found: list[Tracker] = []
    if config.tensorboard.enabled:
        found.append(TensorBoardTracker(config.tensorboard.output_path, config.tensorboard.job_name))
    if config.csv_monitor.enabled:
        found.append(CsvTracker(config.csv_monitor.output_path, config.csv_monitor.job_name))
    if config.wandb.enabled:
        found.append(WandbTracker(config.wandb.project, config.wandb.group, config.wandb.team))
    if config.comet.enabled:
        comet = config.comet
        found.append(
            CometTracker(
                comet.samples_log_interval,
                comet.experiment_name,
                api_key=comet.api_key,
                project=comet.project,
                workspace=comet.workspace,
                experiment_key=comet.experiment_key,
                mode=comet.mode,
                online=comet.online,
            )
        )
    return found
