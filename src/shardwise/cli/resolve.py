"""From what was typed, or read from a file, to what a launch will do; nothing is started here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.cli.flags import Flags
from shardwise.cli.hostfile import Host, read_hostfile
from shardwise.cli.plan import DEFAULT_PORT, LaunchPlan, plan_hostfile, plan_nodes
from shardwise.errors import ConfigError, NotYetSupported
from shardwise.handed_on import written

_SAME = (
    ("nproc", "num_processes"),
    ("nnodes", "num_machines"),
    ("node_rank", "machine_rank"),
    ("hostfile", "deepspeed_hostfile"),
    ("rdzv_endpoint", "main_process_ip"),
    ("rdzv_endpoint", "main_process_port"),
)
_NEED_DEEPSPEED = (
    "deepspeed_config_file",
    "zero_stage",
    "gradient_clipping",
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "deepspeed_multinode_launcher",
)
_DYNAMO_LATER = ("dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation")
_OFFLOAD = (
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
)


@dataclass(frozen=True)
class Launch:
    """What will be started.

    `hosts`: of the hostfile, or empty. `notes`: options that have no effect, to be said.
    """

    plan: LaunchPlan
    hosts: tuple[Host, ...] = ()
    notes: tuple[str, ...] = ()


def resolve(flags: Flags, visible_gpus: Callable[[], int]) -> Launch:
    """Check the flags and make the plan.

    Args:
        flags: after the file was merged in.
        visible_gpus: asked only when the number of ranks depends on it.

    Raises:
        ConfigError: flags that contradict each other or do not fit.
        NotYetSupported: a flag whose capability has not landed.
    """
    _refuse(flags)
    environment = handed_on(flags)
    hosts: tuple[Host, ...] = ()
    hostfile = flags.hostfile or flags.deepspeed_hostfile
    if hostfile is None:
        plan = _plan(flags, environment, visible_gpus)
    else:
        plan, found = _hostfile_plan(flags, hostfile)
        hosts = tuple(found)
    plan = replace(
        plan,
        environment=environment,
        threads=flags.num_cpu_threads_per_process,
        monitor_interval=flags.monitor_interval or plan.monitor_interval,
        no_python=bool(flags.no_python),
    )
    return Launch(plan, hosts, tuple(_notes(flags)))


def handed_on(flags: Flags) -> dict[str, str]:
    """The environment variables of the ranks: what the script's Accelerator reads, and which GPUs it sees."""
    cpu = True if flags.cpu or flags.use_cpu else None
    values: dict[str, object] = {**vars(flags), "cpu": cpu}
    if flags.deepspeed_config_file is not None:
        values["deepspeed_config_file"] = os.path.abspath(flags.deepspeed_config_file)
    environment = written(values)
    if cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif flags.gpu_ids is not None and flags.gpu_ids != "all":
        environment["CUDA_VISIBLE_DEVICES"] = _gpu_ids(flags.gpu_ids)
    return environment


def _refuse(flags: Flags) -> None:
    values = vars(flags)
    for one, other in _SAME:
        if values[one] is not None and values[other] is not None:
            raise ConfigError(f"--{one} {values[one]} and --{other} {values[other]}: give one of them")
    if flags.cpu or flags.use_cpu:
        for name in ("gpu_ids", "multi_gpu"):
            if values[name] is not None:
                raise ConfigError(f"--cpu and --{name}: the ranks run on the CPU or on GPUs; drop one of them")
    for name in _NEED_DEEPSPEED:
        if values[name] is not None and not flags.use_deepspeed:
            raise ConfigError(f"--{name} {values[name]}: has an effect with --use_deepspeed only; add it")
    for name in _OFFLOAD:
        if str(values[name] or "none").lower() != "none":
            raise NotYetSupported(f"--{name} {values[name]}: offload has not landed yet; write none, or leave it out")
    for name in _DYNAMO_LATER:
        if values[name]:
            raise NotYetSupported(f"--{name}: not handed on yet; pass it to torch.compile in the script")
    if (flags.dynamo_mode or "default") != "default":
        raise NotYetSupported(
            f"--dynamo_mode {flags.dynamo_mode}: not handed on yet; pass it to torch.compile in the script"
        )
    path = flags.deepspeed_config_file
    if path is not None and not path.is_file():
        raise ConfigError(f"--deepspeed_config_file: no such file: {path}")
    if flags.module and flags.no_python:
        raise ConfigError("--module and --no_python: a module is run by Python; drop one of them")


def _plan(flags: Flags, environment: dict[str, str], visible_gpus: Callable[[], int]) -> LaunchPlan:
    nodes = flags.nnodes or str(flags.num_machines or 1)
    rank = flags.machine_rank if flags.node_rank is None else flags.node_rank
    endpoint = flags.rdzv_endpoint or _endpoint(flags, nodes)
    name = "node-rank" if flags.machine_rank is None else "machine_rank"
    if nodes == "1" and endpoint is not None and rank is None:
        rank = 0
    if flags.rdzv_backend == "c10d":
        rank = None
    elif flags.rdzv_backend == "static" and endpoint is not None and rank is None:
        raise ConfigError("--rdzv_backend static: add --machine_rank, the number of this node from 0")
    if flags.num_machines is not None and rank is not None and not 0 <= rank < flags.num_machines:
        raise ConfigError(f"--{name} {rank}: expected 0 to {flags.num_machines - 1} with --num_machines {nodes}")
    if flags.nproc is not None:
        nproc = flags.nproc
    elif flags.num_processes is not None:
        nproc = _share(flags.num_processes, nodes)
    else:
        hidden = environment.get("CUDA_VISIBLE_DEVICES")
        gpus = visible_gpus() if hidden is None else len([item for item in hidden.split(",") if item])
        nproc = max(1, gpus)
    return plan_nodes(
        nproc=nproc,
        nnodes=nodes,
        node_rank=rank,
        rdzv_endpoint=endpoint,
        rdzv_id=flags.rdzv_id or "shardwise",
        max_restarts=flags.max_restarts or 0,
    )


def _endpoint(flags: Flags, nodes: str) -> str | None:
    port = flags.main_process_port
    if flags.main_process_ip is None:
        if nodes != "1" and flags.num_machines is not None:
            raise ConfigError(
                f"--num_machines {nodes}: the nodes need a place to meet; add --main_process_ip HOST, that of rank 0"
            )
        return f"127.0.0.1:{port}" if port and nodes == "1" else None
    if nodes == "1" and port == 0:
        return None
    if port == 0:
        raise ConfigError("--main_process_port 0: a free port is for one node; several need the same number")
    host = flags.main_process_ip
    return f"[{host}]:{port or DEFAULT_PORT}" if ":" in host else f"{host}:{port or DEFAULT_PORT}"


def _share(total: int, nodes: str) -> int:
    if not nodes.isdigit():
        raise ConfigError(f"--num_processes {total}: with --nnodes {nodes}, give the ranks of a node: --nproc")
    count = max(1, int(nodes))
    if total % count:
        raise ConfigError(
            f"--num_processes {total}: all ranks together, which {count} nodes cannot share evenly; give --nproc on "
            "each node"
        )
    return total // count


def _hostfile_plan(flags: Flags, hostfile: Path) -> tuple[LaunchPlan, list[Host]]:
    for name in ("nproc", "num_processes", "nnodes", "num_machines"):
        value = getattr(flags, name)
        if value is not None:
            raise ConfigError(f"--{name} {value}: the hostfile gives this; drop --{name} or --hostfile")
    if flags.rdzv_backend == "c10d":
        raise ConfigError("--rdzv_backend c10d: the hostfile numbers the nodes; drop one of them")
    endpoint = flags.rdzv_endpoint
    if endpoint is None and (flags.main_process_ip is not None or flags.main_process_port):
        host = flags.main_process_ip or read_hostfile(hostfile)[0].name
        endpoint = f"{host}:{flags.main_process_port or DEFAULT_PORT}"
    return plan_hostfile(
        hostfile,
        node_rank=flags.machine_rank if flags.node_rank is None else flags.node_rank,
        rdzv_endpoint=endpoint,
        rdzv_id=flags.rdzv_id or "shardwise",
        max_restarts=flags.max_restarts or 0,
    )


def _gpu_ids(text: str) -> str:
    ids = [item.strip() for item in text.split(",") if item.strip()]
    if not ids or not all(item.isdigit() or item.startswith(("GPU-", "MIG-")) for item in ids):
        raise ConfigError(f"--gpu_ids {text}: expected numbers, as 0,1, or all; --cpu is for none")
    if len(set(ids)) < len(ids):
        raise ConfigError(f"--gpu_ids {text}: a GPU is named twice")
    return ",".join(ids)


def _notes(flags: Flags) -> list[str]:
    notes = []
    if flags.multi_gpu:
        notes.append("--multi_gpu has no effect: several ranks use a GPU each anyway; --num_processes says how many")
    if flags.same_network:
        notes.append("--same_network has no effect: --main_process_ip has to be reachable from every node")
    if flags.main_training_function is not None:
        notes.append("--main_training_function has no effect: the script is run as it is")
    if flags.rdzv_backend == "c10d" and (flags.machine_rank or flags.node_rank):
        notes.append("--machine_rank has no effect with --rdzv_backend c10d, which numbers the nodes as they arrive")
    return notes
