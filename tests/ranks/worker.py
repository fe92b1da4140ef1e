"""The loop of one rank process: receive a function, run it, report; then check what it left behind."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.distributed as dist

from tests.ranks import rewrite, wire
from tests.ranks.leaks import Snapshot

GROUP_TIMEOUT = timedelta(minutes=10)  # far above a test's own, so that a hang is reported with stacks
STEP_TIMEOUT = timedelta(seconds=3)
SEED = 1234


@dataclass(frozen=True)
class Setting:
    """Which rank this process is, and where its files are."""

    rank: int
    world_size: int
    group: bool
    cwd: str
    output: str
    stacks: str


@dataclass(frozen=True)
class Report:
    """How the function ended on a rank: ``value`` is pickled; ``trace`` is empty unless it raised."""

    value: bytes
    trace: str
    at: float


@dataclass(frozen=True)
class Checked:
    """What a rank found after the function ended on every rank. ``broken``: the process is of no more use."""

    leaks: list[str]
    out_of_step: str
    broken: bool


def main(setting: Setting, conn: Connection) -> None:
    """Serve until the test process says stop or is gone."""
    _own_files(setting)
    _watch_parent(conn)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test process's business
    torch.set_num_threads(1)
    rewrite.install()
    _join_group(setting, conn)
    conn.send("ready")
    modules = 0
    while True:
        try:
            path, payload = conn.recv()
        except EOFError:
            os._exit(0)
        sys.path[:] = path
        if len(sys.modules) > modules + 20:
            gc.collect()
            gc.freeze()  # what modules hold stays: the collection after each function skips it
            modules = len(sys.modules)
        before = Snapshot()
        conn.send(_call(payload))
        token = conn.recv()
        conn.send(_check(before, token, setting))


def _own_files(setting: Setting) -> None:
    out = os.open(setting.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    # The streams of the process that started us may be pytest's capture; ours write to the rank's own file.
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    stacks = os.fdopen(os.open(setting.stacks, os.O_WRONLY | os.O_CREAT), "w")  # open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    faulthandler.enable(file=sys.stderr)
    os.chdir(setting.cwd)


def _watch_parent(conn: Connection) -> None:
    def watch() -> None:
        hangup = select.poll()
        hangup.register(conn.fileno(), 0)  # no event asked for: only a hang-up of the other end is reported
        hangup.poll()
        os._exit(1)

    threading.Thread(target=watch, name="rank-watch-parent", daemon=True).start()


def _join_group(setting: Setting, conn: Connection) -> None:
    """Set the variables as torchrun does and start the default group (one process: neither)."""
    rank, world_size = setting.rank, setting.world_size
    os.environ["OMP_NUM_THREADS"] = "1"
    if world_size == 1:
        return
    store = None
    if setting.group and rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=GROUP_TIMEOUT)
        conn.send(store.port)
    port = conn.recv()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if not setting.group:
        return
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=GROUP_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)


def _call(payload: bytes) -> Report:
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    try:
        fn, args, kwargs = wire.loads(payload)
        value = wire.dumps(fn(*args, **kwargs))
    except BaseException as error:  # a SystemExit or a KeyboardInterrupt in a test is a failure of that test
        at = time.monotonic()
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        trace = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
        return Report(wire.dump_exception(error), trace, at)
    return Report(value, "", time.monotonic())


def _check(before: Snapshot, token: int, setting: Setting) -> Checked:
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()
    regrouped = before.group_leak
    wrong = _out_of_step(token, setting) if setting.group and not regrouped else ""
    leaks = before.leaks()
    left_alive = any("still alive" in leak for leak in leaks)
    return Checked(leaks, wrong, broken=regrouped or bool(wrong) or left_alive)


def _out_of_step(token: int, setting: Setting) -> str:
    """Say why a small all-reduce on the default group fails, if it does.

    A rank that issued a collective more or less than the others would disturb the next test, not its own.
    """
    mine = torch.tensor([token], dtype=torch.int64)
    try:
        work = dist.all_reduce(mine, async_op=True)
        assert work is not None
        work.wait(STEP_TIMEOUT)
    except RuntimeError as error:
        return f"rank {setting.rank}: an all-reduce after the test failed: {error}"
    if mine.item() != token * setting.world_size:
        return f"rank {setting.rank}: an all-reduce after the test received another collective's data"
    return ""
