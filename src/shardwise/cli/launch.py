"""`shardwise launch`: start a script on N ranks, here and on other hosts."""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.flags import Flags, takes_flags
from shardwise.cli.hostfile import Host
from shardwise.cli.places import accelerates_config_file, default_config_file
from shardwise.cli.plan import LaunchPlan, command_for, threads_per_rank
from shardwise.cli.resolve import Launch, resolve
from shardwise.errors import ConfigError


@takes_flags
def command(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, or with -m the module, to run.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="Passed to it untouched.", show_default=False),
    ],
    flags: Flags,
) -> None:
    """Start a script on N ranks with torch's elastic agent.

    Without options: one rank for each visible GPU (CUDA_VISIBLE_DEVICES is respected), or one on the CPU.
    Threads are divided between the ranks unless OMP_NUM_THREADS is set. If a rank fails, its traceback is
    printed last, once.

    The options of `accelerate launch` are understood, with underscores and with dashes. They stand in front of
    the script; what follows it belongs to the script. --config_file gives them in a file, and what is typed wins;
    `shardwise config` writes the file that is read without being named.

    Several nodes: the same command on each, with --nnodes and --rdzv-endpoint, and with --node-rank for a
    fixed order. --hostfile derives these from a file in DeepSpeed's format; nothing is started on other
    hosts, the commands to run there are printed.
    """
    worker_argv = ["-m"] * bool(flags.module) + [target, *(arguments or [])]
    try:
        _check_target(target, flags)
        source, launched = plan_launch(flags)
    except ConfigError as error:
        _say(str(error))
        raise typer.Exit(2) from None
    if launched.hosts:
        _say_commands(launched.plan, launched.hosts, worker_argv)
    for note in launched.notes:
        _say(note)
    raise typer.Exit(launch(launched.plan, worker_argv, quiet=bool(flags.quiet), source=source))


def plan_launch(flags: Flags) -> tuple[Path | None, Launch]:
    """Read the file that is named, or the default one where it exists, and make the plan.

    Raises:
        ConfigError: the file or the flags do not fit.
    """
    source = flags.config_file or default_config_file(os.environ)
    theirs = accelerates_config_file(os.environ)
    if source is None and theirs is not None and not flags.quiet:
        typer.echo(f"shardwise launch: {theirs} is not read unless it is named: --config_file {theirs}", err=True)
    if source is not None:
        # Imported when there is a file: it takes pydantic and PyYAML.
        config_file = importlib.import_module("shardwise.cli.config_file")
        flags = config_file.merge(flags, config_file.load(source))
    return source, resolve(flags, visible_gpus)


def launch(plan: LaunchPlan, worker_argv: Sequence[str], *, quiet: bool = False, source: Path | None = None) -> int:
    """Run `[-m] target args...` by the plan, with threads divided between ranks; return the exit code.

    Args:
        plan: what to start.
        worker_argv: the script or module, and its arguments.
        quiet: do not say what is started.
        source: the file that settings came from, to be said.
    """
    divided = plan.threads is None
    if divided:
        plan = dataclasses.replace(plan, threads=threads_per_rank(plan.nproc, os.environ))
    hidden = plan.environment.get("CUDA_VISIBLE_DEVICES")
    gpus = visible_gpus() if hidden is None else len([item for item in hidden.split(",") if item])
    if not quiet:
        _say(summary(plan, gpus, divided=divided, source=source))
    if 0 < gpus < plan.nproc:
        _say(
            f"warning: {plan.nproc} ranks but {gpus} visible GPUs; ranks that use GPUs need one each (--cpu hides all)"
        )
    # Imported when something runs: it takes torch, and the rest of the command line does not.
    elastic = importlib.import_module("shardwise.cli.elastic")
    code: int = elastic.run(plan, list(worker_argv))
    return code


def summary(plan: LaunchPlan, gpus: int, *, divided: bool = False, source: Path | None = None) -> str:
    """What is started, in a line.

    Args:
        plan: with its threads.
        gpus: that the ranks will see.
        divided: whether the threads were divided here, rather than asked for.
        source: the file that settings came from.
    """
    env = plan.environment
    ranks = f"{plan.nproc} {'process' if plan.nproc == 1 else 'processes'}"
    if plan.max_nodes > 1:
        nodes = str(plan.max_nodes) if plan.min_nodes == plan.max_nodes else f"{plan.min_nodes} to {plan.max_nodes}"
        ranks += f" on this node of {nodes}"
    ids = env.get("CUDA_VISIBLE_DEVICES")
    device = "CPU" if gpus == 0 else f"{gpus} {'GPU' if gpus == 1 else 'GPUs'}" + (f" ({ids})" if ids else "")
    parts = [ranks, device]
    if plan.threads is not None:
        parts.append(f"OMP_NUM_THREADS={plan.threads} for each" + " (set it to choose)" * divided)
    if "ACCELERATE_MIXED_PRECISION" in env:
        precision = env["ACCELERATE_MIXED_PRECISION"]
        parts.append("no mixed precision" if precision == "no" else f"mixed precision {precision}")
    if env.get("ACCELERATE_USE_DEEPSPEED") == "true":
        config = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        stage = env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
        parts.append(f"ZeRO by {config}" if config else f"ZeRO stage {stage or '2 (not given)'}")
    if source is not None:
        parts.append(f"settings from {source}")
    return ", ".join(parts)


def visible_gpus() -> int:
    """GPUs that CUDA_VISIBLE_DEVICES and the driver leave visible; 0 on a CPU machine."""
    import torch

    return torch.cuda.device_count()


def _check_target(target: str, flags: Flags) -> None:
    if flags.module:
        return
    if flags.no_python:
        if shutil.which(target) is None:
            raise ConfigError(f"--no_python: no such program: {target}")
    elif not Path(target).is_file():
        raise ConfigError(f"no such file: {target}")


def _say_commands(plan: LaunchPlan, hosts: Sequence[Host], worker_argv: Sequence[str]) -> None:
    others = [node for node in range(len(hosts)) if node != plan.node_rank]
    if len(hosts) == 1 or not others:
        return
    _say(f"this is node {plan.node_rank} of {len(hosts)}; nothing is started on the other hosts, run there:")
    for node in others:
        typer.echo(f"  {hosts[node].name}: {command_for(node, hosts, plan, worker_argv)}", err=True)


def _say(text: str) -> None:
    typer.echo(f"shardwise launch: {text}", err=True)
