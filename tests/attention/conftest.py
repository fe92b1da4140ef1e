"""What the tests of the package share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def warnings_only() -> Iterator[None]:
    """An engine of an earlier test leaves the logger at INFO; what is counted here are warnings, unless a test says."""
    logger = logging.getLogger("shardwise")
    before = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(before)
