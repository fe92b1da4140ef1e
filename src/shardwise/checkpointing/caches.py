"""Hugging Face's key-value caches among a block's arguments."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn


def has_cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether one of the arguments is a cache."""
    kind = _kind()
    return kind is not None and any(isinstance(value, kind) for value in (*args, *kwargs.values()))


class Caches:
    """Takes empty caches out of a block's arguments in training, where nothing reads them afterwards.

    A block that runs twice would fill them twice; and each block would be compiled by itself, because a cache is asked
    for the block's own layer.

    Attributes:
        dropped: whether there were any.
        filled: one holds keys for this block already (a prefix), so that none was dropped.
    """

    def __init__(self, block: nn.Module) -> None:
        self.dropped = False
        self.filled = False
        self._block = block

    def dropped_from(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with None for each cache; as they are if one is filled."""
        kind = _kind()
        if kind is None or getattr(self._block, "_can_checkpoint_with_cache", False):
            return args, kwargs
        found = [value for value in (*args, *kwargs.values()) if isinstance(value, kind)]
        self.filled = any(self._length(cache) > 0 for cache in found)
        self.dropped = bool(found) and not self.filled
        if not self.dropped:
            return args, kwargs
        named = {name: None if isinstance(value, kind) else value for name, value in kwargs.items()}
        if named.get("use_cache"):
            named["use_cache"] = False
        return tuple(None if isinstance(value, kind) else value for value in args), named

    def _length(self, cache: Any) -> int:
        indices = (getattr(m, "layer_idx", None) for m in self._block.modules())
        index = next((i for i in indices if isinstance(i, int)), 0)
        return int(cache.get_seq_length(index))


def _kind() -> type | None:
    """The class of caches; None where nobody has imported it."""
    return getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
