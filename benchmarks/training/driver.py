"""The driver: starts the contenders, lets one at a time compute, and collects what they report. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import psutil

from .spec import Contender, Workload

ANSWER_SECONDS = 300.0  # longest wait for a rank to start or to take its steps
IDLE_SECONDS = 0.02  # between two contenders: long enough to see one that still sends
LOSS_STEPS = 5
LOSS_TOLERANCE = 1e-4


class BenchmarkError(Exception):
    """A contender that failed, or that computes something else than the others."""


@dataclass
class Round:
    """What one contender did in one round.

    Attributes:
        seconds: a step: from the first rank's start to the last rank's end, over the number of steps.
        wire: bytes on the loopback interface a rank and step, TCP headers included. None without that interface.
        counted: bytes that the library says a rank sent in a step, if it counts; the largest over the ranks.
        late: bytes a rank and step still on the wire after every rank had answered.
    """

    seconds: float
    wire: float | None
    counted: float | None
    late: float = 0.0


@dataclass
class Pair:
    """The processes of one contender: one a rank, in a process group of their own.

    Attributes:
        started: what each rank said when it was ready.
        losses: of each rank, of every step it took.
        memory: of each rank, after its last steps.
        rounds: by their number; contenders that were timed in the same round are compared.
    """

    contender: Contender
    processes: list[subprocess.Popen[bytes]]
    pipes: list[Connection[Any, Any]]
    log: Path
    started: list[dict[str, Any]] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)
    rounds: dict[int, Round] = field(default_factory=dict)

    @classmethod
    def start(cls, contender: Contender, w: Workload, ranks: int, folder: Path) -> Pair:
        """Start the ranks and wait until they have built the model.

        Raises:
            BenchmarkError: a rank died or did not answer.
        """
        port = _free_port()
        log = folder / f"{contender.name}.log"
        pair = cls(contender, [], [], log)
        for rank in range(ranks):
            ours, theirs = Pipe()
            command = [sys.executable, "-m", "training.worker", str(theirs.fileno()), contender.name]
            with log.open("ab") as out:
                process = subprocess.Popen(
                    [*command, json.dumps(w.as_dict())],
                    env=_environment(rank, ranks, port, w.threads, folder),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                )
            theirs.close()
            pair.processes.append(process)
            pair.pipes.append(ours)
        try:
            pair.started = pair._answers()
        except BaseException:
            stop([pair])
            raise
        pair.losses = [[] for _ in range(ranks)]
        return pair

    def run(self, steps: int) -> Round:
        """Let every rank take some steps.

        Raises:
            BenchmarkError: a rank died or did not answer.
        """
        before = _wire()
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # a rank that died: its missing answer tells
                pipe.send_bytes(json.dumps(steps).encode())
        answers = self._answers()
        after = _wire()
        time.sleep(IDLE_SECONDS)
        settled = _wire()
        for losses, answer in zip(self.losses, answers, strict=True):
            losses += answer["losses"]
        self.memory = [a["memory"] for a in answers]
        share = len(self.pipes) * steps
        counted = [a["counted"] for a in answers if a["counted"] is not None]
        has_wire = before is not None and after is not None and settled is not None
        return Round(
            seconds=(max(a["end"] for a in answers) - min(a["start"] for a in answers)) / steps,
            wire=(after - before) / share if has_wire else None,
            counted=max(counted) / steps if counted else None,
            late=(settled - after) / share if has_wire else 0.0,
        )

    @property
    def peak(self) -> int:
        """Bytes resident at most, of the rank that had most."""
        return max(m["peak"] for m in self.memory)

    def _answers(self) -> list[dict[str, Any]]:
        """One answer from each rank. The first rank that dies ends the wait: the others may hang in a collective."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(answers) < len(self.pipes):
            open_pipes = [p for i, p in enumerate(self.pipes) if i not in answers]
            ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise BenchmarkError(
                    f"{self.contender.label}: no answer within {ANSWER_SECONDS:g} s{self._last_words()}"
                )
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    answers[rank] = json.loads(self.pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    raise BenchmarkError(f"{self.contender.label}: rank {rank} died{self._last_words()}") from None
        return [answers[rank] for rank in range(len(self.pipes))]

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return ": " + lines[-1] if lines else ""


def stop(pairs: list[Pair]) -> None:
    """End all ranks: they leave when their pipe closes; one that does not within 10 s is killed."""
    for pair in pairs:
        for pipe in pair.pipes:
            pipe.close()
    deadline = time.monotonic() + 10
    for process in (p for pair in pairs for p in pair.processes):
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def order_of_round(pairs: list[Pair], chance: random.Random) -> list[Pair]:
    """A new order: stages shuffled, and the contenders of one stage, which are compared, next to each other.

    The compute alone is compared with every stage, so it runs in the middle.
    """
    stages = sorted({p.contender.stage for p in pairs if p.contender.stage is not None})
    chance.shuffle(stages)
    order: list[Pair] = []
    for stage in stages:
        group = [p for p in pairs if p.contender.stage == stage]
        chance.shuffle(group)
        order += group
    alone = [p for p in pairs if p.contender.stage is None]
    middle = len(order) // 2
    return order[:middle] + alone + order[middle:]


def check_losses(pairs: list[Pair]) -> None:
    """Every contender must have had the same losses on every rank in the first steps.

    The compute alone exchanges nothing, so only its first loss is comparable.

    Raises:
        BenchmarkError: two contenders that differ by more than the tolerance.
    """
    if not pairs:
        return
    for rank in range(len(pairs[0].losses)):
        for step in range(LOSS_STEPS):
            found = {
                p.contender.label: p.losses[rank][step]
                for p in pairs
                if step < len(p.losses[rank]) and (step == 0 or p.contender.stage is not None)
            }
            if not found:
                continue
            middle = statistics.median([v for v in found.values() if math.isfinite(v)] or [math.nan])
            off = {k: abs(v - middle) if math.isfinite(v) else math.inf for k, v in found.items()}
            if max(off.values()) > LOSS_TOLERANCE / 2:
                odd = max(off, key=lambda k: off[k])
                raise BenchmarkError(
                    f"step {step + 1}, rank {rank}: the losses do not agree within {LOSS_TOLERANCE:g}: {odd} has "
                    f"{found[odd]:.6f}, the median is {middle:.6f}. A contender that computes something else is not "
                    "timed."
                )


def check_memory(pairs: list[Pair], ranks: int) -> None:
    """Several contenders stay alive together: refuse to start one that might not fit.

    Raises:
        BenchmarkError: too little memory is left.
    """
    # Contenders differ by less than half; the one that computes may grow while the others rest.
    need = ranks * 1.5 * max((p.peak for p in pairs), default=0)
    left = psutil.virtual_memory().available
    if left < need:
        raise BenchmarkError(
            f"{left / 1e9:.1f} GB of memory are left and the next contender may need {need / 1e9:.1f}: keep fewer "
            "alive at once with --together 1 or --contenders."
        )


def work_folder() -> tempfile.TemporaryDirectory[str]:
    """A place for the logs, gone with the run."""
    return tempfile.TemporaryDirectory(prefix="shardwise-bench-")


def _environment(rank: int, ranks: int, port: int, threads: int, folder: Path) -> dict[str, str]:
    here = str(Path(__file__).resolve().parents[1])
    path = os.environ.get("PYTHONPATH")
    env = {
        **os.environ,
        "PYTHONPATH": here + (os.pathsep + path if path else ""),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
    }
    if "lo" in psutil.net_if_addrs():
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wire() -> int | None:
    counters = psutil.net_io_counters(pernic=True).get("lo")
    return None if counters is None else counters.bytes_sent
