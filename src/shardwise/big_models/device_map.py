"""Device maps: which device each module of a model goes to, by the longest name that covers it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn

from shardwise.big_models.tensors import Device, DeviceMap, tensors_of
from shardwise.errors import ConfigError


def check_device_map(model: nn.Module, device_map: DeviceMap) -> None:
    """See to it that a device map gives every parameter and saved buffer of a model a device.

    Names that the model does not have are warned about.

    Raises:
        ConfigError: some parameters or buffers have no device.
    """
    tensors = tensors_of(model)
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    names.update(owner.name for tensor in tensors for owner in tensor.owners)
    if unknown := [name for name in device_map if name and name not in names]:
        warnings.warn(f"device_map: the model has nothing of these names: {unknown}", stacklevel=2)
    homeless = [
        owner.name
        for tensor in tensors
        if tensor.persistent
        for owner in tensor.owners
        if find_device(device_map, owner.name) is None
    ]
    if homeless:
        raise ConfigError(
            f"device_map: no device for {shown(homeless)}; add them or a module above them ('' is the whole model)"
        )


def find_device(device_map: DeviceMap, name: str) -> Device | None:
    """The device of a tensor or module: that of its own name, else of the nearest module above it, else None."""
    while True:
        if name in device_map:
            return device_map[name]
        if not name:
            return None
        name = name.rpartition(".")[0]


def shown(names: Iterable[str], most: int = 8) -> str:
    """Some names for a message, with how many were left out."""
    listed = list(names)
    more = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more} more" if more > 0 else "")
