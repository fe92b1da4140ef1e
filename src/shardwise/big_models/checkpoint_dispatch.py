"""A checkpoint loaded into a model and the model spread over devices, in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from shardwise.big_models.balance import get_balanced_memory
from shardwise.big_models.dispatch import dispatch_model
from shardwise.big_models.loading import load
from shardwise.big_models.planning import infer_auto_device_map
from shardwise.big_models.tensors import Device, DeviceMap
from shardwise.errors import ConfigError, NotYetSupported

_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | DeviceMap | None = None,
    max_memory: Mapping[int | str, int | float | str] | None = None,
    no_split_module_classes: str | list[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: str | list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint of safetensors files into a model and spread the model over devices, for inference.

    Args:
        model: the model, most often built under :func:`init_empty_weights`; changed in place.
        checkpoint: a ``.safetensors`` file, a ``.safetensors.index.json``, or a folder with either. Pickled files are
            never read.
        device_map: the device of each module; "auto" or "balanced" to fill all accelerators alike, "balanced_low_0" to
            leave the first as empty as possible, "sequential" to fill one after the other. Without one, the model is
            loaded and not spread.
        max_memory, no_split_module_classes: for the automatic maps, see :func:`infer_auto_device_map`.
        offload_folder: for weights on "disk" that cannot be used from the checkpoint itself, because ``dtype`` changes
            them or the checkpoint has them not.
        offload_buffers: offload saved buffers as well.
        dtype: what floating-point tensors are cast to; the model's own dtype when None.
        offload_state_dict: has no effect: no state dict is ever in memory.
        skip_keys, preload_module_classes, force_hooks: see :func:`dispatch_model`.
        strict: raise when the names of checkpoint and model differ; without it, warn.
        full_state_dict: only True is supported.
        broadcast_from_rank0: not supported.

    Returns:
        The model.

    Raises:
        ConfigError: the checkpoint cannot be read or does not fit the model, or the map does not.
        ShardingError: weights have no values in the checkpoint.
        NotYetSupported: an argument that is not supported.
    """
    if not full_state_dict or broadcast_from_rank0:
        raise NotYetSupported("full_state_dict=False and broadcast_from_rank0=True are not supported; leave them out")
    found: Mapping[str, Device] | None
    if isinstance(device_map, str):
        if device_map not in _AUTOMATIC:
            raise ConfigError(f"device_map: {device_map!r} is none of {', '.join(_AUTOMATIC)}, nor a map of modules")
        limits: Mapping[int | str, int | float | str] | None = max_memory
        if device_map != "sequential":
            balanced = get_balanced_memory(
                model, max_memory, no_split_module_classes, dtype, low_zero=device_map == "balanced_low_0"
            )
            limits = dict(balanced)
        found = infer_auto_device_map(model, limits, no_split_module_classes, dtype, offload_buffers=offload_buffers)
    else:
        found = device_map
    folder = Path(offload_folder) if offload_folder is not None else None
    index = load(model, checkpoint, found, folder, dtype, offload_buffers, strict=strict)
    if found is None:
        return model
    return dispatch_model(
        model,
        found,
        offload_dir=folder,
        offload_index=index,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )
