"""Checkpoints in safetensors files: which tensors there are and where, without reading any."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shardwise.errors import ConfigError

# How many bytes of a file are given out before it is mapped anew: opening takes about a millisecond.
_MAPPED = 64 * 2**20
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class Entry:
    """A tensor in a safetensors file."""

    file: Path
    key: str


class SafetensorsFiles:
    """Safetensors files that are opened when needed and mapped into memory: a tensor is read as it is used.

    Pages that were read count as the process's memory as long as the file is mapped, though the system takes them back
    when it needs them. So that a process does not seem to hold the whole file, it is mapped anew now and then.

    What :meth:`get` returns lies in the mapped file: it takes no memory of its own until it is read, must not be
    written to, and is not aligned the way torch aligns, so kernels may round it differently. Copy before computing.
    """

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}
        self._given: dict[Path, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_open": {}, "_given": {}}  # a copy opens the files for itself

    def get(self, entry: Entry) -> torch.Tensor:
        """One tensor, on the CPU, not yet read.

        Raises:
            ConfigError: the file cannot be read or does not hold it.
        """
        try:
            tensor: torch.Tensor = self._file(entry.file).get_tensor(entry.key)
        except SafetensorError as error:
            raise ConfigError(f"{entry.file}: no tensor {entry.key!r} can be read: {error}") from error
        self._given[entry.file] = self._given.get(entry.file, 0) + tensor.nbytes
        if self._given[entry.file] > _MAPPED:
            self._given[entry.file] = 0
            self._open.pop(entry.file, None)  # the tensors that were given keep their mapping
        return tensor

    def shape(self, entry: Entry) -> list[int]:
        """The shape of one tensor.

        Raises:
            ConfigError: the file cannot be read or does not hold it.
        """
        try:
            shape: list[int] = self._file(entry.file).get_slice(entry.key).get_shape()
        except SafetensorError as error:
            raise ConfigError(f"{entry.file}: no tensor {entry.key!r} can be read: {error}") from error
        return shape

    def keys(self, file: Path) -> list[str]:
        """The names of the tensors in a file.

        Raises:
            ConfigError: the file cannot be read.
        """
        return list(self._file(file).keys())

    def _file(self, file: Path) -> Any:
        opened = self._open.get(file)  # once, since another thread may take it out
        if opened is None:
            try:
                opened = self._open[file] = safe_open(str(file), framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{file}: cannot be read as safetensors: {error}") from error
        return opened


class Checkpoint(Mapping[str, Entry]):
    """The tensors of a checkpoint by name.

    Args:
        path: a ``.safetensors`` file, the ``.index.json`` of a sharded checkpoint, or a folder with either, or with
            several ``.safetensors`` files and no index.
        files: opens them.

    Raises:
        ConfigError: there is no such checkpoint; it is pickled, which is never read; its index is not one, names a
            file outside its folder, or a tensor that is not in the file.
    """

    def __init__(self, path: Path, files: SafetensorsFiles) -> None:
        self.path = path
        self._entries: dict[str, Entry] = {}
        index = _find(path)
        if isinstance(index, Path):
            for name, relative in _read_index(index).items():
                self._entries[name] = Entry(index.parent / relative, name)
            there = {file: set(files.keys(file)) for file in {entry.file for entry in self._entries.values()}}
            for name, entry in self._entries.items():
                if name not in there[entry.file]:
                    raise ConfigError(f"{index}: {name!r} is not in {entry.file.name}, where the index says it is")
            return
        for file in index:
            for name in files.keys(file):
                if name in self._entries:
                    first = self._entries[name].file.name
                    raise ConfigError(f"{path}: {name!r} is in {first} and in {file.name}; name one of the files")
                self._entries[name] = Entry(file, name)

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _find(path: Path) -> Path | list[Path]:
    """The index of a checkpoint, or its files when it has none."""
    if path.is_file():
        if path.suffix == ".json":
            return path
        if path.suffix in _PICKLED:
            raise _pickled(path)
        return [path]
    if not path.is_dir():
        raise ConfigError(f"checkpoint: {path} is neither a file nor a folder")
    if (whole := path / "model.safetensors").is_file():
        return [whole]
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise ConfigError(f"checkpoint: {path} holds several indices; name one of {[index.name for index in indices]}")
    if indices:
        return indices[0]
    if found := sorted(path.glob("*.safetensors")):
        return found
    if pickled := sorted(file for file in path.iterdir() if file.suffix in _PICKLED):
        raise _pickled(pickled[0])
    raise ConfigError(f"checkpoint: {path} holds no .safetensors file and no .safetensors.index.json")


def _pickled(path: Path) -> ConfigError:
    return ConfigError(
        f"checkpoint: {path} is pickled, and loading it can run any code that somebody put in it; convert it once, "
        "where you trust it: `safetensors.torch.save_model(model, 'model.safetensors')` after loading it with "
        "`torch.load(..., weights_only=True)`, or `save_pretrained` of a Hugging Face model"
    )


def _read_index(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    names = content.get("weight_map", content) if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ConfigError(f"{path}: expected a JSON object with names of tensors and the files that hold them")
    for name, file in names.items():
        if _leaves_folder(file):
            raise ConfigError(
                f"{path}: weight_map[{name!r}] is {file!r}, which leaves the index's folder; expected a file in it"
            )
        if Path(file).suffix in _PICKLED:
            raise _pickled(path.parent / file)
    return names


def _leaves_folder(file: str) -> bool:
    # As text alone, whatever the system: in a download cache the folder's own files are links to elsewhere.
    windows = PureWindowsPath(file)
    return (
        not file
        or "\0" in file
        or PurePosixPath(file).is_absolute()
        or bool(windows.anchor)
        or ".." in windows.parts
        or ".." in PurePosixPath(file).parts
    )
