"""The level of the messages."""

from __future__ import annotations

import logging

import pytest

from shardwise.messages import logger, set_level


@pytest.mark.parametrize(("name", "level"), [("debug", logging.DEBUG), ("error", logging.ERROR)])
def test_the_level_is_set_and_put_back(name: str, level: int) -> None:
    before = logger.level
    restore = set_level(name)
    assert logger.level == level
    restore()
    assert logger.level == before


def test_no_level_changes_nothing() -> None:
    before = logger.level
    set_level(None)()
    assert logger.level == before


def test_a_level_that_somebody_set_since_stays() -> None:
    before = logger.level
    restore = set_level("error")
    logger.setLevel(17)
    restore()
    assert logger.level == 17
    logger.setLevel(before)
