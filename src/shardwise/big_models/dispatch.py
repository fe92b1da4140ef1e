"""Models spread over devices, the CPU's memory and the disk, that run as if they were in one place."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwise.big_models.device_map import check_device_map, find_device, shown
from shardwise.big_models.hooks import add_hook_to_module, remove_hook_from_module
from shardwise.big_models.offload import OffloadHook
from shardwise.big_models.placing import Home, place
from shardwise.big_models.sources import Sources
from shardwise.big_models.tensors import (
    Device,
    DeviceMap,
    as_device,
    class_names,
    find_tied_parameters,
    parameter_like,
    put,
    tensors_of,
)

_CPU = torch.device("cpu")


def dispatch_model(
    model: nn.Module,
    device_map: DeviceMap,
    main_device: Device | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: str | list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Spread a model as a device map says, for inference.

    Modules on "cpu" (when there is another device to run on) and on "disk" are brought to the main device for each
    call and let go after it. Between calls stand-ins hang in their places, and ``state_dict()`` gives the values. The
    results are those of the model in one place. Parameters that are brought get no gradients.

    Args:
        model: the model, changed in place.
        device_map: devices by module: an index or name of an accelerator, "cpu" or "disk".
        main_device: where offloaded modules run; the first accelerator of the map when None, else the CPU.
        state_dict: values of offloaded weights by name, before the model's own.
        offload_dir: folder for the weights on "disk"; those that the model has not are looked up in its ``index.json``.
        offload_index: which safetensors file holds which weight, as ``index.json`` has it.
        offload_buffers: offload saved buffers as well.
        skip_keys: keyword arguments and keys of mappings that are not moved to other devices.
        preload_module_classes: names of classes whose modules use weights of a module within them without calling it,
            so that all within is brought as they are called.
        force_hooks: attach hooks even when all is on one device.

    Returns:
        The model. ``model.hf_device_map`` is the map.

    Raises:
        ConfigError: the map does not cover the model, names a device that is not here, or a folder is missing.
        ShardingError: weights have no values, or the model was dispatched before.
    """
    check_device_map(model, device_map)
    places = {None if device == "disk" else as_device(device) for device in device_map.values()}
    main = as_device(main_device) if main_device is not None else _main_device(device_map)
    sources = Sources(offload_dir, offload_index, state_dict)
    _warn_of_split_ties(model, device_map)

    def home_of(name: str) -> Home:
        device = find_device(device_map, name)
        if device is None:
            return Home(main)  # the root above the map's modules, or a buffer that is not saved
        if device == "disk":
            return Home(main, "disk")
        found = as_device(device)
        return Home(main, "cpu") if found == _CPU != main else Home(found)

    if places == {main} and not force_hooks:
        _move(model, main, sources)
    else:
        place(
            model,
            home_of,
            sources,
            offload_buffers,
            class_names(skip_keys),
            class_names(preload_module_classes),
            device_map,
        )
    model.__dict__["hf_device_map"] = dict(device_map)
    _hook_encoder(model)
    return model


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: str | list[str] | None = None,
) -> nn.Module:
    """Keep all weights of a model in the CPU's memory and bring each module's to a device while it is called.

    Args:
        model: the model, changed in place.
        execution_device: where it runs; where its first parameter is when None, the CPU if that has no values.
        offload_buffers: offload saved buffers as well.
        state_dict: values by name, before the model's own.
        preload_module_classes: as for :func:`dispatch_model`.

    Returns:
        The model.

    Raises:
        ConfigError: there is no such device.
        ShardingError: weights have no values, or the model was dispatched before.
    """
    home = Home(_execution_device(model, execution_device), "cpu")
    sources = Sources(state_dict=state_dict)
    place(model, lambda _: home, sources, offload_buffers, preload_classes=class_names(preload_module_classes))
    return model


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: str | list[str] | None = None,
) -> nn.Module:
    """Keep all weights of a model in safetensors files and bring each module's to a device while it is called.

    Args:
        model: the model, changed in place.
        offload_dir: folder for the files. Weights that the model has are written there; for those that it has not,
            the folder's ``index.json`` says where they lie.
        execution_device: where it runs; where its first parameter is when None, the CPU if that has no values.
        offload_buffers: offload saved buffers as well.
        preload_module_classes: as for :func:`dispatch_model`.

    Returns:
        The model.

    Raises:
        ConfigError: there is no such device, or the folder cannot be written.
        ShardingError: weights have no values, or the model was dispatched before.
    """
    home = Home(_execution_device(model, execution_device), "disk")
    sources = Sources(offload_dir)
    place(model, lambda _: home, sources, offload_buffers, preload_classes=class_names(preload_module_classes))
    return model


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks off a module and all within it, which makes a dispatched model an ordinary one.

    Weights that were offloaded go back to where they were before, or to the CPU if they had no values then.
    """
    remove_hook_from_module(module, recurse=True)
    module.__dict__.pop("hf_device_map", None)


def _hook_encoder(model: nn.Module) -> None:
    """Give the encoder of a Hugging Face encoder-decoder a hook if it has none.

    ``generate()`` of a model with ``hf_device_map`` looks for one, to have the encoder's output where its input was.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and hasattr(model, "get_encoder"):
        encoder: nn.Module = model.get_encoder()  # type: ignore[operator]
        if not hasattr(encoder, "_hf_hook"):
            add_hook_to_module(encoder, OffloadHook(None, []))


def _main_device(device_map: DeviceMap) -> torch.device:
    devices = [as_device(device) for device in device_map.values() if device != "disk"]
    return next((device for device in devices if device != _CPU), _CPU)


def _execution_device(model: nn.Module, device: Device | None) -> torch.device:
    if device is not None:
        return as_device(device)
    first = next(model.parameters(), None)
    return _CPU if first is None or first.is_meta else first.device


def _move(model: nn.Module, device: torch.device, sources: Sources) -> None:
    """Everything to one device, without hooks."""
    place_all = [(tensor, sources.resident(tensor)) for tensor in tensors_of(model)]
    sources.check()
    for tensor, values in place_all:
        if values is not None and (values is not tensor.value or values.device != device):
            new = parameter_like(tensor.value, values.detach().to(device))
            for owner in tensor.owners:
                put(owner, new)


def _warn_of_split_ties(model: nn.Module, device_map: DeviceMap) -> None:
    split = []
    for names in find_tied_parameters(model):
        if len({str(find_device(device_map, name)) for name in names}) > 1:
            split.append(" = ".join(names))
    if split:
        warnings.warn(
            f"device_map sends tied weights to different devices: {shown(split)}. Where they run on different devices, "
            "each gets a copy, and changing one no longer changes the other",
            stacklevel=3,
        )
