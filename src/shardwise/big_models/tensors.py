"""The tensors of a model: who owns each, which are one and the same, and how one is put in another's place."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError

Device = int | str | torch.device
DeviceMap = Mapping[str, Device]


@dataclass
class Owner:
    """One place where a tensor hangs: ``getattr(module, attribute)``, called ``name`` from the model's root."""

    name: str
    module: nn.Module
    attribute: str

    @property
    def module_name(self) -> str:
        """The module's name from the model's root; empty for the root."""
        return self.name.rpartition(".")[0]


@dataclass
class ModelTensor:
    """A parameter or buffer of a model with all the places where it hangs. Tied weights are one ModelTensor."""

    value: torch.Tensor
    owners: list[Owner] = field(default_factory=list)
    is_buffer: bool = False
    persistent: bool = True

    @property
    def name(self) -> str:
        """Its first name."""
        return self.owners[0].name


def tensors_of(model: nn.Module) -> list[ModelTensor]:
    """Every parameter and buffer of a model once, in the order of the modules.

    A module that hangs in two places gives its tensors two names, like tied weights. A buffer that one place saves and
    another does not counts as saved.
    """
    found: dict[int, ModelTensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, value, is_buffer in _own(module):
            persistent = not is_buffer or attribute not in module._non_persistent_buffers_set
            entry = found.get(id(value))
            if entry is None:
                entry = found[id(value)] = ModelTensor(value, is_buffer=is_buffer, persistent=persistent)
            entry.persistent |= persistent
            entry.owners.append(Owner(f"{prefix}.{attribute}" if prefix else attribute, module, attribute))
    return list(found.values())


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            yield attribute, parameter, False
    for attribute, buffer in module._buffers.items():
        if buffer is not None:
            yield attribute, buffer, True


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """The names of parameters that are one and the same object, as sorted groups of two names or more."""
    return [
        sorted(owner.name for owner in tensor.owners)
        for tensor in tensors_of(model)
        if len(tensor.owners) > 1 and not tensor.is_buffer
    ]


def parameter_like(old: torch.Tensor, data: torch.Tensor, requires_grad: bool | None = None) -> torch.Tensor:
    """New data in the dress of an old parameter or buffer: its class, its attributes, whether it wants gradients.

    Args:
        old: the parameter or buffer whose place the result will take.
        data: the values; used as they are, without a copy.
        requires_grad: whether the result wants gradients; like ``old`` when None. Buffers stay as they are.
    """
    data = data.detach()
    wanted = old.requires_grad if requires_grad is None else requires_grad
    wanted = wanted and (data.is_floating_point() or data.is_complex())
    if not isinstance(old, nn.Parameter):
        return data
    if not issubclass(type(old), nn.Parameter):
        # A tensor of a class of its own, flagged as a parameter: what it holds besides is of the old values.
        return nn.Parameter(data, requires_grad=wanted)
    plain = type(old) is nn.Parameter
    new = nn.Parameter(data, wanted) if plain else data.as_subclass(type(old)).requires_grad_(wanted)
    new.__dict__.update(old.__dict__)
    return new


def put(owner: Owner, value: torch.Tensor) -> None:
    """Hang a parameter or buffer where the owner has one of the same kind, past every registration hook."""
    if isinstance(owner.module, nn.RNNBase):
        setattr(owner.module, owner.attribute, value)  # these keep a list of their weights besides
        return
    holder: dict[str, Any] = (
        owner.module._buffers if owner.attribute in owner.module._buffers else owner.module._parameters
    )
    holder[owner.attribute] = value


def as_device(device: Device) -> torch.device:
    """A device as torch knows it; an integer is an index of the machine's accelerator.

    Raises:
        ConfigError: there is no such device here, or it is "disk", where nothing can run.
    """
    if isinstance(device, torch.device):
        return device
    if isinstance(device, int):
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None:
            raise ConfigError(f"device {device}: this machine has no accelerator; name 'cpu' or 'disk' instead")
        return torch.device(accelerator.type, device)
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r}: torch has no such device; expected an index, 'cpu', 'cuda:0'") from error


def as_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype from itself or its name, with or without ``torch.`` before it.

    Raises:
        ConfigError: torch has no dtype of that name.
    """
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype: {dtype!r} is no dtype of torch; expected a name such as 'bfloat16'")
    return found


def class_names(names: str | list[str] | tuple[str, ...] | set[str] | None) -> frozenset[str]:
    """Names of classes, given as one name, several or none."""
    return frozenset([names] if isinstance(names, str) else names or ())


def moved(value: Any, device: torch.device, skip: frozenset[str] = frozenset()) -> Any:
    """Nested lists, tuples and mappings with their tensors on a device; what holds none that moves is the same object.

    Args:
        value: the arguments or the result of a module.
        device: where its tensors shall be.
        skip: keys of mappings whose values stay as they are.
    """
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    if isinstance(value, Mapping):
        changed = {k: new for k, v in value.items() if k not in skip and (new := moved(v, device, skip)) is not v}
        if not changed:
            return value
        # A copy keeps the class: the outputs of transformers are mappings with attributes of their own.
        result: Any = copy.copy(value)
        for key, new in changed.items():
            result[key] = new
        return result
    if isinstance(value, tuple | list):
        items = [moved(item, device, skip) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def first_device(value: Any) -> torch.device | None:
    """The device of the first tensor in nested lists, tuples and mappings, or None."""
    if isinstance(value, torch.Tensor):
        return value.device
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((device for item in inner if (device := first_device(item)) is not None), None)
