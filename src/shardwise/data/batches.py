"""What a batch and a model's output look like."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from shardwise.errors import ShardingError


def call(model: nn.Module, batch: Any) -> Any:
    """Give a batch to a model: a dict as keywords, a tuple or list as positions, anything else as it is."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model returned.

    Raises:
        ShardingError: there is none.
    """
    if isinstance(output, torch.Tensor):
        return output
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, torch.Tensor):
        raise ShardingError(
            f"train_batch needs a model that returns its loss (a tensor, `.loss`, or first in a tuple); got "
            f"{type(output).__name__}."
        )
    return found


def repeat(loader: DataLoader[Any]) -> Iterator[Any]:
    """Batches without end, shuffled anew in each epoch."""
    epoch = 0
    while True:
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def to_device(value: Any, device: torch.device, non_blocking: bool = True) -> Any:
    """Tensors in nested lists, tuples and dicts, on a device."""
    return _mapped(value, lambda t: t.to(device, non_blocking=non_blocking))


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in nested lists, tuples and dicts, in another dtype."""
    return _mapped(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {k: _mapped(v, change) for k, v in value.items()}
    if isinstance(value, Mapping):
        changed = {k: _mapped(v, change) for k, v in value.items()}
        if all(changed[k] is v for k, v in value.items()):
            return value
        made: Any = copy.copy(value)  # keeps its class, and what else it holds
        for key, part in changed.items():
            made[key] = part
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(v, change) for v in value))
    if isinstance(value, tuple | list):
        return type(value)(_mapped(v, change) for v in value)
    return value
