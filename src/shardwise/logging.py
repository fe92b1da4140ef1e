"""`get_logger`, for scripts that import it from here."""

from shardwise.accelerator.logger import MultiProcessAdapter, get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]
