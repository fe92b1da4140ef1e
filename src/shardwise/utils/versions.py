"""As in :mod:`shardwise.utils`, for scripts that import from this module."""

from shardwise.utils import __getattr__

__all__ = ["__getattr__"]
