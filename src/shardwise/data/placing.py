"""Batches on the device of their rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# What is surely no batch and holds none: looked up before anything else is asked of a value.
PLAIN = frozenset({str, int, float, bool, bytes, type(None)})


def place(value: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """A nested value with its tensors, and what else can be moved by ``.to``, on a device.

    Lists, tuples, named tuples and mappings keep their type. Text, numbers, None and numpy arrays stay as they are. A
    value that is there already is handed back itself, not copied.

    Args:
        value: a batch.
        device: where to.
        non_blocking: copy without waiting.
    """
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=non_blocking)
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is dict:
        moved = {k: place(v, device, non_blocking) for k, v in value.items()}
        return moved if any(moved[k] is not v for k, v in value.items()) else value
    if isinstance(value, tuple | list):
        parts = [place(v, device, non_blocking) for v in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    if hasattr(value, "to"):
        return _by_itself(value, device, non_blocking)
    if isinstance(value, Mapping):
        return kind({k: place(v, device, non_blocking) for k, v in value.items()})
    return value


def place_on_cpu(value: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """:func:`place` for a batch that most likely is on the CPU already: to see that must cost next to nothing."""
    if isinstance(value, torch.Tensor):
        return value if value.is_cpu else value.to(device)
    kind = type(value)
    if kind is dict or kind is list or kind is tuple:
        for inner in value.values() if kind is dict else value:
            if type(inner) is not torch.Tensor or not inner.is_cpu:
                break
        else:
            return value
    return place(value, device, non_blocking)


def _by_itself(value: Any, device: torch.device, non_blocking: bool) -> Any:
    try:
        return value.to(device, non_blocking=non_blocking)
    except TypeError:  # its `to` knows no such argument
        return value.to(device)
