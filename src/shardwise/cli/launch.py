"""`shardwise launch`: start a script on N ranks, here and on other hosts."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.hostfile import Host
from shardwise.cli.plan import (
    LaunchPlan,
    available_cores,
    command_for,
    plan_hostfile,
    plan_nodes,
    threads_per_rank,
)
from shardwise.errors import ConfigError


def command(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, or with -m the module, to run.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="Passed to it untouched.", show_default=False),
    ] = None,
    *,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks on this node (default: the visible GPUs, or 1).", show_default=False),
    ] = None,
    nnodes: Annotated[str | None, typer.Option(help="Nodes: N, or MIN:MAX (default: 1).", show_default=False)] = None,
    node_rank: Annotated[int | None, typer.Option(help="Number of this node, from 0.", show_default=False)] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where several nodes meet.", show_default=False)
    ] = None,
    rdzv_id: Annotated[str, typer.Option(help="Name of the job, the same on every node.")] = "shardwise",
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts of all ranks after a failure.")] = 0,
    hostfile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Lines of 'host slots=N'; gives the nodes and ranks.", show_default=False),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module name, as in python -m.")] = False,
) -> None:
    """Start a script on N ranks with torch's elastic agent.

    Without options: one rank for each visible GPU (CUDA_VISIBLE_DEVICES is respected), or one on the CPU.
    Threads are divided between the ranks unless OMP_NUM_THREADS is set. If a rank fails, its traceback is
    printed last, once.

    Several nodes: the same command on each, with --nnodes and --rdzv-endpoint, and with --node-rank for a
    fixed order. --hostfile derives these from a file in DeepSpeed's format; nothing is started on other
    hosts, the commands to run there are printed.
    """
    worker_argv = ["-m"] * module + [target, *(arguments or [])]
    try:
        if not module and not Path(target).is_file():
            raise ConfigError(f"no such file: {target}")
        if hostfile is None:
            plan = plan_nodes(
                nproc=nproc or default_nproc(),
                nnodes=nnodes or "1",
                node_rank=node_rank,
                rdzv_endpoint=rdzv_endpoint,
                rdzv_id=rdzv_id,
                max_restarts=max_restarts,
            )
        else:
            _refuse_beside_hostfile(nproc=nproc, nnodes=nnodes)
            plan, hosts = plan_hostfile(
                hostfile,
                node_rank=node_rank,
                rdzv_endpoint=rdzv_endpoint,
                rdzv_id=rdzv_id,
                max_restarts=max_restarts,
            )
            _say_commands(plan, hosts, worker_argv)
    except ConfigError as error:
        _say(str(error))
        raise typer.Exit(2) from None
    raise typer.Exit(launch(plan, worker_argv))


def launch(plan: LaunchPlan, worker_argv: Sequence[str]) -> int:
    """Run `[-m] target args...` by the plan, with threads divided between ranks; return the exit code."""
    if plan.threads is None:
        plan = dataclasses.replace(plan, threads=threads_per_rank(plan.nproc, os.environ))
        if plan.threads is not None:
            _say(
                f"{plan.nproc} ranks on {available_cores()} cores: OMP_NUM_THREADS={plan.threads} for each "
                "(set it to choose)"
            )
    gpus = visible_gpus()
    if 0 < gpus < plan.nproc:
        _say(
            f"warning: {plan.nproc} ranks but {gpus} visible GPUs; ranks that use GPUs need one each "
            "(CUDA_VISIBLE_DEVICES= hides them all)"
        )
    # Imported when something runs: it takes torch, and the rest of the command line does not.
    elastic = importlib.import_module("shardwise.cli.elastic")
    code: int = elastic.run(plan, list(worker_argv))
    return code


def visible_gpus() -> int:
    """GPUs that CUDA_VISIBLE_DEVICES and the driver leave visible; 0 on a CPU machine."""
    import torch

    return torch.cuda.device_count()


def default_nproc() -> int:
    """One rank for each visible GPU, or one."""
    return max(1, visible_gpus())


def _refuse_beside_hostfile(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"--{name} {value}: the hostfile gives this; drop --{name} or --hostfile")


def _say_commands(plan: LaunchPlan, hosts: Sequence[Host], worker_argv: Sequence[str]) -> None:
    others = [node for node in range(len(hosts)) if node != plan.node_rank]
    if len(hosts) == 1 or not others:
        return
    _say(f"this is node {plan.node_rank} of {len(hosts)}; nothing is started on the other hosts, run there:")
    for node in others:
        typer.echo(f"  {hosts[node].name}: {command_for(node, hosts, plan, worker_argv)}", err=True)


def _say(text: str) -> None:
    typer.echo(f"shardwise launch: {text}", err=True)
