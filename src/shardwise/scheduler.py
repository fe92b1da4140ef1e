"""The schedules that `prepare` returns, for scripts that import them from here."""

from shardwise.accelerator.scheduler import AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
