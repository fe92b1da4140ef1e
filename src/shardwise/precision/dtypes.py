"""Dtypes by their ds_config names, and torch's autocast."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Sequence
from typing import Protocol

import torch

from shardwise.errors import ConfigError

_DTYPES = {
    "fp64": torch.float64,
    "float64": torch.float64,
    "double": torch.float64,
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


class Switch(Protocol):
    """A section with ``enabled``."""

    @property
    def enabled(self) -> bool:
        """Whether the section counts."""


class AutocastSection(Switch, Protocol):
    """The ``torch_autocast`` section of a ds_config."""

    @property
    def dtype(self) -> str | None:
        """Name of the dtype of autocast regions."""

    @property
    def lower_precision_safe_modules(self) -> Sequence[str] | None:
        """Modules whose gradients upstream reduces in the lower precision."""


class PrecisionConfig(Protocol):
    """The part of a Config that decides dtypes."""

    @property
    def fp16(self) -> Switch:
        """The ``fp16`` section."""

    @property
    def bf16(self) -> Switch:
        """The ``bf16`` section."""

    @property
    def torch_autocast(self) -> AutocastSection:
        """The ``torch_autocast`` section."""


def torch_dtype(name: str, path: str = "dtype") -> torch.dtype:
    """The dtype called ``name`` (``fp32``, ``float16``, ``bf16``, ..., also ``torch.float16``).

    Args:
        name: the name, in any case.
        path: JSON path for the message.

    Raises:
        ConfigError: no such dtype.
    """
    key = name.casefold().removeprefix("torch.")
    if key in _DTYPES:
        return _DTYPES[key]
    close = difflib.get_close_matches(key, _DTYPES, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"{path}: expected one of {', '.join(_DTYPES)}, got {name!r}.{hint}")


def model_dtype(config: PrecisionConfig) -> torch.dtype | None:
    """The dtype that the model's floating-point parameters are cast to; None leaves them as they are.

    Raises:
        ConfigError: both fp16 and bf16 are on.
    """
    if config.fp16.enabled and config.bf16.enabled:
        raise ConfigError("fp16.enabled and bf16.enabled are both true; a model has one of them. Set one to false.")
    if config.fp16.enabled:
        return torch.float16
    if config.bf16.enabled:
        return torch.bfloat16
    return None


def autocast_context(config: PrecisionConfig, device_type: str) -> contextlib.AbstractContextManager[object]:
    """A new context for one forward: ``torch.autocast`` as the config asks, or nothing when off.

    Args:
        config: the configuration; ``torch_autocast.dtype`` null means the dtype of the parameters if that is 16 bits
            wide, else bfloat16, which needs no loss scale (torch's own default is float16 on a GPU).
        device_type: ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigError: a dtype that autocast does not have.
    """
    section = config.torch_autocast
    if not section.enabled:
        return contextlib.nullcontext()
    given = torch_dtype(section.dtype, "torch_autocast.dtype") if section.dtype else None
    dtype = given or model_dtype(config) or torch.bfloat16
    if dtype not in (torch.float16, torch.bfloat16):
        raise ConfigError(f"torch_autocast.dtype: expected 'fp16' or 'bf16', got {section.dtype!r}.")
    return torch.autocast(device_type, dtype=dtype)
