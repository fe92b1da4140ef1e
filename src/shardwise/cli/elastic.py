"""Ranks started, watched and restarted by torch's elastic agent, and the one failure report that a user sees.

This module imports torch.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.cli import _worker
from shardwise.cli.failures import RankEnd, describe, read_end, root_failure, shell_code
from shardwise.cli.plan import LaunchPlan


def run(plan: LaunchPlan, worker_argv: list[str]) -> int:
    """Run `[-m] target args...` on every rank of this node; return the exit code of the job.

    Rank output passes through. If a rank fails, its traceback is printed to stderr once, last, after every
    rank of this node is gone. A signal to this process ends the ranks and gives 128 + its number.
    """
    _silence_elastic_logging()
    # The agent handles signals once ranks run. Before, it waits for other hosts inside a call that no Python handler
    # can interrupt: there Ctrl-C has to end the process by itself.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    reports = _RankReports(plan)
    # The agent substitutes ${local_rank} in arguments: "$$" is how a dollar of the user's stays a dollar.
    entry, *rest = worker_argv if plan.no_python else [sys.executable, "-u", _worker.__file__, *worker_argv]
    argv = [argument.replace("$", "$$") for argument in rest]
    try:
        elastic_launch(_launch_config(plan, reports), entry)(*argv)
    except ChildFailedError as error:
        exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        return _report_failure(reports.ends(exit_codes), plan)
    except SignalException as error:
        return 128 + int(error.sigval)
    except (RendezvousError, DistError, OSError) as error:
        where = plan.rdzv_endpoint or "this machine"
        _say(f"shardwise launch: the hosts did not meet at {where}: {type(error).__name__}: {error}")
        return 1
    finally:
        reports.remove()
    return 0


class _RankReports(DefaultLogsSpecs):
    """Tells each rank where to report its end; the agent calls `reify` whenever it starts a set of ranks."""

    def __init__(self, plan: LaunchPlan) -> None:
        super().__init__(log_dir=os.devnull)  # The agent's own logs and error files: there are none.
        self._plan = plan
        self._folder: Path | None = None
        self._restarts = 0
        self._ranks: list[int] = []

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        restarts = max((int(env["TORCHELASTIC_RESTART_COUNT"]) for env in envs.values()), default=0)
        if restarts > self._restarts:
            _say(self._describe_restart(restarts))
        self._restarts = restarts
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="shardwise-launch-"))
        self._ranks = [int(env["RANK"]) for env in envs.values()]
        for env in envs.values():
            report = self._report_path(int(env["RANK"]))
            report.unlink(missing_ok=True)
            env[_worker.REPORT_VARIABLE] = str(report)
            env.update(self._plan.environment)
            if self._plan.threads is not None:
                env["OMP_NUM_THREADS"] = str(self._plan.threads)
        return super().reify(envs)

    def ends(self, exit_codes: Mapping[int, int]) -> list[RankEnd]:
        """How the ranks of the last start ended, where their exit code or their report says so."""
        ranks = sorted({*self._ranks, *exit_codes})
        ends = [read_end(rank, exit_codes.get(rank), self._report_path(rank)) for rank in ranks]
        return [end for end in ends if end is not None]

    def _describe_restart(self, restarts: int) -> str:
        ends = self.ends({})
        root = root_failure(ends)
        what = "a rank ended without a traceback\n"
        if root is not None:
            what = describe(root, ends, self._plan.max_nodes)
        return f"{what}shardwise launch: restart {restarts} of {self._plan.max_restarts}"

    def remove(self) -> None:
        """Remove the reports."""
        if self._folder is not None:
            shutil.rmtree(self._folder)

    def _report_path(self, rank: int) -> Path:
        if self._folder is None:
            raise RuntimeError("no rank was started")
        return self._folder / f"{self._restarts}-{rank}.json"


def _launch_config(plan: LaunchPlan, reports: _RankReports) -> LaunchConfig:
    backend, endpoint, run_id, settings = "c10d", plan.rdzv_endpoint, plan.rdzv_id, {}
    if endpoint is None:
        # On one machine: a store of our own on a free port, so that several jobs do not collide.
        endpoint, run_id = "localhost:0", str(uuid.uuid4())
    elif plan.node_rank is not None:
        backend, settings = "static", {"rank": plan.node_rank}
    return LaunchConfig(
        min_nodes=plan.min_nodes,
        max_nodes=plan.max_nodes,
        nproc_per_node=plan.nproc,
        run_id=run_id,
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        rdzv_configs=settings,
        max_restarts=plan.max_restarts,
        monitor_interval=plan.monitor_interval,
        logs_specs=reports,
    )


def _report_failure(ends: list[RankEnd], plan: LaunchPlan) -> int:
    root = root_failure(ends)
    if root is None:
        _say("shardwise launch: a rank failed without an exit code")
        return 1
    if sys.stderr.isatty():
        # A progress bar may have been cut off: clear its line, and show the cursor that it hid.
        sys.stderr.write("\r\x1b[K\x1b[?25h")
    _say(describe(root, ends, plan.max_nodes))
    return shell_code(root.exit_code) or 1


def _silence_elastic_logging() -> None:
    # What the agent logs about a failed rank is what we say ourselves. LOGLEVEL, torch's switch, undoes this.
    if "LOGLEVEL" in os.environ:
        return
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text if text.endswith("\n") else text + "\n")
    sys.stderr.flush()
