"""This process among all: who it is, where it computes, and what it does alone or first."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise.accelerator.kinds import DistributedType
from shardwise.accelerator.splitting import split
from shardwise.dist import Axis, init_distributed
from shardwise.dist.mesh import default_device
from shardwise.dist.objects import gather_values
from shardwise.errors import CommError, ConfigError

DEFAULT_TIMEOUT = timedelta(minutes=10)
_YES, _NO = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f", "")

Function = Callable[..., Any]


class Processes:
    """This process among all that were launched. Makes the process group when there is none.

    Args:
        cpu: compute on the CPU and talk over gloo, whatever else the machine has. Also by the variable
            ``ACCELERATE_USE_CPU``.
        backend: of the process group, as for ``torch.distributed.init_process_group``. By default NCCL when there is
            a GPU for each process, else gloo.
        timeout: how long a process is waited for.

    Attributes:
        debug: check before each collective that all processes give tensors of one shape on the right device, and
            report per process. The variable ``ACCELERATE_DEBUG_MODE`` sets it.

    Raises:
        ConfigError: ``cpu`` with a backend that cannot send from the CPU, or a variable that is neither yes nor no.
    """

    def __init__(self, cpu: bool = False, *, backend: str | None = None, timeout: timedelta | None = None) -> None:
        self.debug = flag("ACCELERATE_DEBUG_MODE")
        cpu = cpu or flag("ACCELERATE_USE_CPU")
        if cpu and backend not in (None, "gloo", "cpu:gloo"):
            raise ConfigError(f"backend: `{backend}` cannot send from the CPU; with `cpu=True` leave it out.")
        self._timeout = timeout or DEFAULT_TIMEOUT
        init_distributed("gloo" if cpu else backend, self._timeout)
        self._device = torch.device("cpu") if cpu else default_device()
        self._group = dist.group.WORLD if dist.is_initialized() else None
        self._rank, self._size = (dist.get_rank(), dist.get_world_size()) if self._group is not None else (0, 1)
        self._backends = _backends() if self._group is not None else {}
        if self._group is not None and self._device.type not in self._backends:
            raise ConfigError(
                f"the process group sends from {', '.join(sorted(self._backends))} only, but this process computes on "
                f"the {self._device.type}. Start the group with gloo, or let shardwise start it."
            )
        self._local_rank, self._local_size = _place_on_node(self._rank, self._size)
        self._axis: Axis | None = None

    # -- who --

    @property
    def axis(self) -> Axis:
        """All processes, for collectives. They go over torch's default group.

        Raises:
            CommError: the group that this object was made in has been destroyed.
        """
        if self._group is not None and not self.alive:
            raise CommError(
                "the process group was destroyed: nothing can be sent to the other processes any more. "
                "Make a new `Processes` (or `Accelerator`) after a new group was started."
            )
        if self._axis is None:
            group = self._group if self._size > 1 else None
            self._axis = Axis("processes", tuple(range(self._size)), self._rank, group, self._timeout)
        return self._axis

    @property
    def alive(self) -> bool:
        """Whether torch's default group is still the one that this object was made in (or there is none, as then)."""
        return (dist.group.WORLD if dist.is_initialized() else None) is self._group

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._device

    @property
    def num_processes(self) -> int:
        """How many there are on all nodes."""
        return self._size

    @property
    def process_index(self) -> int:
        """Which of all this is, from 0."""
        return self._rank

    @property
    def local_process_index(self) -> int:
        """Which on its node this is, from 0. Without a launcher's variables all are taken to be on one node."""
        return self._local_rank

    @property
    def local_num_processes(self) -> int:
        """How many there are on this node."""
        return self._local_size

    @property
    def backend(self) -> str | None:
        """What sends this device's tensors, such as ``"gloo"`` or ``"nccl"``; None without a process group."""
        return self._backends[self._device.type] if self._backends else None

    @property
    def distributed_type(self) -> DistributedType:
        """``NO`` without a process group, else by the kind of device."""
        if self._group is None:
            return DistributedType.NO
        return DistributedType.MULTI_GPU if self._device.type == "cuda" else DistributedType.MULTI_CPU

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self._size > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first of all."""
        return self._rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first on its node."""
        return self._local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last of all."""
        return self._rank == self._size - 1

    def wire_device(self, device: torch.device | None = None) -> torch.device:
        """Where a tensor of ``device`` (by default this process's own) must lie while it travels.

        gloo exchanges memory of the CPU; NCCL that of GPUs.
        """
        device = device or self._device
        backend = self._backends.get(device.type)
        if backend == "gloo":
            return torch.device("cpu")
        return device if backend is not None else self._device

    # -- together --

    def wait_for_everyone(self) -> None:
        """Return when every process has called this."""
        self.axis.barrier("wait_for_everyone")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print``, once per node."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The block runs on the main process, then on the others.

        All processes must enter it. When it raises on the main process, the others do not run theirs but raise too:
        what they would have found is not there, and in their next collective they would wait for a process that ended.

        Raises:
            CommError: on the others, with the main process's error.
        """
        with self._first(self.is_main_process, "main_process_first"):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """As :meth:`main_process_first`, with the first process of each node.

        When it raises on one node's, all other processes raise: those of its node instead of their block, the first
        ones of the other nodes after it.
        """
        with self._first(self.is_local_main_process, "local_main_process_first"):
            yield

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's part of ``inputs``; see :func:`shardwise.accelerator.splitting.split`."""
        yield split(inputs, self._rank, self._size, apply_padding)

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Free ``group``, or torch's default group and with it all others. Does nothing when there is none."""
        if not dist.is_initialized():
            return
        dist.destroy_process_group(group)
        if group is None:
            self._axis = None

    # -- alone --

    def on_main_process(self, function: Function | None = None) -> Function:
        """Decorate a function that only the main process runs. On the others it returns None."""
        return self._only(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Function | None = None) -> Function:
        """Decorate a function that only the first process of each node runs. On the others it returns None."""
        return self._only(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Function | None = None) -> Function:
        """Decorate a function that only the last process runs. On the others it returns None."""
        return self._only(lambda: self.is_last_process, function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Function:
        """Decorate a function that only one process runs. On the others it returns None.

        A script that was started alone runs it whatever the index.

        Raises:
            ConfigError: no index, or one that no process has.
        """
        index = _index("process_index", process_index, self._size)
        return self._only(lambda: not self.use_distributed or self._rank == index, function)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Function:
        """Decorate a function that one process of each node runs. On the others it returns None.

        A script that was started alone runs it whatever the index. A node without such a process runs it nowhere.

        Raises:
            ConfigError: no index, or a negative one.
        """
        index = _index("local_process_index", local_process_index, 1)
        return self._only(lambda: not self.use_distributed or self._local_rank == index, function)

    # -- inside --

    def _only(self, here: Callable[[], bool], function: Function | None) -> Function:
        def decorate(wrapped: Function) -> Function:
            @functools.wraps(wrapped)
            def run(*args: Any, **kwargs: Any) -> Any:
                return wrapped(*args, **kwargs) if here() else None

            return run

        return decorate if function is None else decorate(function)

    @contextmanager
    def _first(self, first: bool, what: str) -> Iterator[None]:
        # Each process calls `_release` exactly once, so whatever a block does no collective is left over.
        if not first:
            self._release("", what)
            yield
            return
        try:
            yield
        # An interrupt is not told: it ends the others as well, and telling them would wait for processes that are gone.
        except (Exception, SystemExit) as error:
            try:
                self._release(f"{type(error).__name__}: {error}", what, mine=True)
            except CommError as lost:
                raise error from lost
            raise
        self._release("", what)

    def _release(self, problem: str, what: str, mine: bool = False) -> None:
        """Let the others go on, or tell them what went wrong here."""
        device = self.wire_device()
        failed = torch.tensor([1.0 if problem else 0.0], device=device)
        self.axis.max_small(failed, what)
        if not failed.item():
            return
        told = gather_values(self.axis, problem, device, what)
        if not mine:
            texts = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)
            raise CommError(f"the block of `{what}` failed on the process that went first, so this one stops: {texts}")

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle has no place among processes: whoever opens it is where it is.
        from shardwise.accelerator.current import current_processes

        return current_processes, ()

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type.value}{backend}\n"
            f"Num processes: {self._size}\n"
            f"Process index: {self._rank}\n"
            f"Local process index: {self._local_rank}\n"
            f"Device: {self._device}\n"
        )


def flag(name: str) -> bool:
    """Whether the environment variable says yes; False when it is not set.

    Raises:
        ConfigError: it says neither yes nor no.
    """
    value = os.environ.get(name, "").strip().lower()
    if value not in _YES + _NO:
        raise ConfigError(f"the variable {name} is `{os.environ[name]}`; expected one of {', '.join(_YES + _NO[:-1])}.")
    return value in _YES


def _backends() -> dict[str, str]:
    """Kind of device -> what sends its tensors, of torch's default group."""
    pairs = (entry.split(":", 1) for entry in dist.get_backend_config().split(","))
    return {device: backend for device, backend in pairs}


def _place_on_node(rank: int, size: int) -> tuple[int, int]:
    if size == 1:
        return 0, 1
    found = []
    for name, default in (("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", size)):
        text = os.environ.get(name, str(default))
        if not text.isdecimal():
            raise ConfigError(f"the variable {name} is `{text}`; expected a number, which launchers set.")
        found.append(int(text))
    return found[0], found[1]


def _index(name: str, value: int | None, size: int) -> int:
    wanted = f"0 to {size - 1}" if size > 1 else "0 or more"
    if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (size > 1 and value >= size):
        raise ConfigError(f"{name}: {value!r}; expected which process runs the function, {wanted}.")
    return value
