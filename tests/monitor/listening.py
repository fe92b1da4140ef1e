"""Hears what shardwise says."""

from __future__ import annotations

import logging
from typing import Any


class Listening(logging.Handler):
    """``with Listening() as said``: a list of the messages that shardwise's logger lets through."""

    def __enter__(self) -> list[str]:
        self._said: list[str] = []
        self._logger = logging.getLogger("shardwise")
        self._before = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self._said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())

    def __exit__(self, *_error: Any) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._before)
