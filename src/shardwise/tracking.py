"""Trackers, for scripts that import them from here."""

from shardwise.accelerator.trackers import (
    CometMLTracker,
    CsvTracker,
    GeneralTracker,
    MLflowTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
    on_main_process,
    register_tracker_class,
)

__all__ = [
    "CometMLTracker",
    "CsvTracker",
    "GeneralTracker",
    "MLflowTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "on_main_process",
    "register_tracker_class",
]
