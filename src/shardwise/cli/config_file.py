"""The file of `shardwise launch --config_file`: the keys of Accelerate's default_config.yaml, checked.

This module imports pydantic and PyYAML; the command line imports it when a file is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from shardwise.cli.flags import Flags
from shardwise.cli.refused import refused
from shardwise.config.names import close_name, known_keys
from shardwise.errors import ConfigError

_OTHER_TYPES = {
    "FSDP": "FSDP is not used here; write DEEPSPEED, and zero_stage: 3 in deepspeed_config",
    "MEGATRON_LM": "Megatron-LM is not used here; write DEEPSPEED",
    "TPU": "TPUs are not supported",
    "XLA": "TPUs are not supported",
}

# What the ds_config file says itself: beside deepspeed_config_file, one of the two would be ignored.
_IN_THE_DS_CONFIG = (
    "zero_stage",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
)


def _word(value: object) -> object:
    # YAML reads an unquoted `no` as false, and `gpu_ids: 0` as a number.
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else value


def _lower(value: object) -> object:
    value = _word(value)
    return value.lower() if isinstance(value, str) else value


def _upper(value: object) -> object:
    value = _word(value)
    return value.upper() if isinstance(value, str) else value


def _unset(value: object) -> object:
    return None if isinstance(value, str) and value.lower() in ("auto", "none", "null") else value


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number, not a boolean")
    return _unset(value)


Text = Annotated[str, BeforeValidator(_word)]
Integer = Annotated[int, BeforeValidator(_number)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DynamoSection(_Section):
    """`dynamo_config`; the keys may also be written without `dynamo_`."""

    dynamo_backend: Annotated[str, BeforeValidator(_lower)] = "no"
    dynamo_mode: Text | None = None
    dynamo_use_fullgraph: bool = False
    dynamo_use_dynamic: bool = False
    dynamo_use_regional_compilation: bool = False


class DeepSpeedSection(_Section):
    """`deepspeed_config`: a ds_config file, or the few settings that make one."""

    deepspeed_config_file: Annotated[str | None, BeforeValidator(_unset)] = None
    zero_stage: Annotated[Integer | None, Field(ge=0, le=3)] = None
    gradient_accumulation_steps: Annotated[int | None, BeforeValidator(_number), Field(ge=1)] = None
    gradient_clipping: Annotated[float | None, BeforeValidator(_number), Field(ge=0)] = None
    offload_optimizer_device: Text | None = None
    offload_param_device: Text | None = None
    offload_optimizer_nvme_path: Text | None = None
    offload_param_nvme_path: Text | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    deepspeed_hostfile: Text | None = None
    deepspeed_multinode_launcher: Annotated[Literal["standard", "nossh"], BeforeValidator(_lower)] | None = None


class LaunchFile(_Section):
    """The whole file. `gradient_accumulation_steps` at the top is ours, for a run without DeepSpeed."""

    compute_environment: Annotated[Literal["LOCAL_MACHINE"], BeforeValidator(_upper)] = "LOCAL_MACHINE"
    distributed_type: (
        Annotated[Literal["NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED"], BeforeValidator(_upper)] | None
    ) = None
    mixed_precision: Annotated[Literal["no", "fp16", "bf16"], BeforeValidator(_lower)] | None = None
    use_cpu: bool = False
    debug: bool = False
    num_processes: Annotated[Integer | None, Field(ge=1)] = None
    num_machines: Annotated[Integer | None, Field(ge=1)] = None
    machine_rank: Annotated[Integer | None, Field(ge=0)] = None
    gpu_ids: Text | None = None
    main_process_ip: Text | None = None
    main_process_port: Annotated[Integer | None, Field(ge=0, le=65535)] = None
    rdzv_backend: Annotated[Literal["static", "c10d"], BeforeValidator(_lower)] | None = None
    same_network: bool = True
    main_training_function: Text | None = None
    gradient_accumulation_steps: Annotated[Integer | None, Field(ge=1)] = None
    dynamo_config: DynamoSection = DynamoSection()
    deepspeed_config: DeepSpeedSection = DeepSpeedSection()


def load(path: Path) -> LaunchFile:
    """Read a file.

    Args:
        path: JSON if its name ends in `.json`, else YAML.

    Raises:
        ConfigError: it cannot be read, or a key or value is not known; with the path of each.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: cannot be read: {error}; `shardwise config` writes one") from error
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ConfigError(f"config file {path}: not {kind}: {' '.join(str(error).split())}") from error
    return check(content, str(path))


def check(content: object, name: str) -> LaunchFile:
    """Check what a file holds.

    Args:
        content: its keys and values.
        name: the file, for messages.

    Raises:
        ConfigError: a key or value is not known; with the path of each.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"config file {name}: expected keys and values, got {type(content).__name__}")
    problems: list[str] = []
    found = _check(_modern(content, problems), problems)
    if found is None or problems:
        head = f"config file {name}: "
        raise ConfigError(head + problems[0] if len(problems) == 1 else "\n  ".join([head.rstrip(), *problems]))
    return found


def _check(content: dict[str, Any], problems: list[str]) -> LaunchFile | None:
    try:
        found = LaunchFile.model_validate(content)
    except ValidationError as error:
        problems += [_say(item) for item in error.errors()]
        return None
    given = found.deepspeed_config.model_fields_set
    both = [name for name in _IN_THE_DS_CONFIG if name in given]
    if found.deepspeed_config.deepspeed_config_file is not None and both:
        problems.append(
            f"deepspeed_config: deepspeed_config_file already says {', '.join(both)}; remove them here and write them "
            "in the ds_config"
        )
    if given and found.distributed_type not in (None, "DEEPSPEED"):
        problems.append(
            f"deepspeed_config: needs distributed_type: DEEPSPEED, not {found.distributed_type}; remove one of them"
        )
    return found


def _modern(content: Mapping[object, Any], problems: list[str]) -> dict[str, Any]:
    """The content with older spellings rewritten, and without keys of what is not done here that ask for nothing."""
    kept: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key)
        row = refused(name)
        if name == "distributed_type" and (reason := _other_type(value)):
            problems.append(f"distributed_type: {reason}")
        elif row is None:
            kept[name] = value
        elif not _asks_for_nothing(value):
            problems.append(f"{name}: {row.why}")
    if kept.get("num_processes") == -1:  # Accelerate's "to be given on the command line".
        del kept["num_processes"]
    if kept.pop("fp16", False):
        kept.setdefault("mixed_precision", "fp16")
    if "dynamo_backend" in kept:
        kept.setdefault("dynamo_config", {"dynamo_backend": kept["dynamo_backend"]})
        del kept["dynamo_backend"]
    for name in ("dynamo_config", "deepspeed_config"):
        section = kept.get(name, {})
        if section is None:
            kept[name] = section = {}
        if isinstance(section, dict):
            kept[name] = _section(name, section, problems)
    return kept


def _section(name: str, section: Mapping[object, Any], problems: list[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in section.items():
        own = str(key)
        if name == "dynamo_config":
            kept[own if own.startswith("dynamo_") else f"dynamo_{own}"] = value
            continue
        row = None if own in DeepSpeedSection.model_fields else refused(own)
        if row is None:
            kept[own] = value
        elif not _asks_for_nothing(value):
            problems.append(f"{name}.{own}: {row.why}")
    return kept


def _other_type(value: object) -> str | None:
    name = str(_upper(value))
    if name.startswith("MULTI_") and name not in ("MULTI_CPU", "MULTI_GPU"):
        return f"{name}: the ranks run on CPUs or NVIDIA GPUs; write MULTI_CPU or MULTI_GPU"
    return f"{name}: {_OTHER_TYPES[name]}" if name in _OTHER_TYPES else None


def _asks_for_nothing(value: object) -> bool:
    if isinstance(value, dict):
        return all(_asks_for_nothing(item) for item in value.values())
    return value in (None, False, "", "no", "none", "false") or value == []


def _say(item: Any) -> str:
    """One line for one of pydantic's errors."""
    path = [str(part) for part in item["loc"]]
    where = ".".join(path)
    if item["type"] == "extra_forbidden":
        sections: dict[str, type[BaseModel]] = {"dynamo_config": DynamoSection, "deepspeed_config": DeepSpeedSection}
        section = sections.get(path[0], LaunchFile) if len(path) > 1 else LaunchFile
        hint = close_name(path[-1], section.model_fields)
        if not hint and section is LaunchFile and path[-1] in DeepSpeedSection.model_fields:
            hint = "; it belongs in deepspeed_config"
        if section is DeepSpeedSection and any(path[-1] in keys for keys in known_keys().values()):
            hint = "; it belongs in a ds_config: write one, and name it as deepspeed_config_file"
        return f"{where}: unknown key{hint or '; remove it'}"
    return f"{where}: {item['input']!r}: {item['msg'][:1].lower()}{item['msg'][1:]}"


def as_flags(file: LaunchFile) -> dict[str, Any]:
    """The values of a file by the names of the flags; None where it says nothing."""
    deepspeed = file.deepspeed_config.model_dump()
    values: dict[str, Any] = {
        **file.model_dump(
            exclude={
                "compute_environment",
                "distributed_type",
                "dynamo_config",
                "deepspeed_config",
                "same_network",
                "main_training_function",
                "gradient_accumulation_steps",
            }
        ),
        **{name: value or None for name, value in file.dynamo_config.model_dump().items()},
        **deepspeed,
        "use_deepspeed": file.distributed_type == "DEEPSPEED" or bool(file.deepspeed_config.model_fields_set),
        "gradient_accumulation_steps": deepspeed["gradient_accumulation_steps"] or file.gradient_accumulation_steps,
    }
    if file.distributed_type == "MULTI_CPU":
        values["use_cpu"] = True
    if values["use_cpu"] and values["gpu_ids"] == "all":
        values["gpu_ids"] = None
    if "dynamo_backend" not in file.dynamo_config.model_fields_set:
        values["dynamo_backend"] = None
    for name in ("deepspeed_config_file", "deepspeed_hostfile"):
        values[name] = None if values[name] is None else Path(values[name])
    for name in ("zero3_init_flag", "zero3_save_16bit_model"):
        values[name] = None if values[name] is None else str(values[name]).lower()
    for name in ("use_cpu", "debug", "use_deepspeed"):
        values[name] = values[name] or None
    return values


# What was typed (any of the first) replaces what the file says about the same thing (all of the second).
_REPLACES = (
    (("nproc", "num_processes", "hostfile", "deepspeed_hostfile"), ("num_processes",)),
    (("nnodes", "num_machines", "hostfile", "deepspeed_hostfile"), ("num_machines",)),
    (("hostfile", "nnodes", "num_machines", "nproc", "num_processes"), ("deepspeed_hostfile",)),
    (("node_rank", "machine_rank", "hostfile", "deepspeed_hostfile"), ("machine_rank",)),
    (("rdzv_endpoint", "hostfile", "deepspeed_hostfile"), ("main_process_ip", "main_process_port")),
    (("cpu", "use_cpu"), ("gpu_ids",)),
    (("gpu_ids", "multi_gpu"), ("use_cpu",)),
    (("deepspeed_config_file",), _IN_THE_DS_CONFIG),
)


def merge(typed: Flags, file: LaunchFile) -> Flags:
    """What was typed, and from the file what was not."""
    given = {f.name for f in fields(Flags) if getattr(typed, f.name) is not None}
    values = {name: value for name, value in as_flags(file).items() if name not in given and value is not None}
    for ours, theirs in _REPLACES:
        if given.intersection(ours):
            values = {name: value for name, value in values.items() if name not in theirs}
    if typed.num_machines == 1 or typed.nnodes == "1":
        values = {name: value for name, value in values.items() if name not in ("machine_rank", "main_process_ip")}
    return replace(typed, **values)
