"""Processes that call a function as ranks, watched until all have ended."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import torch

from shardwise.accelerator import current
from shardwise.errors import ShardwiseError

# After the first failure: the others may hold the cause, and what they do when their peer is gone is not it.
_SECONDS_TO_TELL = 1.0
_SECONDS_TO_END = 5.0


class RankFailed(ShardwiseError, RuntimeError):
    """A rank that was started here raised an exception or died. The message ends with its traceback.

    Attributes:
        rank: which one.
        kind: the name of the exception's class; for a signal its name, for an exit "SystemExit".
    """

    def __init__(self, message: str, rank: int, kind: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind


@dataclass
class _Rank:
    number: int
    process: Any
    reports: connection.Connection
    time: float = float("inf")
    kind: str = ""
    text: str = ""
    code: int = 0
    heard: bool = False

    def listen(self) -> None:
        """Take the rank's report, if it has sent one; it has none to send once it has ended."""
        try:
            if not self.heard and self.reports.poll():
                self.heard = True
                self.time, self.kind, self.text = self.reports.recv()
        except EOFError:
            return


def run_ranks(
    function: Callable[..., Any], args: tuple[Any, ...], environments: Sequence[Mapping[str, str]], method: str
) -> None:
    """Call ``function(*args)`` in one process for each environment, and wait for all; none is left behind.

    Args:
        function: what to call.
        args: its arguments.
        environments: the variables of each rank, with its ``RANK``.
        method: ``"fork"`` or ``"spawn"``.

    Raises:
        RankFailed: a rank raised an exception or died: the one that explains the others. They are ended first.
    """
    context: Any = mp.get_context(method)
    ranks: list[_Rank] = []
    try:
        for environment in environments:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(function, args, dict(environment), sender, method == "fork"))
            ranks.append(_Rank(int(environment["RANK"]), process, receiver))
            with warnings.catch_warnings():
                # Python 3.12 warns of any fork beside threads; the store's is not needed in the ranks.
                warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
                process.start()
            sender.close()
        failed = _wait(ranks)
    finally:
        _end(ranks)
    if failed is not None:
        raise _error(failed)


def _wait(ranks: Sequence[_Rank]) -> _Rank | None:
    """Wait until all have ended well, or one has not; return the one that explains the failure."""
    running, until = list(ranks), float("inf")
    while running and (left := until - time.monotonic()) > 0:
        # Reports are waited for too: a long one does not fit in the pipe, and its rank ends when it is taken.
        sources = [rank.process.sentinel for rank in running] + [r.reports for r in running if not r.heard]
        connection.wait(sources, timeout=None if left == float("inf") else left)
        for rank in running:
            rank.listen()
        running = [rank for rank in running if rank.process.is_alive()]
        if until == float("inf") and any(rank.process.exitcode for rank in ranks):
            until = time.monotonic() + _SECONDS_TO_TELL
    for rank in ranks:
        rank.listen()
    if until == float("inf"):
        return None
    ended = [rank for rank in ranks if rank.process.exitcode]
    for rank in ended:
        rank.code = rank.process.exitcode
    # A rank that a signal took could not report, and what the others report then follows from it.
    return min(ended, key=lambda rank: (rank.code > 0, rank.time, rank.number))


def _end(ranks: Sequence[_Rank]) -> None:
    started = [rank.process for rank in ranks if rank.process.pid is not None]
    for process in started:
        if process.is_alive():
            process.terminate()
    until = time.monotonic() + _SECONDS_TO_END
    for process in started:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
    for rank in ranks:
        rank.reports.close()


def _error(rank: _Rank) -> RankFailed:
    code = rank.code
    if rank.kind:
        return RankFailed(f"rank {rank.number} failed:\n{rank.text.rstrip()}", rank.number, rank.kind)
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (possibly out of memory)" if name == "SIGKILL" else ""
        return RankFailed(f"rank {rank.number} was killed by {name}{hint}", rank.number, name)
    return RankFailed(f"rank {rank.number} ended with exit code {code}", rank.number, "SystemExit")


def _rank(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environment: Mapping[str, str],
    reports: connection.Connection,
    forked: bool,
) -> None:
    """What a rank runs."""
    os.environ.update(environment)
    if "OMP_NUM_THREADS" not in os.environ:
        # The threads of OpenMP do not survive a fork, and waiting for them would never end.
        cores = os.cpu_count() or 1
        torch.set_num_threads(1 if forked else max(1, cores // int(environment.get("LOCAL_WORLD_SIZE", "1"))))
    current.forget()  # What a fork brought along belongs to the process that it came from.
    try:
        function(*args)
    except SystemExit:
        raise
    except BaseException as error:
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception(type(error), error, frames))
        reports.send((time.time(), type(error).__name__, text))
        sys.stdout.flush()
        sys.exit(1)
