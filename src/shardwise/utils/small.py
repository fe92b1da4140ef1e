"""Small helpers that scripts import from `utils`."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from enum import Enum
from importlib.metadata import version
from types import ModuleType
from typing import Any

from torch.torch_version import TorchVersion

from shardwise.errors import ConfigError

OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


class LoggerType(str, Enum):
    """Names that ``log_with`` takes."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CSV = "csv"


class PrecisionType(str, Enum):
    """Names that ``mixed_precision`` takes."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"

    @classmethod
    def list(cls) -> list[str]:
        """All of them."""
        return [member.value for member in cls]


def compare_versions(library_or_version: str | ModuleType, operation: str, requirement_version: str) -> bool:
    """Whether a package (by its name), or a version, is older or newer than another version.

    Raises:
        ConfigError: an unknown comparison.
    """
    if operation not in OPERATIONS:
        raise ConfigError(f"compare_versions: expected one of {', '.join(OPERATIONS)}, got {operation!r}.")
    text = library_or_version if isinstance(library_or_version, str) else str(library_or_version.__version__)
    found = text if text[:1].isdigit() else version(text)
    # torch's own class compares versions as packaging does.
    return OPERATIONS[operation](TorchVersion(found.partition("+")[0]), requirement_version)


def is_torch_version(operation: str, version: str) -> bool:
    """Whether this torch is older or newer than a version."""
    return compare_versions("torch", operation, version)


def wait_for_everyone() -> None:
    """Return when every process has called this."""
    from shardwise.accelerator.current import current_processes

    current_processes().wait_for_everyone()


def str_to_bool(value: str) -> int:
    """1 for yes, 0 for no.

    Raises:
        ConfigError: neither.
    """
    text = value.lower()
    if text in ("y", "yes", "t", "true", "on", "1"):
        return 1
    if text in ("n", "no", "f", "false", "off", "0"):
        return 0
    raise ConfigError(f"expected yes or no, got {value!r}.")


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """What a variable says, yes or no."""
    return bool(str_to_bool(os.environ.get(key, str(default))))


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Put all values of a nested dict into another, which is returned."""
    for key, value in source.items():
        if isinstance(value, dict) and isinstance(destination.get(key), dict):
            merge_dicts(value, destination[key])
        else:
            destination[key] = value
    return destination
