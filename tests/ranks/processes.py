"""A set of rank processes: start, run one function on all of them, look at their stacks, end them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil

from tests.ranks import wire
from tests.ranks.errors import RankError
from tests.ranks.leaks import POOL_PREFIX
from tests.ranks.worker import Checked, Report, Setting, main

START_TIMEOUT = 120.0
CHECK_TIMEOUT = 15.0


@dataclass
class Outcome:
    """What each rank did: reported, died (exit code) or was still running (its stacks)."""

    reports: dict[int, Report] = field(default_factory=dict)
    dead: dict[int, int | None] = field(default_factory=dict)
    running: dict[int, str] = field(default_factory=dict)


class Processes:
    """``world_size`` processes forked from a server that has imported torch once."""

    def __init__(self, world_size: int, group: bool, folder: Path) -> None:
        self.world_size = world_size
        folder = Path(tempfile.mkdtemp(prefix=f"{world_size}-", dir=folder))
        self.cwd = folder / "cwd"
        self.cwd.mkdir()
        self._outputs = [folder / f"output-{rank}.txt" for rank in range(world_size)]
        self._stacks = [folder / f"stacks-{rank}.txt" for rank in range(world_size)]
        self._read = [0] * world_size
        self._conns: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "psutil"])
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            setting = Setting(
                rank=rank,
                world_size=world_size,
                group=group and world_size > 1,
                cwd=str(self.cwd),
                output=str(self._outputs[rank]),
                stacks=str(self._stacks[rank]),
            )
            process = context.Process(target=main, args=(setting, theirs), name=f"{POOL_PREFIX}{rank}")
            process.start()
            theirs.close()
            self._conns.append(ours)
            self._processes.append(process)
        self._greet(group)

    def _greet(self, group: bool) -> None:
        if self.world_size > 1:
            port = self._hear(0) if group else _free_port()
            for conn in self._conns:
                conn.send(port)
        for rank in range(self.world_size):
            self._hear(rank)

    def _hear(self, rank: int) -> object:
        try:
            if self._conns[rank].poll(START_TIMEOUT):
                return self._conns[rank].recv()
            why = f"did not start within {START_TIMEOUT:.0f} s"
        except EOFError:
            why = "died while starting"
        text = self.output(rank)
        self.kill()
        raise RankError(f"rank {rank} of {self.world_size} {why}; its output:\n{text}")

    def alive(self) -> bool:
        """Whether every process is there."""
        return all(p.is_alive() for p in self._processes)

    def run(self, payload: bytes, timeout: float, grace: float) -> Outcome:
        """Run a pickled ``(fn, args, kwargs)`` on every rank; after a failure the others have ``grace``."""
        for conn in self._conns:
            conn.send((sys.path, payload))
        outcome = Outcome()
        deadline = time.monotonic() + timeout
        pending = set(range(self.world_size))
        while pending and (left := deadline - time.monotonic()) > 0:
            wait([self._conns[r] for r in pending] + [self._processes[r].sentinel for r in pending], left)
            for rank in sorted(pending):
                failed = self._receive(rank, outcome)
                if failed is None:
                    continue
                pending.discard(rank)
                if failed:
                    deadline = min(deadline, time.monotonic() + grace)
        if pending:
            outcome.running = self.stacks(sorted(pending))
        return outcome

    def _receive(self, rank: int, outcome: Outcome) -> bool | None:
        """Take what the rank has to say: None for nothing yet, else whether it failed."""
        conn, process = self._conns[rank], self._processes[rank]
        try:
            if conn.poll():
                report = conn.recv()
                outcome.reports[rank] = report
                return bool(report.trace)
        except (EOFError, ConnectionResetError):
            process.join(5)
        if process.is_alive():
            return None
        process.join(5)
        outcome.dead[rank] = process.exitcode
        return True

    def check(self, token: int) -> list[Checked]:
        """Let every rank, now that all have ended the function, look for leaks and for ranks out of step."""
        for conn in self._conns:
            conn.send(token)
        found = []
        for rank, conn in enumerate(self._conns):
            try:
                said = conn.recv() if conn.poll(CHECK_TIMEOUT) else None
            except (EOFError, ConnectionResetError):
                said = None
            lost = Checked([], f"rank {rank}: no answer after the test", broken=True)
            found.append(said if isinstance(said, Checked) else lost)
        return found

    def stacks(self, ranks: list[int]) -> dict[int, str]:
        """The Python stack of every thread of these ranks, as they are now."""
        for rank in ranks:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        texts = dict.fromkeys(ranks, "")
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = {rank: self._stacks[rank].read_text(errors="replace") for rank in ranks}
            if all(now.values()) and now == texts:
                break
            texts = now
        silent = "(no stack: the process does not answer signals)\n"
        return {rank: text or silent for rank, text in texts.items()}

    def output(self, rank: int) -> str:
        """What the rank wrote to stdout and stderr since the last call."""
        if not self._outputs[rank].exists():
            return ""
        with open(self._outputs[rank], "rb") as file:
            file.seek(self._read[rank])
            data = file.read()
        self._read[rank] += len(data)
        return data.decode("utf-8", errors="replace")

    def kill(self) -> None:
        """End the processes and what they started, at once."""
        for process in self._processes:
            if process.is_alive():
                _kill_tree(process.pid or 0)
        for process, conn in zip(self._processes, self._conns, strict=True):
            process.join(10)
            conn.close()


def _kill_tree(pid: int) -> None:
    try:
        family = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert isinstance(port, int)
    return port


def pack(fn: object, args: tuple[object, ...], kwargs: dict[str, object]) -> bytes:
    """Pickle a call; a function that is not at a module's top level is refused with what to do."""
    name = getattr(fn, "__qualname__", repr(fn))
    if "<locals>" in name or "<lambda>" in name:
        raise TypeError(f"{name} cannot be sent to a rank: define it at the top level of the test module")
    return wire.dumps((fn, args, kwargs))
