"""The samples of a nested batch: how many there are, some of them, those of several batches together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardwise.data.placing import PLAIN
from shardwise.errors import ShardwiseError


class UnjoinableError(ShardwiseError, ValueError):
    """Batches that do not fit together along their first dimension."""


@dataclass(frozen=True)
class Layout:
    """How a batch holds its samples.

    Attributes:
        size: how many there are.
        listed: the batch is a list of samples. Else it is made of columns: tensors and arrays with a row for each
            sample, and lists of text or numbers with an entry for each.
    """

    size: int
    listed: bool


def layout_of(batch: Any, expected: int | None = None, listed: bool | None = None) -> Layout | None:
    """How a batch holds its samples, or None if its tensors do not agree on how many there are.

    Args:
        batch: nested mappings, lists and tuples of tensors, arrays, text and numbers.
        expected: how many there should be, which decides where a list of samples could also be one of columns.
        listed: that other batches of the loader are lists of samples, or that they are not.
    """
    rows: set[int] = set()
    entries: set[int] = set()
    _sizes(batch, rows, entries)
    found = rows or entries
    size = next(iter(found)) if len(found) == 1 else None
    a_list = isinstance(batch, list | tuple) and not hasattr(batch, "_fields") and len(batch) > 0
    if listed is not None:
        if listed:
            return Layout(len(batch), True) if a_list else None
        return None if size is None else Layout(size, False)
    if a_list and (size is None or (size != expected and len(batch) == expected)):
        return Layout(len(batch), True)
    return None if size is None else Layout(size, False)


def _sizes(value: Any, rows: set[int], entries: set[int]) -> None:
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim:
            rows.add(value.shape[0])
    elif isinstance(value, Mapping):
        for inner in value.values():
            _sizes(inner, rows, entries)
    elif isinstance(value, list | tuple):
        if _is_column(value):
            entries.add(len(value))
        else:
            for inner in value:
                _sizes(inner, rows, entries)


def _is_column(value: Sequence[Any]) -> bool:
    return not hasattr(value, "_fields") and all(type(v) in PLAIN for v in value)


def cut(batch: Any, layout: Layout, first: int, end: int) -> Any:
    """Some samples of a batch. What has no entry for each sample stays as it is.

    Args:
        batch: which.
        layout: its layout.
        first: of the samples to keep.
        end: after the last one.
    """
    if layout.listed:
        return batch[first:end]
    if isinstance(batch, torch.Tensor | np.ndarray):
        return batch[first:end] if batch.ndim else batch
    if isinstance(batch, list | tuple) and _is_column(batch):
        return batch[first:end] if len(batch) == layout.size else batch
    if isinstance(batch, Mapping | list | tuple):
        return _rebuilt(batch, [cut(v, layout, first, end) for v in _values(batch)])
    return batch


def join(batches: Sequence[Any], layouts: Sequence[Layout]) -> Any:
    """The samples of several batches, one after the other.

    Raises:
        UnjoinableError: they differ in structure, in a dimension other than the first, or in a value that is there
            once for the batch.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if layouts[0].listed:
        return type(first)(sample for batch in batches for sample in batch)
    if any(type(b) is not type(first) for b in batches):
        raise UnjoinableError(f"{sorted({type(b).__name__ for b in batches})} in the same place of several batches")
    if isinstance(first, torch.Tensor | np.ndarray) and first.ndim:
        shapes = {(*b.shape[1:], b.dtype) for b in batches}
        if len(shapes) > 1:
            raise UnjoinableError(f"shapes {[list(b.shape) for b in batches]} in the same place of several batches")
        return torch.cat(list(batches)) if isinstance(first, torch.Tensor) else np.concatenate(batches)
    if isinstance(first, list | tuple) and _is_column(first):
        if all(len(b) == layout.size for b, layout in zip(batches, layouts, strict=True)):
            return type(first)(entry for batch in batches for entry in batch)
    elif isinstance(first, Mapping | list | tuple):
        keys = [list(b) if isinstance(b, Mapping) else len(b) for b in batches]
        if any(k != keys[0] for k in keys):
            raise UnjoinableError(f"batches with {keys} entries")
        columns = zip(*(_values(b) for b in batches), strict=True)
        return _rebuilt(first, [join(column, layouts) for column in columns])
    if not all(_same(first, b) for b in batches[1:]):
        raise UnjoinableError(f"{first!r} and another value in the same place, with no entry for each sample")
    return first


def _same(first: Any, other: Any) -> bool:
    return bool(np.array_equal(first, other)) if isinstance(first, np.ndarray) else bool(first == other)


def _values(batch: Any) -> list[Any]:
    return list(batch.values()) if isinstance(batch, Mapping) else list(batch)


def _rebuilt(like: Any, values: list[Any]) -> Any:
    kind = type(like)
    if isinstance(like, Mapping):
        return kind(zip(like, values, strict=True))
    return kind(*values) if hasattr(kind, "_fields") else kind(values)
