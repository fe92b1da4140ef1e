"""What shardwise says in a test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.checkpointing.models import Lines


@pytest.fixture
def log() -> Iterator[Lines]:
    lines, logger = Lines(), logging.getLogger("shardwise")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    yield lines
    logger.removeHandler(lines)
    logger.setLevel(level)
