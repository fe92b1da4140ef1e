"""How ranks ended, which one of them explains the failure of the job, and how that is said."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    `exit_code` is negative for a signal, as in `subprocess`. `kind`, `time` (seconds since the epoch), `text`
    (a traceback or an exit message) and `consequence` (an error that only says that another rank is gone)
    come from the rank's own report; a rank that could not write one has `kind` "silent" (or "killed") and
    `time` infinity.
    """

    rank: int
    exit_code: int
    kind: str
    time: float = float("inf")
    text: str = ""
    consequence: bool = False


def read_end(rank: int, exit_code: int | None, report: Path) -> RankEnd | None:
    """The end of `rank` from its exit code (None: unknown) and its report; None if neither says anything."""
    if not report.exists():
        if exit_code is None:
            return None
        return RankEnd(rank, exit_code, "killed" if exit_code < 0 else "silent")
    record = json.loads(report.read_text(encoding="utf-8"))
    kind = str(record["kind"])
    if kind == "done" and exit_code and exit_code != -signal.SIGTERM:
        # The script was over, but the interpreter did not come through its shutdown.
        return RankEnd(rank, exit_code, "killed" if exit_code < 0 else "silent")
    return RankEnd(
        rank=rank,
        # The report's, because the launcher may have ended the rank on its way out.
        exit_code=int(record["code"]),
        kind=kind,
        time=float(record["time"]),
        text=str(record["text"]),
        consequence=bool(record.get("consequence", False)),
    )


def root_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank whose end explains the others, or None if none failed.

    The order: an error of the script's own or an exit with a code (the earliest), a signal, a silent exit, a
    lost connection (the earliest), and last SIGTERM, because that is how the launcher ends the other ranks.
    """
    failed = [end for end in ends if end.kind != "done"]
    return min(failed, key=lambda end: (_class(end), end.time, end.rank), default=None)


def _class(end: RankEnd) -> int:
    if end.kind in ("exception", "exit"):
        return 3 if end.consequence else 0
    if end.kind == "killed":
        return 4 if end.exit_code == -signal.SIGTERM else 1
    return 2


def describe(end: RankEnd, ends: Sequence[RankEnd], nodes: int = 1) -> str:
    """What to print last: who failed and how, then its traceback. Ends with a newline."""
    if end.kind == "killed":
        name = _signal_name(-end.exit_code)
        hint = " (possibly out of memory)" if name == "SIGKILL" else ""
        return f"rank {end.rank} was killed by {name}{hint}\n"
    if not end.text:
        why = "" if end.kind == "exit" else ", without a traceback"
        return f"rank {end.rank} failed (exit code {end.exit_code}{why})\n"
    head = f"rank {end.rank} failed (exit code {end.exit_code}):\n"
    if end.consequence:
        gone = ", ".join(str(other.rank) for other in ends if other.kind == "done")
        if gone:
            head = f"rank {end.rank} lost its peer: rank {gone} had already ended without an error\n{head}"
        elif nodes > 1:
            head = f"rank {end.rank} lost its peer: the cause is probably on another host\n{head}"
    return head + end.text


def shell_code(exit_code: int) -> int:
    """An exit code as a shell reports it: 128 + n for signal n."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
