"""Where shardwise says things: one logger, shown on stderr unless the program decides otherwise."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("shardwise")


def show_messages() -> None:
    """Print shardwise's messages on stderr, unless the program has set up logging for them itself."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[shardwise] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
