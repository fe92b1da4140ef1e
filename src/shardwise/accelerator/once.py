"""Saying a thing once, on the first process."""

from __future__ import annotations

import warnings

from shardwise.messages import logger


class Once:
    """Remembers what it has said.

    Args:
        says: whether this process speaks.
    """

    def __init__(self, says: bool) -> None:
        self._says = says
        self._said: set[str] = set()

    def warn(self, message: str) -> None:
        """Warn, the first time."""
        if self._first(message):
            warnings.warn(message, stacklevel=3)

    def info(self, message: str) -> None:
        """Log, the first time."""
        if self._first(message):
            logger.info(message)

    def _first(self, message: str) -> bool:
        if message in self._said:
            return False
        self._said.add(message)
        return self._says
