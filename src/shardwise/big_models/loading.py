"""Checkpoints into models: one tensor at a time, each to the device that a map gives it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from shardwise.big_models.checkpoint import Checkpoint, Entry, SafetensorsFiles
from shardwise.big_models.device_map import check_device_map, find_device, shown
from shardwise.big_models.stored import index_entry, write, write_index
from shardwise.big_models.tensors import DeviceMap, ModelTensor, as_device, as_dtype, parameter_like, put, tensors_of
from shardwise.errors import ConfigError, NotYetSupported

Index = dict[str, dict[str, str]]


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: DeviceMap | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint of safetensors files into a model, one tensor at a time.

    Args:
        model: the model; parameters without values (meta device) get some.
        checkpoint: a ``.safetensors`` file, a ``.safetensors.index.json``, or a folder with either. Pickled files are
            never read.
        device_map: the device of each module, see :func:`infer_auto_device_map`. Without one, each parameter stays
            where it is, and goes to the CPU if it is on the meta device.
        offload_folder: where ``index.json`` is written, which says where the weights that ``device_map`` sends to
            "disk" lie. They are used from the checkpoint itself; those that ``dtype`` changes are written here.
        dtype: what floating-point tensors are cast to; the model's own dtype when None.
        offload_state_dict: has no effect: no state dict is ever in memory.
        offload_buffers: buffers of modules on "disk" go there as well.
        keep_in_fp32_modules: names of modules that stay float32 when ``dtype`` is float16.
        offload_8bit_bnb: not supported.
        strict: raise when the names of checkpoint and model differ; without it, warn.
        full_state_dict: only True is supported.
        broadcast_from_rank0: not supported.

    Raises:
        ConfigError: the checkpoint cannot be read or does not fit the model; a weight has no device; "disk" is used
            without ``offload_folder``.
        NotYetSupported: an argument that is not supported.
    """
    for name, value, only in (
        ("offload_8bit_bnb", offload_8bit_bnb, False),
        ("full_state_dict", full_state_dict, True),
        ("broadcast_from_rank0", broadcast_from_rank0, False),
    ):
        if value is not only:
            raise NotYetSupported(f"{name}={value!r} is not supported; leave it {only}")
    if offload_folder is None and device_map is not None and "disk" in device_map.values():
        raise ConfigError(
            "offload_folder: device_map sends modules to 'disk'; name a folder for the list of where their weights lie"
        )
    folder = Path(offload_folder) if offload_folder is not None else None
    index = load(model, checkpoint, device_map, folder, dtype, offload_buffers, keep_in_fp32_modules, strict)
    if folder is not None and index:
        write_index(folder, index)


def load(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: DeviceMap | None = None,
    offload_folder: Path | None = None,
    dtype: str | torch.dtype | None = None,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    strict: bool = False,
) -> Index:
    """Load a checkpoint as :func:`load_checkpoint_in_model` does.

    Returns:
        Where the tensors lie that go to "disk".
    """
    if device_map is not None:
        check_device_map(model, device_map)
    files = SafetensorsFiles()
    entries = Checkpoint(Path(checkpoint), files)
    tensors = tensors_of(model)
    _compare(tensors, entries, files, strict)
    cast = _Cast(as_dtype(dtype), frozenset(keep_in_fp32_modules or ()))
    index: Index = {}
    for tensor in tensors:
        name = next((owner.name for owner in tensor.owners if owner.name in entries), None)
        if name is None or not tensor.persistent:
            continue
        values = files.get(entries[name])
        wanted = cast.dtype(name, tensor.value, values)
        device = _device(tensor, device_map)
        if device is None and (offload_buffers or not tensor.is_buffer):
            entry = entries[name]
            if wanted != values.dtype and offload_folder is not None:
                entry = write(offload_folder, name, values.to(wanted))
            for owner in tensor.owners:
                index[owner.name] = index_entry(entry, wanted)
            _replace(tensor, torch.empty_like(values, dtype=wanted, device="meta"))
        else:
            _fill(tensor, values, wanted, device or torch.device("cpu"))
    return index


class _Cast:
    def __init__(self, dtype: torch.dtype | None, kept: frozenset[str]) -> None:
        self._dtype, self._kept = dtype, kept

    def dtype(self, name: str, old: torch.Tensor, new: torch.Tensor) -> torch.dtype:
        """What a tensor of the checkpoint is cast to: floating-point ones as asked, others to the model's own."""
        if new.is_floating_point() != old.is_floating_point() or new.is_complex() != old.is_complex():
            raise ConfigError(f"checkpoint: {name!r} is {new.dtype}, but the model's is {old.dtype}")
        if not new.is_floating_point() or self._dtype is None:
            return old.dtype
        if self._dtype == torch.float16 and (name in self._kept or self._kept & set(name.split("."))):
            return torch.float32
        return self._dtype


def _device(tensor: ModelTensor, device_map: DeviceMap | None) -> torch.device | None:
    """Where a tensor goes; None is the disk. Of the devices of a tied weight, the first that is none wins."""
    if device_map is None:
        return torch.device("cpu") if tensor.value.is_meta else tensor.value.device
    found = [find_device(device_map, owner.name) for owner in tensor.owners]
    device = next((device for device in found if device is not None and device != "disk"), None)
    return None if device is None else as_device(device)


def _fill(tensor: ModelTensor, values: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.value.device == device and tensor.value.dtype == dtype:
        with torch.no_grad():
            tensor.value.copy_(values)  # the same object, for whoever holds it
        return
    _replace(tensor, values.to(device=device, dtype=dtype, copy=True))


def _replace(tensor: ModelTensor, data: torch.Tensor) -> None:
    tensor.value = parameter_like(tensor.value, data)
    for owner in tensor.owners:
        put(owner, tensor.value)


def _compare(
    tensors: Iterable[ModelTensor], entries: Mapping[str, Entry], files: SafetensorsFiles, strict: bool
) -> None:
    """Say where a checkpoint and a model differ.

    Raises:
        ConfigError: shapes differ; or, with ``strict``, names do.
    """
    saved = {owner.name: tensor for tensor in tensors if tensor.persistent for owner in tensor.owners}
    wrong = [
        f"{name}: {tuple(files.shape(entries[name]))} in the checkpoint, {tuple(tensor.value.shape)} in the model"
        for name, tensor in saved.items()
        if name in entries and tuple(files.shape(entries[name])) != tuple(tensor.value.shape)
    ]
    if wrong:
        raise ConfigError(f"checkpoint: shapes differ: {shown(wrong)}")
    # A tied weight is there if any of its names is.
    missing = [
        name
        for name, tensor in saved.items()
        if name == tensor.name and not any(owner.name in entries for owner in tensor.owners)
    ]
    unexpected = [name for name in entries if name not in saved]
    said = [
        f"{what}: {shown(names)}"
        for what, names in (
            ("not in the checkpoint, so left as they are", missing),
            ("in the checkpoint but not in the model, so not used", unexpected),
        )
        if names
    ]
    if said and strict:
        raise ConfigError(f"checkpoint (strict): {'; '.join(said)}")
    if said:
        warnings.warn(f"checkpoint: {'; '.join(said)}", stacklevel=4)
