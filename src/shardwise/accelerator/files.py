"""One file for one value: JSON and tensors in a safetensors file, written aside and then renamed. No pickle."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from shardwise.dist.values import ValueKindError, pack, unpack
from shardwise.errors import ConfigError

KEY = "shardwise"


def write_value(path: Path, value: Any) -> None:
    """Write a value: numbers, text, None, tensors and arrays, nested in lists, tuples and dicts.

    Raises:
        ValueKindError: it holds something else; the message has its path.
    """
    text, tensors = pack(value)
    whole = {str(i): t.detach().contiguous().cpu() for i, t in enumerate(tensors)}
    write_tensors(path, whole, {KEY: text})


def read_value(path: Path) -> Any:
    """What :func:`write_value` wrote. Nothing is executed.

    Raises:
        ConfigError: no such file, or another kind of file.
    """
    tensors, metadata = read_tensors(path)
    if KEY not in metadata:
        raise ConfigError(f"{path}: this file was not written by shardwise.")
    names = [str(i) for i in range(len(tensors))]
    if set(names) != set(tensors):
        raise ConfigError(f"{path}: its tensors are not those of a value that shardwise wrote.")
    try:
        return unpack(metadata[KEY], [tensors[name] for name in names], classes=False)
    except ValueKindError as error:
        raise ConfigError(f"{path}: {error}") from error


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file that is whole or absent.

    Raises:
        ConfigError: it cannot be written (no space, no permission).
    """
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        save_file(dict(tensors), aside, metadata=dict(metadata))
        _sync(aside)
        os.replace(aside, path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: cannot be written ({error}).") from error
    finally:
        aside.unlink(missing_ok=True)


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the texts of a safetensors file.

    Raises:
        ConfigError: no such file, or a file that is no safetensors file, or is not whole.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file.")
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return found, dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a whole safetensors file ({error}).") from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that is whole or absent.

    Raises:
        ConfigError: it cannot be written.
    """
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        aside.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        _sync(aside)
        os.replace(aside, path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error}).") from error
    finally:
        aside.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        ConfigError: no such file, or no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}).") from error


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
