"""What shardwise says in a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpointing.models import Lines, said


@pytest.fixture
def log() -> Iterator[Lines]:
    with said() as lines:
        yield lines
