"""The typer application: options of the whole command, and the list of subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise import __version__
from shardwise.cli import config, demo, env, explain, launch, test
from shardwise.cli.flags import LaunchCommand

app = typer.Typer(
    name="shardwise",
    help="Train models too large for one device with the ds_config.json and the loop that you already have.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    # A traceback of ours is a bug report: it is shown whole and plain, not framed and cut to the terminal.
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwise {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


# Options stop at the script: what follows belongs to it, even where it looks like one of ours.
app.command("launch", cls=LaunchCommand, context_settings={"allow_interspersed_args": False})(launch.command)
app.command("config")(config.command)
app.command("env")(env.command)
app.command("test")(test.command)
app.command("demo")(demo.command)
app.command("explain")(explain.command)
