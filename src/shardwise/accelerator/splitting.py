"""Inputs cut into one part for each process: lists, tensors, data sets, and mappings of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shardwise.accelerator.nested import rebuild_mapping
from shardwise.errors import ConfigError


def split(inputs: Any, process_index: int, num_processes: int, apply_padding: bool = False) -> Any:
    """One process's part of ``inputs``. Nothing is sent: each process cuts out its own.

    Without padding each process gets ``len // n`` consecutive items and the first ``len % n`` processes one more; with
    fewer items than processes, the last processes get an empty part. With padding each gets ``ceil(len / n)``, and what
    is missing at the end is the last item again: so the parts in the order of the processes, cut to ``len(inputs)``,
    are the inputs. Nothing is repeated when the inputs divide evenly, and one process gets ``inputs`` themselves.

    Args:
        inputs: a list, tuple or other sequence, a tensor or numpy array (cut along its first dimension), a
            ``datasets.Dataset``, or a mapping, also nested, of those; all in a mapping must have the same length.
            They are not changed.
        process_index: whose part, from 0.
        num_processes: how many parts.
        apply_padding: give all processes the same number of items.

    Returns:
        A part of the same type.

    Raises:
        ConfigError: something that has no items, or lengths in a mapping that differ.
    """
    if num_processes == 1:
        return inputs
    lengths = dict(_lengths(inputs, "inputs"))
    if len(set(lengths.values())) > 1:
        rows = ", ".join(f"{path} has {length}" for path, length in lengths.items())
        raise ConfigError(f"split_between_processes: all values in a dict must have the same length, but {rows}.")
    length = next(iter(lengths.values()), 0)
    start, end, padding = _bounds(length, process_index, num_processes, apply_padding)
    return _take(inputs, start, end, padding)


def _bounds(length: int, index: int, count: int, apply_padding: bool) -> tuple[int, int, int]:
    """Where the part begins and ends, and how often the last item follows it."""
    if apply_padding:
        each = -(-length // count)
        start, end = min(index * each, length), min((index + 1) * each, length)
        return start, end, each - (end - start)
    each, extras = divmod(length, count)
    start = index * each + min(index, extras)
    return start, start + each + (index < extras), 0


def _lengths(inputs: Any, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(inputs, Mapping):
        for key, value in inputs.items():
            yield from _lengths(value, f"{path}[{key!r}]")
    elif isinstance(inputs, torch.Tensor | np.ndarray) and inputs.ndim == 0:
        raise ConfigError(f"split_between_processes: {path} is a single number, which has no items to share out.")
    elif _has_items(inputs):
        yield path, len(inputs)
    else:
        raise ConfigError(
            f"split_between_processes: {path} is a {type(inputs).__module__}.{type(inputs).__qualname__}; expected a "
            "list, tuple, tensor, numpy array, datasets.Dataset, or a dict of those."
        )


def _has_items(value: Any) -> bool:
    if isinstance(value, str | bytes | bytearray):
        return False
    return isinstance(value, Sequence | torch.Tensor | np.ndarray) or _is_dataset(value)


def _is_dataset(value: Any) -> bool:
    # Somebody who has one has imported the library; nobody else waits for it.
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(value, datasets.Dataset)


def _take(inputs: Any, start: int, end: int, padding: int) -> Any:
    if isinstance(inputs, Mapping):
        return rebuild_mapping(inputs, {key: _take(value, start, end, padding) for key, value in inputs.items()})
    if _is_dataset(inputs):
        return inputs.select([*range(start, end), *[len(inputs) - 1] * padding])
    part = inputs[start:end]
    if not padding:
        return part
    if isinstance(inputs, torch.Tensor):
        return torch.cat([part, inputs[-1:].expand(padding, *inputs.shape[1:])])
    if isinstance(inputs, np.ndarray):
        return np.concatenate([part, np.repeat(inputs[-1:], padding, axis=0)])
    # A slice of a named tuple is a tuple, that of a range a range, which cannot be joined to anything.
    kind = tuple if isinstance(inputs, tuple) else list
    return kind([*part, *[inputs[-1]] * padding])
