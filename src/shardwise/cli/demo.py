"""`shardwise demo`: the example training, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.launch import launch, visible_gpus
from shardwise.cli.plan import plan_nodes


def command(
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks (default: 2, or 1 beside a single GPU).", show_default=False),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Optimizer steps (default: the config's schedule).", show_default=False),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Train on this file (default: Python's own source).", show_default=False),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A ds_config.json (default: examples/ds_config.json).", show_default=False),
    ] = None,
) -> None:
    """Train a small byte-level GPT with ZeRO-3 from a ds_config.json: loss, a sample, and memory per rank."""
    examples = examples_folder()
    if examples is None:
        typer.echo(
            "shardwise demo: the examples are part of the source checkout, not of the installed package; "
            "run this from a checkout (pip install -e . there)",
            err=True,
        )
        raise typer.Exit(2)
    for option, path in (("--text", text), ("--config", config)):
        if path is not None and not path.is_file():
            typer.echo(f"shardwise demo: {option}: no such file: {path}", err=True)
            raise typer.Exit(2)
    if nproc is None:
        nproc = 1 if visible_gpus() == 1 else 2
    config = config or examples / "ds_config.json"
    argv = [str(examples / "train_gpt.py"), "--config", str(config)]
    argv += ["--steps", str(steps)] if steps is not None else []
    argv += ["--text", str(text)] if text is not None else []
    subject = "Python's standard library" if text is None else str(text)
    typer.echo(f"Training a byte-level GPT on {subject} with {config.name}, on {nproc} ranks.", err=True)
    typer.echo(f"The same by hand: shardwise launch --nproc {nproc} -- {' '.join(argv)}", err=True)
    raise typer.Exit(launch(plan_nodes(nproc=nproc), argv))


def examples_folder() -> Path | None:
    """The examples of the checkout that this package runs from; None for an installed copy."""
    folder = Path(__file__).resolve().parents[3] / "examples"
    return folder if (folder / "train_gpt.py").is_file() else None
