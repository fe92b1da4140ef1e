"""What `shardwise launch` hands on to the script: the environment variables, their flags, and what reads them.

The names are Accelerate's, so that a script started by its launcher, or by a job file that exports them, is understood
as well. On the other side `Accelerator` reads them as the defaults of its arguments: an argument that is given wins.
This file imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.errors import ConfigError

Kind = Literal["text", "switch", "integer", "number"]

PRECISIONS = ("no", "fp16", "bf16")

_TRUE = ("1", "true", "yes", "y", "t", "on")
_FALSE = ("0", "false", "no", "n", "f", "off", "")


@dataclass(frozen=True)
class HandedOn:
    """One value on its way from the command line to the script.

    Attributes:
        variable: the environment variable.
        flag: the option of `shardwise launch`, without its dashes.
        argument: the argument whose default it is.
        kind: how its text is read.
        choices: the texts that are allowed; empty for any.
    """

    variable: str
    flag: str
    argument: str
    kind: Kind = "text"
    choices: tuple[str, ...] = ()


TABLE = (
    HandedOn("ACCELERATE_MIXED_PRECISION", "mixed_precision", "Accelerator(mixed_precision)", choices=PRECISIONS),
    HandedOn("ACCELERATE_USE_CPU", "cpu", "Accelerator(cpu)", "switch"),
    HandedOn(
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "gradient_accumulation_steps",
        "Accelerator(gradient_accumulation_steps)",
        "integer",
    ),
    HandedOn("ACCELERATE_DYNAMO_BACKEND", "dynamo_backend", "Accelerator(dynamo_backend)"),
    HandedOn("ACCELERATE_DEBUG_MODE", "debug", "Accelerator().state.debug", "switch"),
    HandedOn("ACCELERATE_USE_DEEPSPEED", "use_deepspeed", "Accelerator(deepspeed_plugin)", "switch"),
    HandedOn("ACCELERATE_DEEPSPEED_CONFIG_FILE", "deepspeed_config_file", "DeepSpeedPlugin(hf_ds_config)"),
    HandedOn("ACCELERATE_DEEPSPEED_ZERO_STAGE", "zero_stage", "DeepSpeedPlugin(zero_stage)", "integer"),
    HandedOn("ACCELERATE_GRADIENT_CLIPPING", "gradient_clipping", "DeepSpeedPlugin(gradient_clipping)", "number"),
    HandedOn("ACCELERATE_DEEPSPEED_ZERO3_INIT", "zero3_init_flag", "DeepSpeedPlugin(zero3_init_flag)", "switch"),
    HandedOn(
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
        "zero3_save_16bit_model",
        "DeepSpeedPlugin(zero3_save_16bit_model)",
        "switch",
    ),
)

BY_FLAG: Mapping[str, HandedOn] = {row.flag: row for row in TABLE}


def written(values: Mapping[str, object]) -> dict[str, str]:
    """The environment variables for the values of flags; a flag that is absent or None sets nothing."""
    found: dict[str, str] = {}
    for row in TABLE:
        value = values.get(row.flag)
        if value is not None:
            found[row.variable] = str(value).lower() if row.kind == "switch" else str(value)
    return found


def as_flags(environment: Mapping[str, str]) -> list[str]:
    """The options of `shardwise launch` that set these variables, for a command line to show."""
    options: list[str] = []
    for row in TABLE:
        text = environment.get(row.variable)
        if text is None:
            continue
        if row.flag in ("cpu", "use_deepspeed", "debug"):
            options += [f"--{row.flag}"] * (text == "true")
        else:
            options += [f"--{row.flag}", text]
    return options


def read(environment: Mapping[str, str]) -> dict[str, str | bool | int | float]:
    """What the variables say, by the name of the flag; a variable that is not set is absent.

    Raises:
        ConfigError: a variable holds what it cannot mean.
    """
    return {row.flag: _value(row, environment[row.variable].strip()) for row in TABLE if row.variable in environment}


def _value(row: HandedOn, text: str) -> str | bool | int | float:
    lowered = text.lower()
    if row.kind == "switch":
        if lowered in _TRUE or lowered in _FALSE:
            return lowered in _TRUE
        raise ConfigError(
            f"{row.variable}={text}: expected true or false; unset it, or give --{row.flag} to the launcher"
        )
    if row.kind == "text":
        if row.choices and lowered not in row.choices:
            raise ConfigError(f"{row.variable}={text}: expected one of {', '.join(row.choices)}")
        return lowered if row.choices else text
    try:
        return int(text) if row.kind == "integer" else float(text)
    except ValueError:
        kind = "an integer" if row.kind == "integer" else "a number"
        raise ConfigError(f"{row.variable}={text}: expected {kind}") from None
