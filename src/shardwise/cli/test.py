"""`shardwise test`: does this installation train on several processes?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.flags import Flags
from shardwise.cli.launch import launch, plan_launch, visible_gpus
from shardwise.cli.places import default_config_file
from shardwise.errors import ConfigError

SCRIPT = Path(__file__).with_name("self_check.py")


def command(
    num_processes: Annotated[
        int | None,
        typer.Option(
            "--num_processes",
            "--num-processes",
            "--nproc",
            min=1,
            help="Ranks (default: what the config file says, or 2).",
            show_default=False,
        ),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config_file",
            "--config-file",
            metavar="FILE",
            help="Start as this file says (default: the file of `shardwise config`, where it exists).",
            show_default=False,
        ),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="On the CPU, whatever else is there.")] = False,
) -> None:
    """Check this installation: start ranks, pass values between them, train at ZeRO stages 0 and 3 as one process does.

    What is checked is the way that ranks are started and talk; the training is in 32 bits whatever the file says.
    """
    named = config_file or default_config_file(os.environ)
    if named is None:
        num_processes = num_processes or 2
        cpu = cpu or visible_gpus() < num_processes
    try:
        source, launched = plan_launch(Flags(config_file=named, num_processes=num_processes, cpu=cpu or None))
    except ConfigError as error:
        typer.echo(f"shardwise test: {error}", err=True)
        raise typer.Exit(2) from None
    expected = launched.plan.nproc * launched.plan.max_nodes
    raise typer.Exit(launch(launched.plan, [str(SCRIPT), str(expected)], source=source))
