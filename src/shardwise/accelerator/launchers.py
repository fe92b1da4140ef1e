"""Ranks started from a notebook or a test: a function, called in several processes of this machine.

The ranks are forked where that is possible, because a function of a notebook cannot be found by a new interpreter. A
process that has initialised CUDA cannot be forked for GPUs: then the function has to lie in a module, or the error says
what is on the GPU.
"""

from __future__ import annotations

import difflib
import multiprocessing as mp
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise import handed_on
from shardwise.accelerator.ranks import RankFailed, run_ranks
from shardwise.errors import ConfigError, NotYetSupported
from shardwise.handed_on import PRECISIONS

__all__ = ["RankFailed", "debug_launcher", "notebook_launcher"]

Function = Callable[..., Any]
DEFAULT_PORT = 29500

# Libraries that touch the GPU when they are imported.
_TOUCH_CUDA = ("bitsandbytes", "cupy", "apex", "flash_attn", "vllm", "pycuda", "tensorflow", "jax")


def notebook_launcher(
    function: Function,
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = DEFAULT_PORT,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Call a function in several processes, on a GPU each or on the CPU where none is visible.

    With one process on one node the function is called here. ``ACCELERATE_USE_CPU`` asks for the CPU.

    Args:
        function: makes its own ``Accelerator``; what it returns is lost.
        args: its arguments.
        num_processes: on this node. Default: the visible GPUs, or 1.
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``: the default of its ``Accelerator``.
        use_port: where several nodes meet. On one node the default, or 0, means any free port.
        master_addr: address of node 0.
        node_rank: number of this node, from 0.
        num_nodes: how many nodes call this.
        rdzv_backend: ``"static"`` only.
        rdzv_endpoint: ``"host:port"``, for ``master_addr`` and ``use_port`` in one.
        rdzv_conf: the rendezvous has no settings; empty or None.
        rdzv_id: accepted without effect: a port serves one run.
        max_restarts: how often all ranks are started again after a failure; on one node.
        monitor_interval: accepted without effect: an end of a rank is seen at once.
        log_line_prefix_template: None only; the output of the ranks is passed on as it is.

    Raises:
        ConfigError: an argument that does not fit, or a process that cannot be forked; what is on the GPU is named.
        RankFailed: a rank raised an exception or died; its traceback is in the message.
    """
    mixed_precision = _precision(mixed_precision)
    if rdzv_backend != "static" or rdzv_conf:
        raise NotYetSupported(
            f"rdzv_backend={rdzv_backend!r}, rdzv_conf={rdzv_conf!r}: only 'static' without settings; "
            "`shardwise launch` has c10d"
        )
    if log_line_prefix_template is not None:
        raise NotYetSupported("log_line_prefix_template: the output of the ranks is passed on as it is; leave it out")
    if not 0 <= node_rank < num_nodes:
        raise ConfigError(f"node_rank={node_rank}: expected 0 to {num_nodes - 1} with num_nodes={num_nodes}")
    if max_restarts and num_nodes > 1:
        raise NotYetSupported(f"max_restarts={max_restarts}: on one node only; `shardwise launch` restarts several")
    host, port = _meeting_place(rdzv_endpoint, master_addr, use_port, num_nodes)
    gpus = 0 if handed_on.read(os.environ).get("cpu") else torch.cuda.device_count()
    count = max(1, gpus) if num_processes is None else num_processes
    if count < 1:
        raise ConfigError(f"num_processes={count}: expected 1 or more")
    if 0 < gpus < count:
        raise ConfigError(
            f"num_processes={count}: {gpus} visible GPUs; a rank needs one of its own. For ranks on the CPU set "
            "ACCELERATE_USE_CPU=true, or use debug_launcher"
        )
    shared = {"ACCELERATE_MIXED_PRECISION": mixed_precision, **({} if gpus else _on_cpu())}
    if count == 1 and num_nodes == 1:
        with _variables(shared):
            function(*args)
        return
    _refuse_group()
    method = _start_method(function, gpus)
    for attempt in range(max_restarts + 1):
        try:
            _start(function, args, shared, count, method, host, port, node_rank, num_nodes)
            return
        except RankFailed as error:
            if attempt == max_restarts:
                raise
            print(f"{error}\nnotebook_launcher: restart {attempt + 1} of {max_restarts}", file=sys.stderr, flush=True)


def debug_launcher(function: Function, args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Call a function in several processes on the CPU, whatever the machine has: for tests and for debugging.

    Args:
        function: makes its own ``Accelerator``; what it returns is lost.
        args: its arguments.
        num_processes: how many.

    Raises:
        ConfigError: a number that is not positive, or a process group that is open here.
        RankFailed: a rank raised an exception or died; its traceback is in the message.
    """
    if num_processes < 1:
        raise ConfigError(f"num_processes={num_processes}: expected 1 or more")
    _refuse_group()
    shared = {"ACCELERATE_MIXED_PRECISION": "no", **_on_cpu()}
    _start(function, args, shared, num_processes, _start_method(function, 0), "127.0.0.1", 0, 0, 1)


def _start(
    function: Function,
    args: Sequence[Any],
    shared: Mapping[str, str],
    count: int,
    method: str,
    host: str,
    port: int,
    node_rank: int,
    num_nodes: int,
) -> None:
    # The store that the ranks meet at is kept here, not by rank 0: so a free port can be taken without a race, and it
    # outlives the ranks. The variable is torchrun's way to say so.
    store = None
    if node_rank == 0:
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10)
        )
        port = store.port
    common = {
        **shared,
        "WORLD_SIZE": str(count * num_nodes),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(node_rank),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if num_nodes == 1 and (loopback := _loopback()) is not None:
        # By default gloo looks up this machine's name, which in containers and on laptops often leads nowhere.
        common.setdefault("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", loopback))
    each = [{"RANK": str(node_rank * count + i), "LOCAL_RANK": str(i)} for i in range(count)]
    try:
        run_ranks(function, tuple(args), [common | own for own in each], method)
    except RankFailed as error:
        if "Cannot re-initialize CUDA in forked subprocess" in str(error):
            raise ConfigError(f"the ranks were forked from a process that had touched CUDA. {_culprits()}") from error
        raise
    finally:
        del store


def _precision(name: str) -> str:
    lowered = str(name).lower()
    if lowered in PRECISIONS:
        return lowered
    close = difflib.get_close_matches(lowered, PRECISIONS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    later = " (fp8 has not landed yet)" if lowered == "fp8" else ""
    raise ConfigError(f"mixed_precision={name!r}: expected one of {', '.join(PRECISIONS)}{later or hint}")


def _meeting_place(endpoint: str, host: str, port: str | int, nodes: int) -> tuple[str, int]:
    if endpoint:
        host, _, given = endpoint.rpartition(":")
        if not host or not given.isdigit():
            raise ConfigError(f"rdzv_endpoint={endpoint!r}: expected 'host:port'")
        return host.strip("[]"), int(given)
    if not str(port).isdigit() or int(port) > 65535:
        raise ConfigError(f"use_port={port!r}: expected a port number")
    number = int(port)
    if nodes > 1 and number == 0:
        raise ConfigError("use_port=0: a free port is for one node; several need the same number")
    return host, 0 if nodes == 1 and number == DEFAULT_PORT else number


def _on_cpu() -> dict[str, str]:
    return {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}


def _loopback() -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def _refuse_group() -> None:
    if dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "a process group is open in this process; ranks cannot be started beside it. Make the Accelerator inside "
            "the function only, or call torch.distributed.destroy_process_group() first"
        )


def _start_method(function: Function, gpus: int) -> str:
    can_fork = "fork" in mp.get_all_start_methods()
    touched = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if can_fork and not touched:
        return "fork"
    module, name = getattr(function, "__module__", "__main__"), getattr(function, "__qualname__", "<unnamed>")
    if module != "__main__" and "<" not in name:
        return "spawn"
    if can_fork and gpus == 0:
        return "fork"  # As long as the function leaves the GPU alone.
    why = _culprits() if can_fork else "This system cannot fork."
    raise ConfigError(
        f"{name} is defined in {'the notebook' if module == '__main__' else 'another function'}, so its ranks have to "
        f"be forked from this process. {why} Or put the function at the top level of a module and import it: its ranks "
        "are then started afresh"
    )


def _culprits() -> str:
    """What is on the GPU in this process, as far as it can be told, and what to do."""
    found = [f"`{name}` is on {device}" for name, device in _on_gpu(vars(sys.modules["__main__"]))]
    found += [f"`{name}` is imported, which touches the GPU" for name in _TOUCH_CUDA if name in sys.modules]
    told = "; ".join(found) if found else "by what, is not to be seen: a cell that called torch.cuda, or a library"
    return (
        f"CUDA is initialised here, and such a process cannot be forked ({told}). Restart the kernel, and import and "
        "make these inside the function only"
    )


def _on_gpu(names: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in list(names.items()):
        tensor: object = value
        if isinstance(value, torch.nn.Module):
            tensor = next(value.parameters(), None)
        device = getattr(tensor, "device", None)
        if isinstance(device, torch.device) and device.type == "cuda" and not name.startswith("_"):
            yield name, str(device)


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
