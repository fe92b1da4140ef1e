"""How many bytes the modules of a model take, and how many each device offers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import psutil
import torch
from torch import nn

from shardwise.big_models.tensors import ModelTensor, as_dtype, tensors_of
from shardwise.errors import ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kKmMgGtT]?)(i|I)?(B|b)?\s*")


def to_bytes(size: int | float | str, where: str = "size") -> int:
    """A number of bytes from a number or text: "10GB" is 10 * 10**9, "10GiB" is 10 * 2**30, "80Gb" are bits.

    Raises:
        ConfigError: it is no size, or negative.
    """
    if isinstance(size, int | float) and not isinstance(size, bool) and size >= 0:
        return int(size)
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if found is None or (found[3] and not found[2]):
        raise ConfigError(f"{where}: {size!r} is no size; expected bytes as a number, or text such as '10GB' or '8GiB'")
    unit = (_BINARY if found[3] else _UNITS)[found[2].upper()]
    return int(float(found[1]) * unit / (8 if found[4] == "b" and not found[3] else 1))


def loaded_dtype(
    tensor: torch.Tensor,
    dtype: torch.dtype | None,
    special: torch.dtype | None = None,
) -> torch.dtype:
    """The dtype that a tensor has once loaded: only floating-point tensors are cast, never integers and booleans."""
    if special is not None:
        return special
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def tensor_bytes(
    tensor: ModelTensor, dtype: torch.dtype | None, special_dtypes: Mapping[str, torch.dtype | None]
) -> int:
    """The bytes of a tensor once loaded."""
    special = next((special_dtypes[o.name] for o in tensor.owners if o.name in special_dtypes), None)
    return tensor.value.numel() * loaded_dtype(tensor.value, dtype, special).itemsize


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """The bytes of every module, parameter and buffer, by name; "" is the whole model.

    Each name's number counts the distinct tensors below it: weights that are tied within a module count once, and so
    in the whole model, but either of two modules that share a weight counts it.

    Args:
        model: may be on the meta device.
        dtype: what floating-point tensors will be cast to when they are loaded; their own dtype when None.
        special_dtypes: dtypes of single tensors, by name, before ``dtype``.
        buffers_only: count buffers alone.
    """
    cast, special = as_dtype(dtype), {name: as_dtype(d) for name, d in (special_dtypes or {}).items()}
    sizes: dict[str, int] = {"": 0}
    for tensor in tensors_of(model):
        if buffers_only and not tensor.is_buffer:
            continue
        size = tensor_bytes(tensor, cast, special)
        prefixes = {""}
        for owner in tensor.owners:
            parts = owner.name.split(".")
            prefixes.update(".".join(parts[:end]) for end in range(1, len(parts) + 1))
        for prefix in prefixes:
            sizes[prefix] = sizes.get(prefix, 0) + size
    return sizes


def get_max_memory(max_memory: Mapping[int | str, int | float | str] | None = None) -> dict[int | str, int]:
    """What each device offers, in bytes: accelerators by index first, then "mps", "cpu" and "disk".

    Args:
        max_memory: bytes or sizes such as "10GB" by device; what is free now when None. It is not changed.

    Raises:
        ConfigError: an unknown device or a size that is none.
    """
    if max_memory is None:
        return _free_memory()
    for key in max_memory:
        if isinstance(key, bool) or not (isinstance(key, int) or key in ("mps", "cpu", "disk")):
            raise ConfigError(
                f"max_memory: {key!r} is no device; expected indices of accelerators, 'mps', 'cpu' and 'disk'"
            )
    indices = sorted(key for key in max_memory if isinstance(key, int))
    there = torch.accelerator.device_count()
    if absent := [i for i in indices if not 0 <= i < there]:
        warnings.warn(f"max_memory names devices that are not here: {absent}; this machine has {there}", stacklevel=3)
    ordered = [*indices, *(key for key in ("mps", "cpu", "disk") if key in max_memory)]
    return {key: to_bytes(max_memory[key], f"max_memory[{key!r}]") for key in ordered}


def _free_memory() -> dict[int | str, int]:
    free: dict[int | str, int] = {}
    available = int(psutil.virtual_memory().available)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and accelerator.type == "mps":
        return {"mps": available}  # it is the CPU's memory, which must not be counted twice
    if accelerator is not None:
        backend: Any = torch.get_device_module(accelerator)
        for index in range(torch.accelerator.device_count()):
            free[index] = int(backend.mem_get_info(index)[0])
            properties = backend.get_device_properties(index)
            if getattr(properties, "is_integrated", False):
                available = 0  # such a device shares the CPU's memory
    if available:
        free["cpu"] = available
    return free
