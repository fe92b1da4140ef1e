"""get_logger: who speaks, in what order, and from where."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from shardwise import ConfigError
from shardwise.accelerator.current import forget
from shardwise.accelerator.logger import MultiProcessAdapter, get_logger, rank_now
from shardwise.accelerator.process import Processes
from tests.ranks import RankPools

NAME = "tests.accelerator.of_a_script"


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    logging.getLogger(NAME).setLevel(logging.INFO)
    yield
    logging.getLogger(NAME).setLevel(logging.NOTSET)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith(NAME)]


def test_it_speaks_before_there_is_an_accelerator(caplog: pytest.LogCaptureFixture) -> None:
    log = get_logger(NAME)
    log.info("loss %.1f", 0.5)
    log.info("all of %d", 1, main_process_only=False)
    log.info("in turn", in_order=True)
    log.debug("nobody asked")
    assert said(caplog) == ["loss 0.5", "all of 1", "in turn"]


def test_torchruns_variables_say_which_rank_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = get_logger(NAME)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    log.warning("not here")
    log.warning("here %s", "too", main_process_only=False)
    log.warning("without a group nobody is waited for", in_order=True)
    assert rank_now() == (1, 2)
    assert said(caplog) == ["[RANK 1] here too", "[RANK 1] without a group nobody is waited for"]
    monkeypatch.setenv("RANK", "0")
    log.warning("first")
    assert said(caplog)[-1] == "first"


def test_a_message_comes_from_where_it_was_said(caplog: pytest.LogCaptureFixture) -> None:
    log = get_logger(NAME)
    log.warning("a", extra={"run": 7})
    log.log(logging.WARNING, "b")
    log.warning_once("c")
    log.info("d", in_order=True)
    if sys.version_info >= (3, 11):  # before, no adapter's caller could be told so: logging counted its own frames
        indirectly(log)
    try:
        raise KeyError("e")
    except KeyError:
        log.exception("e")
    records = [record for record in caplog.records if record.name == NAME]
    here = "test_a_message_comes_from_where_it_was_said"
    assert len(records) >= 5
    assert {(r.funcName, r.filename) for r in records} == {(here, "test_logger.py")}
    assert records[0].__dict__["run"] == 7 and records[-1].exc_info is not None


def indirectly(log: MultiProcessAdapter) -> None:
    log.warning("for my caller", stacklevel=2)


def test_once_is_once_for_each_logger(caplog: pytest.LogCaptureFixture) -> None:
    one, other = get_logger(NAME), get_logger(NAME + ".other")
    for _ in range(2):
        for log in (one, other):
            log.warning_once("slow")
            log.warning_once("of %s", ["a list"])
        one.warning_once("of %s", ["another"])
    assert said(caplog) == ["slow", "of ['a list']", "slow", "of ['a list']", "of ['another']"]


def test_levels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    root = logging.getLogger().level
    assert get_logger(NAME, "debug").isEnabledFor(logging.DEBUG)
    assert not get_logger(NAME, logging.ERROR).isEnabledFor(logging.WARNING)
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "WARNING")
    assert get_logger(NAME).logger.level == logging.WARNING
    assert get_logger(NAME, log_level="INFO").logger.level == logging.INFO
    assert logging.getLogger().level == root
    with pytest.raises(ConfigError, match=r"log_level: there is no level 'debgu'; did you mean 'debug'\?"):
        get_logger(NAME, "debgu")
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match=r"ACCELERATE_LOG_LEVEL: there is no level 'loud'"):
        get_logger(NAME)


class ToFile(logging.Handler):
    """Adds to a file that all ranks add to."""

    def emit(self, record: logging.LogRecord) -> None:
        with open("said", "a") as file:
            file.write(record.getMessage() + "\n")


class Counted:
    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.waits = 0

    @property
    def process_index(self) -> int:
        return self.processes.process_index

    @property
    def num_processes(self) -> int:
        return self.processes.num_processes

    def wait_for_everyone(self) -> None:
        self.waits += 1
        self.processes.wait_for_everyone()


def on_ranks() -> Any:
    processes = Processes(cpu=True)
    plain = logging.getLogger(NAME + ".ranks")
    handler = ToFile()
    plain.addHandler(handler)
    counted = Counted(processes)
    log = get_logger(plain.name, "info", processes=counted)
    try:
        for i in range(3):
            log.info("turn %d of %d", i, processes.process_index, in_order=True)
        alone = counted.waits
        log.info("main")
        log.info("anyone", main_process_only=False)
        assert counted.waits == alone, "no collective unless in order"
        processes.wait_for_everyone()
        plain.setLevel(logging.INFO if processes.process_index == 0 else logging.ERROR)
        log.info("levels differ", in_order=True)
        get_logger(plain.name).error("by the program's processes", in_order=True)
        with open("said") as file:
            return file.read().splitlines()
    finally:
        forget()
        processes.wait_for_everyone()
        if processes.is_main_process:
            os.remove("said")
        plain.removeHandler(handler)
        plain.setLevel(logging.NOTSET)


def test_two_ranks_speak_in_order(ranks: RankPools) -> None:
    first, second = ranks(2).run(on_ranks)
    assert first == second
    assert first[:6] == [f"[RANK {rank}] turn {i} of {rank}" for i in range(3) for rank in range(2)]
    assert sorted(first[6:9]) == ["[RANK 0] anyone", "[RANK 1] anyone", "main"]
    assert first[9] == "[RANK 0] levels differ"
    assert first[10:] == [f"[RANK {rank}] by the program's processes" for rank in range(2)]
