"""What a test must not leave behind: process groups, threads, variables, files, changed defaults of torch."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Set by pytest, or by torch's compiler on its first use: not the test's to put back.
OWN_VARIABLES = ("PYTEST_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "TORCH_WARM_", "CUBLAS_")
# Names that tools write wherever they are started.
OWN_FILES = {"__pycache__", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache"}
# Threads that a library starts once and keeps, by the module of the thread's class or target.
OWN_THREADS = ("torch._inductor.", "tqdm.", "concurrent.futures.process")
THREAD_GRACE = 1.0
POOL_PREFIX = "pool rank "


def _groups() -> dict[int, str]:
    if not dist.is_available():
        return {}
    world = distributed_c10d._world
    default = world.default_pg
    found: dict[int, str] = {}
    for group in world.pg_map:
        name = "the default group" if group is default else f"group {world.pg_names.get(group, '?')!r}"
        found[id(group)] = f"{name} of ranks {sorted(world.pg_group_ranks.get(group, {}))}"
    return found


def _library_thread(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    homes = (type(thread).__module__, getattr(target, "__module__", None) or "")
    # A dummy thread belongs to C++ (the autograd engine) and once ran a Python hook; it never ends.
    return isinstance(thread, threading._DummyThread) or any(h.startswith(OWN_THREADS) for h in homes)


def _compiler_threads() -> set[threading.Thread]:
    """The threads of the two executors that torch.compile starts once and keeps."""
    found: set[threading.Thread] = set()
    if (prefetch := sys.modules.get("torch.utils._functools")) is not None:
        found |= prefetch._prefetch_executor._threads
    if (compiler := sys.modules.get("torch._inductor.async_compile")) is not None:
        pool = compiler.AsyncCompile.pool
        found |= pool()._threads if pool.cache_info().currsize else set()
    return found


def _threads() -> dict[int, threading.Thread]:
    own = _compiler_threads()
    alive = [t for t in threading.enumerate() if t.is_alive() and t not in own]
    return {id(t): t for t in alive if not _library_thread(t)}


def _children() -> dict[int | None, str]:
    # The pools' own processes start with the first test that needs them and stay.
    children = multiprocessing.active_children()
    return {p.pid: p.name for p in children if not p.name.startswith(POOL_PREFIX)}


def _describe(thread: threading.Thread) -> str:
    target = getattr(thread, "_target", None)
    name = getattr(target, "__qualname__", "")
    runs = f" running {getattr(target, '__module__', '?')}.{name}" if name else ""
    return f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}{runs}"


def _variables() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(OWN_VARIABLES)}


def new_files(folder: Path) -> list[str]:
    """One sentence for each entry of ``folder``, which was empty before the test; they are removed."""
    names = sorted(set(os.listdir(folder)) - OWN_FILES)
    for name in names:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return [f"file {name!r} in the working directory" for name in names]


@dataclass
class Snapshot:
    """The state of this process before a test; ``leaks()`` says what is different after it."""

    groups: dict[int, str] = field(default_factory=_groups)
    threads: dict[int, threading.Thread] = field(default_factory=_threads)
    variables: dict[str, str] = field(default_factory=_variables)
    children: dict[int | None, str] = field(default_factory=_children)
    cwd: str = field(default_factory=os.getcwd)
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    grad: bool = field(default_factory=torch.is_grad_enabled)
    num_threads: int = field(default_factory=torch.get_num_threads)
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)

    def leaks(self) -> list[str]:
        """One sentence for each leak. Variables, folder and torch's defaults are put back; groups are not."""
        if self._still_alive():
            gc.collect()  # an owner in a reference cycle, as a loader with workers, ends them when freed
        found = self._group_leaks() + self._variable_leaks() + self._default_leaks() + self._thread_leaks()
        new = _children().keys() - self.children.keys()
        return found + [f"child process {_children().get(pid)!r} is still alive" for pid in new]

    @property
    def group_leak(self) -> bool:
        """Whether the process groups are not those from before the test."""
        return _groups().keys() != self.groups.keys()

    def _still_alive(self) -> bool:
        return bool(_threads().keys() - self.threads.keys() or _children().keys() - self.children.keys())

    def _group_leaks(self) -> list[str]:
        now = _groups()
        found = [f"process group not destroyed: {now[i]}" for i in now.keys() - self.groups.keys()]
        return found + [f"process group destroyed: {self.groups[i]}" for i in self.groups.keys() - now.keys()]

    def _variable_leaks(self) -> list[str]:
        now, found = _variables(), []
        for name in sorted(now.keys() | self.variables.keys()):
            before, after = self.variables.get(name), now.get(name)
            if before == after:
                continue
            if before is None:
                found.append(f"environment variable {name} was set to {after!r}")
                del os.environ[name]
            else:
                now_is = "removed" if after is None else f"changed to {after!r}"
                found.append(f"environment variable {name} was {now_is} (before: {before!r})")
                os.environ[name] = before
        return found

    def _default_leaks(self) -> list[str]:
        found = []
        if os.getcwd() != self.cwd:
            found.append(f"the working directory was changed to {os.getcwd()}")
            os.chdir(self.cwd)
        defaults: tuple[tuple[str, object, object, Callable[[Any], object]], ...] = (
            ("default dtype", self.dtype, torch.get_default_dtype(), torch.set_default_dtype),
            ("grad mode", self.grad, torch.is_grad_enabled(), torch.set_grad_enabled),
            ("number of threads", self.num_threads, torch.get_num_threads(), torch.set_num_threads),
            (
                "deterministic algorithms",
                self.deterministic,
                torch.are_deterministic_algorithms_enabled(),
                torch.use_deterministic_algorithms,
            ),
        )
        for what, before, after, put_back in defaults:
            if before != after:
                found.append(f"torch's {what} was changed from {before} to {after}")
                put_back(before)
        return found

    def _thread_leaks(self) -> list[str]:
        deadline = time.monotonic() + THREAD_GRACE
        while True:
            new = [t for i, t in _threads().items() if i not in self.threads]
            if not new or time.monotonic() > deadline:
                return [f"{_describe(t)} is still alive" for t in new]
            time.sleep(0.01)
