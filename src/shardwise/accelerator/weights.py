"""A model's weights as safetensors files, as ``save_pretrained`` lays them out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.accelerator.files import read_json, read_tensors, write_json, write_tensors
from shardwise.errors import ConfigError

NAME, INDEX = "model", "model.safetensors.index.json"
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def size_of(text: str | int) -> int:
    """Bytes of ``"10GB"`` (or ``"10GiB"``).

    Raises:
        ConfigError: not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]I?B)\s*", str(text).upper())
    if match is None:
        raise ConfigError(f"max_shard_size: expected a size such as '5GB', got {text!r}.")
    return int(float(match[1]) * UNITS[match[2]])


def without_copies(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a state, and the names whose values another name has (tied weights): name -> that other name.

    Raises:
        ConfigError: something in the state is no tensor.
    """
    kept: dict[str, torch.Tensor] = {}
    same: dict[str, str] = {}
    owners: dict[tuple[Any, ...], str] = {}
    memory: set[tuple[torch.device, int]] = set()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"state_dict: `{name}` is a {type(value).__name__}; safetensors files hold tensors only.")
        key = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and key in owners:
            same[name] = owners[key]
            continue
        owners[key] = name
        place = (value.device, value.untyped_storage().data_ptr())
        # A part of another's memory is a tensor of its own in a file.
        kept[name] = value.clone() if value.numel() and place in memory else value
        memory.add(place)
    return kept, same


def save_weights(state: Mapping[str, Any], folder: Path, max_bytes: int) -> list[str]:
    """Write ``model.safetensors``, or several files and an index. Returns the names of the files.

    Args:
        state: whole tensors by name.
        folder: exists.
        max_bytes: of one file; a larger tensor has one of its own.
    """
    kept, same = without_copies(state)
    files: list[dict[str, torch.Tensor]] = [{}]
    held = 0
    for name, value in kept.items():
        size = value.numel() * value.element_size()
        if files[-1] and held + size > max_bytes:
            files.append({})
            held = 0
        files[-1][name] = value.detach().contiguous().cpu()
        held += size
    for old in [*folder.glob(f"{NAME}-*-of-*.safetensors"), folder / f"{NAME}.safetensors", folder / INDEX]:
        old.unlink(missing_ok=True)
    metadata = {"format": "pt", **{k: v for k, v in same.items()}}
    if len(files) == 1:
        write_tensors(folder / f"{NAME}.safetensors", files[0], metadata)
        return [f"{NAME}.safetensors"]
    names = [f"{NAME}-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    for name, part in zip(names, files, strict=True):
        write_tensors(folder / name, part, metadata)
    total = sum(v.numel() * v.element_size() for v in kept.values())
    places = {key: name for name, part in zip(names, files, strict=True) for key in part}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    return [*names, INDEX]


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """What :func:`save_weights` wrote; tied weights under all their names.

    Raises:
        ConfigError: files are missing or not whole, or an index names files outside of its folder.
    """
    index = folder / INDEX
    if not index.is_file():
        tensors, metadata = read_tensors(folder / f"{NAME}.safetensors")
        return _with_copies(tensors, metadata)
    found_there = read_json(index)
    places = found_there.get("weight_map") if isinstance(found_there, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ConfigError(f"{index}: has no weight_map of names.")
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise ConfigError(f"{index}: names {name!r}, which is no file of this folder.")
        tensors, metadata = read_tensors(folder / name)
        found.update(_with_copies(tensors, metadata))
    missing = set(places) - set(found)
    if missing:
        raise ConfigError(f"{index}: {sorted(missing)[0]} (and {len(missing) - 1} more) is in none of its files.")
    return found


def _with_copies(tensors: dict[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, torch.Tensor]:
    copies = {name: tensors[owner] for name, owner in metadata.items() if owner in tensors and name not in tensors}
    return {**tensors, **copies}


def load_into(model: nn.Module, state: Mapping[str, torch.Tensor], strict: bool = True) -> Any:
    """Load whole tensors into a model.

    Raises:
        ConfigError: names or shapes do not fit (``strict``).
    """
    try:
        return model.load_state_dict(dict(state), strict=strict)
    except RuntimeError as error:
        raise ConfigError(f"the weights do not fit the model: {error}") from error
