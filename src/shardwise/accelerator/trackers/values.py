"""What is logged, as plain Python values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from shardwise.errors import ConfigError
from shardwise.messages import logger


def on_host(values: Mapping[str, Any], what: str = "values") -> dict[str, Any]:
    """Numbers as Python's own; mappings in it likewise, everything else as it is.

    Tensors and arrays of one element count as numbers. Those on a GPU come in one copy for each dtype: this waits for
    the device.

    Args:
        values: by name.
        what: the parameter's name, for the error.

    Raises:
        ConfigError: ``values`` is no mapping.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{what}: give a dictionary of values by name, not {type(values).__name__}.")
    tensors: dict[tuple[torch.device, torch.dtype], list[tuple[dict[str, Any], str, torch.Tensor]]] = {}

    def converted(part: Mapping[Any, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in part.items():
            name = str(key)
            if isinstance(value, Mapping):
                found[name] = converted(value)
            elif isinstance(value, torch.Tensor) and value.numel() == 1:
                found[name] = None  # keeps its place
                tensors.setdefault((value.device, value.dtype), []).append((found, name, value.detach()))
            elif isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1):
                found[name] = value.item()
            else:
                found[name] = value
        return found

    result = converted(values)
    for entries in tensors.values():
        together = torch.stack([value.reshape(()) for _, _, value in entries]).tolist()
        for (found, name, _), number in zip(entries, together, strict=True):
            found[name] = number
    return result


def flat(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings, named ``outer/inner``; an empty mapping is a value."""
    for key, value in values.items():
        name = f"{within}/{key}" if within else str(key)
        if isinstance(value, Mapping) and value:
            yield from flat(value, name)
        else:
            yield name, value


def parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as services take it that know no nesting: numbers, texts and None; the rest as text."""
    return {name: value if is_simple(value) else as_text(value) for name, value in flat(config)}


def is_simple(value: object) -> bool:
    """Whether it is a number, a text or None."""
    return value is None or isinstance(value, bool | int | float | str)


def as_text(value: object) -> str:
    """Lists and the like as JSON; what JSON has not, as ``str`` gives it."""
    return json.dumps(value, default=str) if isinstance(value, list | tuple | Mapping) else str(value)


class Skipped:
    """Says of each name once that a tracker cannot keep its values.

    Args:
        tracker: its name.
        takes: what it can keep.
    """

    def __init__(self, tracker: str, takes: str) -> None:
        self._tracker = tracker
        self._takes = takes
        self._said: set[str] = set()

    def say(self, name: str, value: object) -> None:
        """The value is not kept."""
        if name not in self._said:
            self._said.add(name)
            logger.warning(
                "%s: %r is not recorded: it takes %s, not %s", self._tracker, name, self._takes, type(value).__name__
            )
