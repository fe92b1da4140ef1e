"""Where the values of offloaded tensors lie: in the CPU's memory, or in a safetensors file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from shardwise.big_models.checkpoint import Entry, SafetensorsFiles
from shardwise.big_models.tensors import as_dtype
from shardwise.errors import ConfigError


class Stored(Protocol):
    """The values of one tensor, kept somewhere."""

    def view(self) -> torch.Tensor:
        """The values on the CPU, without a copy where that can be; not to be written to."""

    def load(self, device: torch.device) -> torch.Tensor:
        """The values on a device, fit to compute with."""


@dataclass(frozen=True)
class InMemory:
    """Values in the CPU's memory."""

    tensor: torch.Tensor

    def view(self) -> torch.Tensor:
        """The tensor itself."""
        return self.tensor

    def load(self, device: torch.device) -> torch.Tensor:
        """The tensor itself on the CPU, else a copy there."""
        return self.tensor.to(device, non_blocking=self.tensor.is_pinned())


@dataclass(frozen=True)
class InFile:
    """Values in a safetensors file, cast to ``dtype`` as they are read when it differs from the file's."""

    files: SafetensorsFiles
    entry: Entry
    dtype: torch.dtype | None = None

    def view(self) -> torch.Tensor:
        """The values mapped into memory, read as they are used."""
        tensor = self.files.get(self.entry)
        return tensor if self.dtype is None else tensor.to(self.dtype)

    def load(self, device: torch.device) -> torch.Tensor:
        """A copy of the values on the device."""
        tensor = self.files.get(self.entry)
        # A copy even on the CPU: the mapped file must not change, and its addresses are not aligned for kernels.
        return tensor.to(device=device, dtype=self.dtype or tensor.dtype, copy=True)


def write(folder: Path, name: str, tensor: torch.Tensor) -> Entry:
    """Write one tensor into a file of its own.

    Args:
        folder: made when it is missing.
        name: the tensor's name in its model.
        tensor: its values, on any device.

    Raises:
        ConfigError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = quote(name, safe="")
    if len(stem) > 200:
        stem = f"{stem[:120]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    file = folder / f"{stem}.safetensors"
    # Written aside first: a model that still has the old file mapped keeps it, and no half file is left behind.
    aside = folder / f".{stem}.{os.getpid()}.tmp"
    try:
        save_file({name: tensor.detach().to("cpu").contiguous()}, str(aside))
        os.replace(aside, file)
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        raise ConfigError(f"{file}: {name!r} cannot be written: {error}") from error
    return Entry(file.absolute(), name)


def index_entry(entry: Entry, dtype: torch.dtype) -> dict[str, str]:
    """What an offload index says about a tensor in a file."""
    return {
        "safetensors_file": str(entry.file.absolute()),
        "weight_name": entry.key,
        "dtype": str(dtype).removeprefix("torch."),
    }


def write_index(folder: Path, index: Mapping[str, Mapping[str, str]]) -> None:
    """Write ``index.json`` of an offload folder."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".index.{os.getpid()}.tmp"
    aside.write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")
    os.replace(aside, folder / "index.json")


def read_index(folder: Path) -> dict[str, Any]:
    """Read ``index.json`` of an offload folder; empty when there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    path = folder / "index.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object with the names of tensors and where they lie")
    return content


def from_index(index: Mapping[str, Any], name: str, files: SafetensorsFiles) -> InFile:
    """The values that an offload index has under a name.

    Raises:
        ConfigError: it does not name a safetensors file for it.
    """
    found = index[name]
    file = found.get("safetensors_file") if isinstance(found, Mapping) else None
    if not isinstance(file, str):
        raise ConfigError(
            f"offload index: {name!r} has no 'safetensors_file' (got {found!r}); folders that other libraries wrote as "
            ".dat files cannot be read: load the checkpoint again"
        )
    return InFile(files, Entry(Path(file), str(found.get("weight_name", name))), as_dtype(found.get("dtype")))
