"""From what a user passes (a path, a mapping, base64 text) to plain dicts, lists and scalars of our own."""

from __future__ import annotations

import base64
import binascii
import json
import math
import numbers
import os
import re
from collections.abc import Mapping
from enum import Enum

import hjson  # type: ignore[import-untyped]

from shardwise.config.problems import Path, Problems, show
from shardwise.errors import ConfigError

Source = str | os.PathLike[str] | Mapping[str, object]

MAX_DEPTH = 64
_BASE64 = re.compile(r"[A-Za-z0-9_-]+={0,2}")


class _Object(dict[str, object]):
    """A parsed JSON object that remembers which of its keys came twice."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        seen: set[str] = set()
        self.twice = [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]


class _Infinite(float):
    """Infinity that `int()` takes.

    hjson calls `int()` on every float to find the integral ones, which raises on a plain infinity and would
    lose the path of the number.
    """

    def __int__(self) -> int:
        return 0


def _parse_float(text: str) -> float:
    value = float(text)
    return _Infinite(value) if math.isinf(value) else value


def _parse_int(text: str) -> float:
    try:
        return int(text)
    except ValueError:  # Python refuses to convert thousands of digits
        return _Infinite("-inf" if text.startswith("-") else "inf")


def parse(text: str, name: str) -> object:
    """Parse JSON, or JSON with comments and trailing commas (hjson).

    Plain JSON goes through `json`, since hjson reads `Infinity,` as a string.

    Raises:
        ConfigError: the text is neither.
    """
    text = text.removeprefix("\ufeff")
    try:
        return json.loads(text, object_pairs_hook=_Object, parse_float=_parse_float, parse_int=_parse_int)
    except ValueError:
        pass
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply to be a config") from None
    try:
        return hjson.loads(text, object_pairs_hook=_Object, parse_float=_parse_float, parse_int=_parse_int)
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply to be a config") from None
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{name}: not valid JSON (comments and trailing commas are allowed): {error}") from error


def read(source: object) -> tuple[object, str]:
    """Read a source.

    Args:
        source: path of a file, mapping, or urlsafe base64 of a JSON text.

    Returns:
        What it holds, not yet checked, and a name for it in messages.

    Raises:
        ConfigError: there is nothing to read, or it cannot be parsed.
    """
    if isinstance(source, Mapping):
        return source, "the config"
    if isinstance(source, os.PathLike):
        return _read_file(os.fsdecode(source))
    if isinstance(source, str):
        if os.path.exists(source):
            return _read_file(source)
        text = _decode_base64(source)
        if text is not None:
            return parse(text, "the base64 config"), "the base64 config"
        raise ConfigError(
            f"config: {show(source)} is neither an existing file nor the urlsafe base64 of a JSON object; "
            "pass a path, a dict or base64 (a JSON text: json.loads it first)"
        )
    raise ConfigError(f"config: expected a path, a dict or a base64 string, got {type(source).__name__}")


def _read_file(path: str) -> tuple[object, str]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError(f"config: cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config: {path} is not UTF-8 text: {error}") from error
    return parse(text, path), path


def _decode_base64(text: str) -> str | None:
    if not _BASE64.fullmatch(text):
        return None
    try:
        decoded = base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def plain(value: object, path: Path, problems: Problems) -> object:
    """Copy a value into plain JSON types; report what JSON cannot hold (with its path), and make it null.

    NaN and infinity are reported, except at `steps_per_print`, where infinity means never.
    """
    if len(path) > MAX_DEPTH:
        problems.add(path, f"nested more than {MAX_DEPTH} levels deep")
        return None
    if isinstance(value, Mapping):
        return _plain_object(value, path, problems)
    if isinstance(value, (list, tuple)):
        return [plain(item, (*path, index), problems) for index, item in enumerate(value)]
    if isinstance(value, Enum):
        return plain(value.value, path, problems)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return _finite(float(value), path, problems)
    problems.add(path, f"a {type(value).__name__} object; a config holds only JSON values")
    return None


def _plain_object(value: Mapping[object, object], path: Path, problems: Problems) -> dict[str, object]:
    for key in getattr(value, "twice", ()):
        problems.add((*path, key), "this key is written twice; keep one of the two")
    result: dict[str, object] = {}
    for key, item in value.items():
        if isinstance(key, str):
            result[str(key)] = plain(item, (*path, str(key)), problems)
        else:
            problems.add((*path, repr(key)), f"a key of type {type(key).__name__}; JSON keys are strings")
    return result


def _finite(value: float, path: Path, problems: Problems) -> float | None:
    if math.isnan(value):
        problems.add(path, "NaN is no value for a config key; write a number")
    elif math.isinf(value) and not (path == ("steps_per_print",) and value > 0):
        problems.add(path, "infinite or too large for any number here; write a finite number")
    else:
        return value
    return None
