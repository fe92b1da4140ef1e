"""Trackers: where ``Accelerator.log`` sends a run's values."""

from shardwise.accelerator.trackers.base import BlankTracker, GeneralTracker, on_main_process
from shardwise.accelerator.trackers.comet_ml import CometMLTracker
from shardwise.accelerator.trackers.csv_file import CsvTracker
from shardwise.accelerator.trackers.mlflow import MLflowTracker
from shardwise.accelerator.trackers.registry import register_tracker_class
from shardwise.accelerator.trackers.tensorboard import TensorBoardTracker
from shardwise.accelerator.trackers.tracking import Tracking
from shardwise.accelerator.trackers.trackio import TrackioTracker
from shardwise.accelerator.trackers.wandb import WandBTracker

__all__ = [
    "BlankTracker",
    "CometMLTracker",
    "CsvTracker",
    "GeneralTracker",
    "MLflowTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "Tracking",
    "WandBTracker",
    "on_main_process",
    "register_tracker_class",
]
