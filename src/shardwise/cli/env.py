"""`shardwise env`: what a bug report has to say about a machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise import __version__
from shardwise.cli.places import default_config_file
from shardwise.cli.plan import available_cores

PACKAGES = (
    "numpy",
    "pydantic",
    "safetensors",
    "transformers",
    "datasets",
    "peft",
    "torchdata",
    "tensorboard",
    "wandb",
    "mlflow",
    "comet-ml",
    "trackio",
    "accelerate",
    "deepspeed",
)
GIB = 2**30


def command(
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of lines.")] = False,
    config_file: Annotated[
        Path | None,
        typer.Option("--config_file", "--config-file", metavar="FILE", help="Show this one.", show_default=False),
    ] = None,
) -> None:
    """Print a report of this installation, to be pasted in a bug report."""
    facts = collect(config_file)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            typer.echo(f"- {name}: " + (", ".join(f"{key} {item}" for key, item in value.items()) or "none"))
        elif isinstance(value, list):
            typer.echo(f"- {name}:" + ("".join(f"\n    {line}" for line in value) or " none"))
        else:
            typer.echo(f"- {name}: {value}")


def collect(config_file: Path | None = None) -> dict[str, Any]:
    """The facts, by the name that is printed."""
    import psutil
    import torch

    memory = psutil.virtual_memory()
    source = config_file or default_config_file(os.environ)
    return {
        "shardwise": __version__,
        "Python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda or "not in this torch"),
        "NCCL": _nccl(),
        "distributed backends": ", ".join(_backends()) or "none",
        "CPU": f"{available_cores()} of {os.cpu_count()} cores",
        "memory": f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} free",
        "GPUs": _gpus(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "variables": _variables(),
        "config file": "none" if source is None else str(source),
        "config": [] if source is None else _lines(source),
    }


def _nccl() -> str:
    import torch

    if not torch.cuda.is_available():
        return "not usable: no visible GPU"
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(str(part) for part in version)


def _backends() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    return [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]


def _gpus() -> list[str]:
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB, compute {gpu.major}.{gpu.minor}" for gpu in found]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _variables() -> list[str]:
    # Settings only: a prefix list, so that no token is ever pasted.
    prefixes = ("ACCELERATE_", "OMP_", "NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_", "MASTER_")
    return [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(prefixes)]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        return [f"cannot be read: {error}"]
