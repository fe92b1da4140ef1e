"""Launchers for notebooks and tests, for scripts that import them from here."""

from shardwise.accelerator.launchers import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
