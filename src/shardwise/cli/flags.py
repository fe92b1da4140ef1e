"""The options of `shardwise launch`: ours and those of `accelerate launch`, each in both spellings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from shardwise.cli.refused import close_option, refused
from shardwise.errors import ConfigError, NotYetSupported
from shardwise.handed_on import PRECISIONS

RANKS, MACHINES, TRAINING, DEEPSPEED, STARTING = (
    "Ranks and devices",
    "Several machines",
    "Training",
    "ZeRO (DeepSpeed)",
    "Starting",
)


def one_of(*choices: str) -> Callable[[str | None], str | None]:
    """A callback that refuses what is not one of the choices, whatever the case."""

    def check(value: str | None) -> str | None:
        if value is None or value.lower() in choices:
            return value if value is None else value.lower()
        why = " (fp8 has not landed yet)" if value.lower() == "fp8" else ""
        raise typer.BadParameter(f"{value!r}: expected one of {', '.join(choices)}{why}")

    return check


def option(name: str, panel: str, text: str, *short: str, **settings: Any) -> Any:
    """An option that is read with underscores and with dashes."""
    spellings = dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"])
    return typer.Option(*short, *spellings, help=text, rich_help_panel=panel, show_default=False, **settings)


@dataclass(frozen=True)
class Flags:
    """What was typed; None where nothing was. The fields are the options."""

    nproc: Annotated[
        int | None,
        # The other two are torchrun's.
        option(
            "nproc",
            RANKS,
            "Ranks on this node (default: the visible GPUs, or 1).",
            "--nproc-per-node",
            "--nproc_per_node",
            min=1,
        ),
    ] = None
    num_processes: Annotated[int | None, option("num_processes", RANKS, "Ranks on all nodes together.", min=1)] = None
    cpu: Annotated[bool | None, option("cpu", RANKS, "Run on the CPU: GPUs are hidden from the ranks.")] = None
    use_cpu: Annotated[bool | None, option("use_cpu", RANKS, "The same as --cpu.")] = None
    gpu_ids: Annotated[
        str | None, option("gpu_ids", RANKS, "GPUs of this node to use, as 0,1, or all.", metavar="IDS")
    ] = None
    multi_gpu: Annotated[
        bool | None, option("multi_gpu", RANKS, "Accepted without effect: several ranks use a GPU each.")
    ] = None
    num_cpu_threads_per_process: Annotated[
        int | None, option("num_cpu_threads_per_process", RANKS, "OMP_NUM_THREADS of each rank.", min=1)
    ] = None

    nnodes: Annotated[str | None, option("nnodes", MACHINES, "Nodes: N, or MIN:MAX (default: 1).")] = None
    num_machines: Annotated[int | None, option("num_machines", MACHINES, "Nodes.", min=1)] = None
    node_rank: Annotated[int | None, option("node_rank", MACHINES, "Number of this node, from 0.")] = None
    machine_rank: Annotated[int | None, option("machine_rank", MACHINES, "The same as --node_rank.")] = None
    rdzv_endpoint: Annotated[
        str | None, option("rdzv_endpoint", MACHINES, "Where several nodes meet.", metavar="HOST:PORT")
    ] = None
    main_process_ip: Annotated[
        str | None, option("main_process_ip", MACHINES, "Where several nodes meet: the host.", metavar="HOST")
    ] = None
    main_process_port: Annotated[
        int | None, option("main_process_port", MACHINES, "And its port; 0: a free one, on one node.", min=0, max=65535)
    ] = None
    rdzv_backend: Annotated[
        str | None,
        option(
            "rdzv_backend",
            MACHINES,
            "static, or c10d: nodes are numbered as they arrive.",
            metavar="NAME",
            callback=one_of("static", "c10d"),
        ),
    ] = None
    rdzv_id: Annotated[str | None, option("rdzv_id", MACHINES, "Name of the job, the same on every node.")] = None
    hostfile: Annotated[
        Path | None,
        option("hostfile", MACHINES, "Lines of 'host slots=N'; gives the nodes and ranks.", metavar="FILE"),
    ] = None
    deepspeed_hostfile: Annotated[
        Path | None, option("deepspeed_hostfile", MACHINES, "The same as --hostfile.", metavar="FILE")
    ] = None
    deepspeed_multinode_launcher: Annotated[
        str | None,
        option(
            "deepspeed_multinode_launcher",
            MACHINES,
            "Only standard: nothing is started on other hosts.",
            metavar="NAME",
            callback=one_of("standard", "nossh"),
        ),
    ] = None
    same_network: Annotated[bool | None, option("same_network", MACHINES, "Accepted without effect.")] = None

    mixed_precision: Annotated[
        str | None,
        option("mixed_precision", TRAINING, "no, fp16 or bf16.", metavar="NAME", callback=one_of(*PRECISIONS)),
    ] = None
    gradient_accumulation_steps: Annotated[
        int | None, option("gradient_accumulation_steps", TRAINING, "Micro-batches of an update.", min=1)
    ] = None
    dynamo_backend: Annotated[
        str | None, option("dynamo_backend", TRAINING, "torch.compile's backend, as inductor, or no.", metavar="NAME")
    ] = None
    dynamo_mode: Annotated[str | None, option("dynamo_mode", TRAINING, "Only default.", metavar="NAME")] = None
    dynamo_use_fullgraph: Annotated[bool | None, option("dynamo_use_fullgraph", TRAINING, "Not yet.")] = None
    dynamo_use_dynamic: Annotated[bool | None, option("dynamo_use_dynamic", TRAINING, "Not yet.")] = None
    dynamo_use_regional_compilation: Annotated[
        bool | None, option("dynamo_use_regional_compilation", TRAINING, "Not yet.")
    ] = None
    debug: Annotated[bool | None, option("debug", TRAINING, "Compare shapes over ranks before collectives.")] = None

    use_deepspeed: Annotated[bool | None, option("use_deepspeed", DEEPSPEED, "Train with ZeRO.")] = None
    deepspeed_config_file: Annotated[
        Path | None, option("deepspeed_config_file", DEEPSPEED, "A ds_config.json.", metavar="FILE")
    ] = None
    zero_stage: Annotated[
        int | None, option("zero_stage", DEEPSPEED, "0 to 3 (default: 2).", min=0, max=3, metavar="N")
    ] = None
    gradient_clipping: Annotated[
        float | None, option("gradient_clipping", DEEPSPEED, "Largest norm of the gradient.", min=0.0)
    ] = None
    offload_optimizer_device: Annotated[
        str | None, option("offload_optimizer_device", DEEPSPEED, "Only none.", metavar="NAME")
    ] = None
    offload_param_device: Annotated[
        str | None, option("offload_param_device", DEEPSPEED, "Only none.", metavar="NAME")
    ] = None
    offload_optimizer_nvme_path: Annotated[
        str | None, option("offload_optimizer_nvme_path", DEEPSPEED, "Only none.", metavar="PATH")
    ] = None
    offload_param_nvme_path: Annotated[
        str | None, option("offload_param_nvme_path", DEEPSPEED, "Only none.", metavar="PATH")
    ] = None
    zero3_init_flag: Annotated[
        str | None,
        option(
            "zero3_init_flag",
            DEEPSPEED,
            "Build the model in shards: true or false.",
            metavar="BOOL",
            callback=one_of("true", "false"),
        ),
    ] = None
    zero3_save_16bit_model: Annotated[
        str | None,
        option(
            "zero3_save_16bit_model",
            DEEPSPEED,
            "Gather 16-bit weights to save them: true or false.",
            metavar="BOOL",
            callback=one_of("true", "false"),
        ),
    ] = None

    config_file: Annotated[
        Path | None, option("config_file", STARTING, "A YAML or JSON file with these settings.", metavar="FILE")
    ] = None
    module: Annotated[bool | None, option("module", STARTING, "SCRIPT is a module name, as in python -m.", "-m")] = None
    no_python: Annotated[bool | None, option("no_python", STARTING, "SCRIPT is a program, not run by Python.")] = None
    max_restarts: Annotated[
        int | None, option("max_restarts", STARTING, "Restarts of all ranks after a failure (default: 0).", min=0)
    ] = None
    monitor_interval: Annotated[
        float | None, option("monitor_interval", STARTING, "Seconds between looks at the ranks.", min=0.001)
    ] = None
    main_training_function: Annotated[
        str | None, option("main_training_function", STARTING, "Accepted without effect.", metavar="NAME")
    ] = None
    quiet: Annotated[bool | None, option("quiet", STARTING, "Do not say what is started.", "-q")] = None


def takes_flags(run: Callable[[str, list[str] | None, Flags], None]) -> Callable[..., None]:
    """`run(target, arguments, flags)` as a typer command whose options are the fields of `Flags`."""

    def command(target: str, arguments: list[str] | None = None, **typed: Any) -> None:
        run(target, arguments, Flags(**typed))

    hints = get_type_hints(Flags, include_extras=True)
    given = inspect.signature(run, eval_str=True).parameters
    parameters = [given["target"], given["arguments"].replace(default=None)]
    parameters += [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(Flags)
    ]
    command.__doc__, command.__name__ = run.__doc__, run.__name__
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__dict__["__signature__"] = inspect.Signature(parameters)
    return command


class LaunchCommand(TyperCommand):
    """Says what to do about an unknown or refused option, in front of the script only."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Look at the options in front of the script, then parse them all."""
        try:
            check_options(args, {name: bool(getattr(p, "is_flag", False)) for p in self.params for name in p.opts})
        except ConfigError as error:
            typer.echo(f"shardwise launch: {error}", err=True)
            raise typer.Exit(2) from None
        return super().parse_args(ctx, args)


def check_options(args: list[str], known: dict[str, bool]) -> None:
    """Refuse an option in front of the script that is not known.

    Args:
        args: the command line.
        known: each option with its dashes, and whether it stands without a value.

    Raises:
        ConfigError: with the reason, or with the option that was probably meant.
    """
    known = {"--help": True, **known}
    at = 0
    while at < len(args) and args[at].startswith("-") and args[at] not in ("-", "--"):
        name, value_follows, _ = args[at].partition("=")
        if not name.startswith("--") and name[:2] in known:  # -m, and what may hang on to it
            at += 1
            continue
        if name not in known:
            row = refused(name)
            if row is not None:
                raise (NotYetSupported if row.later else ConfigError)(f"{name}: {row.why}")
            hint = close_option(name, [option for option in known if option.startswith("--")])
            raise ConfigError(f"{name}: no such option{hint or '; shardwise launch --help lists them'}")
        at += 1 if known[name] or value_follows else 2
