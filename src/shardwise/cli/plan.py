"""What a launch will do, decided before anything starts: nodes, ranks, threads, by options or hostfile."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.cli.hostfile import Host, find_this_host, read_hostfile
from shardwise.errors import ConfigError
from shardwise.handed_on import as_flags

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class LaunchPlan:
    """A launch on this node.

    `nproc`: ranks on this node. `min_nodes`, `max_nodes`: equal unless the job is elastic. `node_rank`: None
    lets the rendezvous number the nodes. `rdzv_endpoint`: "host:port", or None on a single node. `threads`:
    what each rank gets as OMP_NUM_THREADS, None to leave it alone. `environment`: variables that are set for
    every rank. `monitor_interval`: seconds between looks at the ranks. `no_python`: the script is a program.
    """

    nproc: int
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str = "shardwise"
    max_restarts: int = 0
    threads: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    monitor_interval: float = 0.1
    no_python: bool = False


def plan_nodes(
    *,
    nproc: int,
    nnodes: str = "1",
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
    rdzv_id: str = "shardwise",
    max_restarts: int = 0,
) -> LaunchPlan:
    """Check the options of a launch without a hostfile.

    Raises:
        ConfigError: `nnodes` is not N or MIN:MAX, nodes have no place to meet, or `node_rank` does not fit.
    """
    low, high = _parse_nnodes(nnodes)
    if high > 1 and rdzv_endpoint is None:
        raise ConfigError(f"--nnodes {nnodes}: the nodes need a place to meet; add --rdzv-endpoint HOST:PORT")
    if node_rank is not None and low != high:
        raise ConfigError(f"--node-rank {node_rank}: the nodes of an elastic job ({nnodes}) have no fixed rank")
    if node_rank is not None and not 0 <= node_rank < high:
        raise ConfigError(f"--node-rank {node_rank}: expected 0 to {high - 1} with --nnodes {nnodes}")
    return LaunchPlan(
        nproc=nproc,
        min_nodes=low,
        max_nodes=high,
        node_rank=node_rank,
        rdzv_endpoint=None if rdzv_endpoint is None else _with_port(rdzv_endpoint),
        rdzv_id=rdzv_id,
        max_restarts=max_restarts,
    )


def plan_hostfile(
    path: Path,
    *,
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
    rdzv_id: str = "shardwise",
    max_restarts: int = 0,
) -> tuple[LaunchPlan, list[Host]]:
    """The launch on this host of a hostfile, and all its hosts. The first host is where they meet.

    Raises:
        ConfigError: the file is malformed, or which of its hosts this machine is cannot be told.
    """
    hosts = read_hostfile(path)
    if node_rank is None:
        node_rank = find_this_host(hosts)
    elif not 0 <= node_rank < len(hosts):
        raise ConfigError(f"--node-rank {node_rank}: hostfile {path} has the nodes 0 to {len(hosts) - 1}")
    several = len(hosts) > 1
    if rdzv_endpoint is None and several:
        rdzv_endpoint = hosts[0].name
    plan = plan_nodes(
        nproc=hosts[node_rank].slots,
        nnodes=str(len(hosts)),
        node_rank=node_rank if several else None,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_id=rdzv_id,
        max_restarts=max_restarts,
    )
    return plan, hosts


def command_for(node: int, hosts: Sequence[Host], plan: LaunchPlan, worker_argv: Sequence[str]) -> str:
    """The shell command that starts the ranks of host number `node`."""
    options = ["--nnodes", str(plan.max_nodes), "--node-rank", str(node), "--nproc", str(hosts[node].slots)]
    options += ["--rdzv-endpoint", str(plan.rdzv_endpoint)]
    if plan.rdzv_id != "shardwise":
        options += ["--rdzv-id", plan.rdzv_id]
    if plan.max_restarts:
        options += ["--max-restarts", str(plan.max_restarts)]
    if plan.threads is not None:
        options += ["--num_cpu_threads_per_process", str(plan.threads)]
    options += as_flags(plan.environment) + ["--no_python"] * plan.no_python
    if worker_argv[0] != "-m":
        options.append("--")
    return shlex.join(["shardwise", "launch", *options, *worker_argv])


def threads_per_rank(nproc: int, environment: Mapping[str, str]) -> int | None:
    """Cores divided by ranks, at least 1; None for a single rank or where OMP_NUM_THREADS is already set."""
    if nproc == 1 or "OMP_NUM_THREADS" in environment:
        return None
    return max(1, available_cores() // nproc)


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _parse_nnodes(nnodes: str) -> tuple[int, int]:
    low, _, high = nnodes.partition(":")
    try:
        least, most = int(low), int(high or low)
    except ValueError:
        least, most = 0, 0
    if not 1 <= least <= most:
        raise ConfigError(f"--nnodes {nnodes}: expected a number of nodes, like 2, or MIN:MAX, like 1:4")
    return least, most


def _with_port(endpoint: str) -> str:
    """`endpoint` with the default port if it has none; an IPv6 address is written [address]:port."""
    if endpoint.startswith("["):
        return endpoint if "]:" in endpoint else f"{endpoint}:{DEFAULT_PORT}"
    if endpoint.count(":") > 1:
        return f"[{endpoint}]:{DEFAULT_PORT}"
    host, _, port = endpoint.partition(":")
    if not host or (port and not port.isdigit()):
        raise ConfigError(f"--rdzv-endpoint {endpoint}: expected HOST:PORT, like node-1:{DEFAULT_PORT}")
    return f"{host}:{port or DEFAULT_PORT}"
