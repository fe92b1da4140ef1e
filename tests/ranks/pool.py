"""The pools of a session: one set of rank processes per world size, started on first use and reused."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.ranks import wire
from tests.ranks.errors import RankDied, RankError, RankLeak, RankTimeout
from tests.ranks.leaks import new_files
from tests.ranks.processes import Outcome, Processes, pack


class RankPool:
    """Runs functions on ``world_size`` ranks; see ``run``. ``output[rank]`` is what the last run printed."""

    def __init__(self, world_size: int, folder: Path) -> None:
        self.world_size = world_size
        self.output: list[str] = []
        self._folder = folder
        self._processes: Processes | None = None
        self._runs = 0
        self._settled = True

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        grace: float = 2.0,
        fresh: bool = False,
        group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank; returns what each returned, by rank.

        ``fn`` is a function at a module's top level. It finds the default gloo group started, torchrun's
        variables set, the random generators seeded, and an empty folder shared by the ranks as working
        directory. With one rank there is no group and no variable. Tensors come back on the CPU, by value.

        ``timeout``: seconds until the ranks are ended. ``grace``: seconds that the others have left after a
        rank has failed. ``fresh``: use processes of this call's own and end them. ``group=False`` (fresh
        only): torchrun's variables are set but no group is started.

        Raises RankError (a rank raised), RankTimeout, RankDied or RankLeak (something was left behind).
        """
        __tracebackhide__ = True
        if not group and not fresh:
            raise TypeError("group=False needs fresh=True: the shared processes have their group already")
        payload = pack(fn, args, kwargs)
        if fresh:
            processes = Processes(self.world_size, group, self._folder)
        else:
            processes = self._ready()
        try:
            return self._run(processes, payload, timeout, grace, fresh)
        except BaseException:
            if not self._settled:  # pytest's own timeout or Ctrl-C: what the ranks were doing is all there is
                for rank, stack in self._stacks_of_all(processes).items():
                    sys.stderr.write(f"rank {rank}:\n{stack}\n")
                self.close()
            raise
        finally:
            if fresh:
                processes.kill()

    def run_expecting(
        self,
        expected: type[BaseException],
        fn: Callable[..., Any],
        *args: Any,
        match: str = "",
        **kwargs: Any,
    ) -> list[BaseException]:
        """Call ``fn`` as ``run`` does; every rank must raise ``expected`` with a text that has ``match``.

        Returns the exceptions by rank. ``match`` is a regular expression.
        """
        __tracebackhide__ = True
        try:
            values = self.run(fn, *args, **kwargs)
        except RankError as error:
            if type(error) is not RankError:
                raise
            for rank in range(self.world_size):
                raised = error.exceptions.get(rank)
                if not isinstance(raised, expected) or not re.search(match, str(raised)):
                    wanted = f"{expected.__name__} matching {match!r}"
                    raise RankError(f"rank {rank} did not raise {wanted} but {raised!r}\n{error}") from None
            if error.leaks:
                text = "after the expected error:\n  " + "\n  ".join(error.leaks)
                raise RankLeak(text, leaks=error.leaks) from None
            return [error.exceptions[rank] for rank in range(self.world_size)]
        raise RankError(f"no rank raised {expected.__name__}; they returned {values!r}")

    def close(self) -> None:
        """End the processes; the next run starts new ones."""
        if self._processes is not None:
            self._processes.kill()
            self._processes = None

    def _ready(self) -> Processes:
        if self._processes is not None and not self._processes.alive():
            self.close()
        if self._processes is None:
            self._processes = Processes(self.world_size, True, self._folder)
        return self._processes

    def _stacks_of_all(self, processes: Processes) -> dict[int, str]:
        return processes.stacks(list(range(self.world_size)))

    def _run(
        self, processes: Processes, payload: bytes, timeout: float, grace: float, fresh: bool
    ) -> list[Any]:
        __tracebackhide__ = True
        self._settled = False
        self._runs += 1
        outcome = processes.run(payload, timeout, grace)
        checked = [] if outcome.dead or outcome.running else processes.check(self._runs)
        if outcome.running and not outcome.dead and not any(r.trace for r in outcome.reports.values()):
            outcome.running = self._stacks_of_all(processes)  # those that are done show that they are
        self.output = [processes.output(rank) for rank in range(self.world_size)]
        for rank, text in enumerate(self.output):
            sys.stdout.write("".join(f"[rank {rank}] {line}\n" for line in text.splitlines()))
        if not fresh and (not checked or any(c.broken for c in checked)):
            self.close()
        self._settled = True
        leaks = [f"rank {rank}: {leak}" for rank, c in enumerate(checked) for leak in c.leaks]
        leaks += [c.out_of_step for c in checked if c.out_of_step]
        leaks += new_files(processes.cwd)
        self._raise(outcome, leaks, timeout)
        if leaks:
            raise RankLeak("the function left behind:\n  " + "\n  ".join(leaks), leaks=leaks)
        return [wire.loads(outcome.reports[rank].value) for rank in range(self.world_size)]

    def _raise(self, outcome: Outcome, leaks: list[str], timeout: float) -> None:
        __tracebackhide__ = True
        failed = sorted((report.at, rank) for rank, report in outcome.reports.items() if report.trace)
        exceptions = {rank: wire.loads(outcome.reports[rank].value) for _, rank in failed}
        parts = [f"rank {rank} raised:\n{outcome.reports[rank].trace}" for _, rank in failed]
        for rank, stack in outcome.running.items():
            done = "had returned; its process" if rank in outcome.reports else "was still running and"
            parts.append(f"rank {rank} {done} was ended; its Python stacks:\n{stack}")
        parts += [f"rank {rank} printed:\n{text[-4000:]}" for rank, text in enumerate(self.output) if text]
        details = "\n\n" + "\n".join(parts)
        of = f"of {self.world_size}"
        if outcome.dead:
            dead = [f"rank {rank} {of} died with exit code {code}" for rank, code in outcome.dead.items()]
            raise RankDied(", ".join(dead) + details, exceptions, outcome.dead)
        if failed:
            first = failed[0][1]
            error = exceptions[first]
            head = f"rank {first} {of} raised {type(error).__name__}: {error}"
            tail = "".join(f"\nleft behind: {leak}" for leak in leaks)
            raise RankError(head + details + tail, exceptions, leaks)
        if outcome.running:
            late = ", ".join(f"rank {rank}" for rank in outcome.running if rank not in outcome.reports)
            raise RankTimeout(f"{late} {of} did not end within {timeout:g} s{details}")


class RankPools:
    """``ranks(world_size)`` gives the session's pool of that size."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="shardwise-ranks-"))
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        """Give the pool of ``world_size`` ranks (1 to 4; its processes start with its first run)."""
        if not 1 <= world_size <= 8:
            raise ValueError(f"world_size must be 1 to 8, got {world_size}")
        return self._pools.setdefault(world_size, RankPool(world_size, self._folder))

    def __enter__(self) -> RankPools:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools.values():
            pool.close()
        shutil.rmtree(self._folder, ignore_errors=True)
