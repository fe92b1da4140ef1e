"""Refuses, with a sentence, what would break a sharded model: moving, casting, copying, pickling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardingError

# Set as attributes of the module objects, never of their classes; `remove` takes them away again.
_GUARDED = ("_apply", "__reduce_ex__")


class Guards:
    """Guards every module of a model until :meth:`remove`."""

    def __init__(self, model: nn.Module, dtypes: set[torch.dtype], device: torch.device) -> None:
        self._modules = list(model.modules())
        for module in self._modules:
            module.__dict__["_apply"] = _guarded_apply(module, dtypes, device)
            module.__dict__["__reduce_ex__"] = _refuse_copy

    def remove(self) -> None:
        """Make the modules ordinary again."""
        for module in self._modules:
            for name in _GUARDED:
                module.__dict__.pop(name, None)
        self._modules = []


def _guarded_apply(module: nn.Module, dtypes: set[torch.dtype], device: torch.device) -> Callable[..., nn.Module]:
    def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for dtype in dtypes:
            before = torch.empty(0, dtype=dtype, device=device)
            after = fn(before)
            if after.dtype != dtype or after.device != device:
                raise ShardingError(
                    f"this model is sharded by shardwise: its parameters live in flat buffers as {dtype} on {device} "
                    f"and cannot become {after.dtype} on {after.device}. Move or cast the model before "
                    "`shardwise.initialize`, or choose the precision with `bf16`/`fp16` in the configuration."
                )
        return module

    return apply


def _refuse_copy(*_args: Any) -> Any:
    raise ShardingError(
        "this model is sharded by shardwise and cannot be copied or pickled as an object: each rank holds only a part "
        "of it. Use `engine.module_state_dict()` (all ranks together) and load it into a plain model, or copy the "
        "model before `shardwise.initialize`."
    )
