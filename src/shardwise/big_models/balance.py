"""Memory limits that give every accelerator about as much of a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardwise.big_models.planning import OFFLOADED
from shardwise.big_models.sizes import compute_module_sizes, get_max_memory
from shardwise.big_models.tensors import class_names


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[int | str, int | float | str] | None = None,
    no_split_module_classes: str | list[str] | tuple[str, ...] | set[str] | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Limits for :func:`infer_auto_device_map` under which every accelerator gets about as much of the model.

    Each gets an equal share and a quarter more than the largest module that stays whole (or the mean layer), since
    layers do not divide evenly; the last keeps its own limit. A single accelerator whose limit was measured here gives
    nine tenths of it, and the rest is for activations.

    Args:
        model, max_memory, no_split_module_classes, dtype, special_dtypes: as for :func:`infer_auto_device_map`.
        low_zero: leave the first accelerator as empty as the others allow, for what else runs there.

    Returns:
        Bytes by device.

    Raises:
        ConfigError: ``max_memory`` cannot be read.
    """
    limits = get_max_memory(max_memory)
    devices = [device for device in limits if device not in OFFLOADED and limits[device] > 0]
    if not devices:
        return limits
    if len(devices) == 1:
        if max_memory is None:
            limits[devices[0]] = limits[devices[0]] * 9 // 10
        return limits
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    total, classes = sizes[""], class_names(no_split_module_classes)
    whole, layers = [0], []
    for name, module in model.named_modules():
        if type(module).__name__ in classes:
            whole.append(sizes.get(name, 0))
        if name in sizes and not list(module.children()):
            layers.append(sizes[name])
    mean = sum(layers) // len(layers) if layers else 0
    share = total // (len(devices) - (1 if low_zero else 0)) + 5 * max(mean, *whole) // 4
    for device in devices[:-1]:
        if not (low_zero and device == devices[0]):
            limits[device] = min(share, limits[device])
    if low_zero:
        rest = max(0, total - sum(limits[device] for device in devices[1:]))
        limits[devices[0]] = min(rest, limits[devices[0]])
    return limits
