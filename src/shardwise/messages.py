"""Where shardwise says things: one logger, shown on stderr unless the program decides otherwise."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

logger = logging.getLogger("shardwise")

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def show_messages() -> None:
    """Print shardwise's messages on stderr, unless the program has set up logging for them itself."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[shardwise] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def set_level(name: str | None) -> Callable[[], None]:
    """Say only what is at least so important (``log_level``).

    Args:
        name: ``debug``, ``info``, ``warning``, ``error`` or ``critical``; None changes nothing.

    Returns:
        Puts the level back that was there, unless somebody has set another since.
    """
    if name is None:
        return lambda: None
    before, level = logger.level, LEVELS[name]
    logger.setLevel(level)

    def restore() -> None:
        if logger.level == level:
            logger.setLevel(before)

    return restore
