"""Which rank explains a failed job, and how it is said."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from shardwise.cli.failures import RankEnd, describe, read_end, root_failure, shell_code

OWN = RankEnd(1, 1, "exception", 20.0, "Traceback\nValueError: own\n")
TABLE = RankEnd(0, 1, "exception", 21.0, "Traceback\nValueError: later\n")
LOST = RankEnd(2, 1, "exception", 10.0, "Traceback\nRuntimeError: closed\n", consequence=True)
KILLED = RankEnd(3, -signal.SIGKILL, "killed")
ENDED_BY_US = RankEnd(4, -signal.SIGTERM, "killed")
DONE = RankEnd(5, 0, "done", 5.0)


def test_an_own_error_comes_before_its_consequences() -> None:
    everything = [TABLE, LOST, DONE, ENDED_BY_US, KILLED, OWN]
    assert root_failure(everything) == OWN
    assert root_failure([LOST, ENDED_BY_US, KILLED]) == KILLED
    assert root_failure([LOST, ENDED_BY_US, DONE]) == LOST
    assert root_failure([ENDED_BY_US, DONE]) == ENDED_BY_US
    assert root_failure([DONE]) is None


def test_what_is_said() -> None:
    assert describe(OWN, [OWN]) == "rank 1 failed (exit code 1):\nTraceback\nValueError: own\n"
    assert describe(KILLED, [KILLED]) == "rank 3 was killed by SIGKILL (possibly out of memory)\n"
    assert describe(RankEnd(0, -11, "killed"), []) == "rank 0 was killed by SIGSEGV\n"
    assert describe(RankEnd(0, 7, "exit", 1.0), []) == "rank 0 failed (exit code 7)\n"
    assert describe(RankEnd(0, 9, "silent"), []) == "rank 0 failed (exit code 9, without a traceback)\n"


def test_a_lost_connection_points_to_where_the_cause_may_be() -> None:
    assert describe(LOST, [LOST, DONE]).startswith("rank 2 lost its peer: rank 5 had already ended without an error\n")
    assert describe(LOST, [LOST], nodes=2).startswith("rank 2 lost its peer: the cause is probably on another host\n")
    assert describe(LOST, [LOST]).startswith("rank 2 failed (exit code 1):\n")


def test_a_report_says_more_than_the_exit_code(tmp_path: Path) -> None:
    report = tmp_path / "0.json"
    assert read_end(0, None, report) is None
    assert read_end(0, -9, report) == RankEnd(0, -9, "killed")
    assert read_end(0, 3, report) == RankEnd(0, 3, "silent")
    report.write_text(json.dumps({"time": 2.0, "kind": "exception", "code": 1, "text": "T", "consequence": False}))
    # Ended by the launcher while it was leaving: what it reported is still what happened.
    assert read_end(0, -signal.SIGTERM, report) == RankEnd(0, 1, "exception", 2.0, "T")
    report.write_text(json.dumps({"time": 2.0, "kind": "done", "code": 0, "text": ""}))
    assert read_end(0, -signal.SIGTERM, report) == RankEnd(0, 0, "done", 2.0)
    assert read_end(0, -signal.SIGSEGV, report) == RankEnd(0, -11, "killed")


def test_codes_as_a_shell_gives_them() -> None:
    assert [shell_code(0), shell_code(7), shell_code(-signal.SIGKILL)] == [0, 7, 137]
