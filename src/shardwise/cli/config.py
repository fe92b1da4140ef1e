"""`shardwise config`: ask the few questions that matter, and write the file that `shardwise launch` reads."""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.flags import one_of
from shardwise.cli.launch import visible_gpus
from shardwise.cli.places import config_path
from shardwise.cli.plan import DEFAULT_PORT
from shardwise.errors import ConfigError
from shardwise.handed_on import PRECISIONS


def command(
    what: Annotated[
        str | None,
        typer.Argument(metavar="[default]", help="Ask nothing: what this machine has.", show_default=False),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config_file",
            "--config-file",
            metavar="FILE",
            help="Where to write (default: the file that is read when none is named).",
            show_default=False,
        ),
    ] = None,
    mixed_precision: Annotated[
        str | None,
        typer.Option(
            "--mixed_precision",
            "--mixed-precision",
            metavar="NAME",
            help="no, fp16 or bf16; not asked for then.",
            callback=one_of(*PRECISIONS),
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
) -> None:
    """Write the settings of `shardwise launch` to a YAML file, with the keys of Accelerate's default_config.yaml."""
    path = config_file or config_path(os.environ)
    if what not in (None, "default"):
        _fail(f"{what}: expected nothing, or default")
    if path.exists() and not force:
        if what == "default":
            _fail(f"{path} exists and is left alone; --force writes over it")
        typer.confirm(f"{path} exists. Write over it?", abort=True)
    gpus = visible_gpus()
    content = defaults(gpus, mixed_precision) if what == "default" else ask(gpus, mixed_precision)
    try:
        write(path, content)
    except (OSError, ConfigError) as error:
        _fail(str(error))
    typer.echo(f"written: {path}")
    named = [] if config_file is None else ["--config_file", str(path)]
    typer.echo(f"start with: {shlex.join(['shardwise', 'launch', *named])} SCRIPT")


def defaults(gpus: int, mixed_precision: str | None = None) -> dict[str, Any]:
    """The settings that ask for nothing but what the machine has.

    Args:
        gpus: GPUs that are visible.
        mixed_precision: `no`, `fp16` or `bf16`.
    """
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if gpus > 1 else "NO",
        "use_cpu": gpus == 0,
        "num_machines": 1,
        "num_processes": max(1, gpus),
        "mixed_precision": mixed_precision or "no",
    }


def ask(gpus: int, mixed_precision: str | None = None) -> dict[str, Any]:
    """Ask on the terminal.

    Args:
        gpus: GPUs that are visible here.
        mixed_precision: not asked for when it is given.
    """
    content = defaults(gpus, mixed_precision)
    machines = _number("How many machines", 1, int, least=1)
    content["num_machines"] = machines
    if machines > 1:
        content["machine_rank"] = _number("Number of this machine, from 0", 0, int, least=0, most=machines - 1)
        content["main_process_ip"] = typer.prompt("Name or address of machine 0")
        content["main_process_port"] = _number("Its port", DEFAULT_PORT, int, least=1, most=65535)
    use_cpu = gpus == 0 or not typer.confirm(f"Use GPUs ({gpus} visible here)?", default=True)
    content["use_cpu"] = use_cpu
    least = "in all, on all machines" if machines > 1 else "in all"
    default = machines * (1 if use_cpu else gpus)
    total = _number(f"How many processes {least}", default, int, least=machines, multiple=machines)
    content["num_processes"] = total
    if total > 1:
        content["distributed_type"] = "MULTI_CPU" if use_cpu else "MULTI_GPU"
    else:
        content["distributed_type"] = "NO"
    if mixed_precision is None:
        content["mixed_precision"] = _choice("Mixed precision", PRECISIONS, "no")
    _ask_training(content)
    return content


def _ask_training(content: dict[str, Any]) -> None:
    zero: dict[str, Any] = {}
    file = _existing_file("A ds_config.json to train by (empty for none)")
    if file is not None:
        zero["deepspeed_config_file"] = file
    else:
        stage = _choice("ZeRO stage, or none", ("none", "0", "1", "2", "3"), "none")
        if stage != "none":
            zero["zero_stage"] = int(stage)
        steps = _number("Micro-batches of an update (gradient accumulation)", 1, int, least=1)
        clip = _number("Largest norm of the gradient (0: no clipping)", 0.0, float, least=0) if zero else 0.0
        if zero:
            zero |= {"gradient_accumulation_steps": steps, "gradient_clipping": clip}
        elif steps > 1:
            content["gradient_accumulation_steps"] = steps
    if zero:
        content["distributed_type"] = "DEEPSPEED"
        content["deepspeed_config"] = zero


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a file that `shardwise launch` reads; it is checked before anything is written.

    Raises:
        ConfigError: the settings are not what a file may hold.
    """
    yaml = importlib.import_module("yaml")
    config_file = importlib.import_module("shardwise.cli.config_file")
    config_file.check(content, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _number(
    question: str,
    default: Any,
    kind: Callable[[str], Any],
    *,
    least: float,
    most: float | None = None,
    multiple: int = 1,
) -> Any:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text}: expected a number") from None
        if not value >= least or (most is not None and value > most) or value == float("inf"):
            raise typer.BadParameter(f"{text}: expected {least} {'or more' if most is None else f'to {most}'}")
        if multiple > 1 and value % multiple:
            raise typer.BadParameter(f"{text}: expected a multiple of {multiple}, the same on every machine")
        return value

    return typer.prompt(question, default=default, value_proc=read)


def _choice(question: str, choices: tuple[str, ...], default: str) -> str:
    def read(text: str) -> str:
        if text.strip().lower() not in choices:
            raise typer.BadParameter(f"{text}: expected one of {', '.join(choices)}")
        return text.strip().lower()

    answer: str = typer.prompt(f"{question} ({', '.join(choices)})", default=default, value_proc=read)
    return answer


def _existing_file(question: str) -> str | None:
    def read(text: str) -> str:
        if text.strip() and not Path(text.strip()).expanduser().is_file():
            raise typer.BadParameter(f"{text}: no such file")
        return os.path.abspath(Path(text.strip()).expanduser()) if text.strip() else ""

    return typer.prompt(question, default="", show_default=False, value_proc=read) or None


def _fail(text: str) -> None:
    typer.echo(f"shardwise config: {text}", err=True)
    raise typer.Exit(2)
