"""What a run tells besides its result: values for trackers, memory, communication, the engine's state."""

from shardwise.monitor.build import check_packages, configured
from shardwise.monitor.comms import CommLog
from shardwise.monitor.memory import MemoryNotes
from shardwise.monitor.recorder import Entry, Recorder
from shardwise.monitor.state import describe
from shardwise.monitor.tracker import Tracker, without_secrets

__all__ = [
    "CommLog",
    "Entry",
    "MemoryNotes",
    "Recorder",
    "Tracker",
    "check_packages",
    "configured",
    "describe",
    "without_secrets",
]
