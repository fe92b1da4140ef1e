"""What is wrong with a configuration: collected in one place, one line each, with its JSON path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwise.errors import ConfigError, NotYetSupported

Path = tuple[str | int, ...]
Kind = Literal["bad", "unknown", "refused", "later"]


def format_path(path: Path) -> str:
    """Write a path as `zero_optimization.stage` or `optimizer.params.betas[0]`, on one line."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + _one_line(part)
    return text or "(the whole config)"


def _one_line(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"')
    # A lone surrogate is legal in a Python string, but cannot be printed.
    return quoted.encode("utf-8", "backslashreplace").decode()


def show(value: object) -> str:
    """Write a value as JSON, shortened, on one line."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__} object"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 80 else text[:77] + "..."


def kind_of(value: object) -> str:
    """Name the JSON type of a value, with its article."""
    if value is None:
        return "null"
    for cls, name in ((bool, "a boolean"), (int, "an integer"), (float, "a number"), (str, "a string")):
        if isinstance(value, cls):
            return name
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"


def mismatch(value: object, expected: str) -> str:
    """Say which value was seen and what was expected instead."""
    if value is None:
        return f"null; expected {expected}"
    return f"{show(value)} is {kind_of(value)}; expected {expected}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, at one path."""

    path: Path
    message: str
    kind: Kind


@dataclass
class Problems:
    """The problems of one configuration.

    The first problem at a path wins, because the earlier passes know more about the value. Warnings are kept
    until the configuration turns out to be good.
    """

    found: dict[Path, Problem] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    """Section name -> the other name under which the user wrote it."""
    renamed: dict[Path, Path] = field(default_factory=dict)
    """Path of a key -> the path of the old key that the user wrote instead."""

    def add(self, path: Path, message: str, kind: Kind = "bad") -> None:
        """Record a problem, unless the path has one. An unknown key is never anything else."""
        if path not in self.found or kind == "unknown":
            self.found[path] = Problem(path, message, kind)

    def touches(self, *paths: Path) -> bool:
        """Whether any of these values, or what holds it, is already known to be wrong."""
        return any(path[:end] in self.found for path in paths for end in range(len(path) + 1))

    def written(self, path: Path) -> str:
        """Write a path with the names that the user used."""
        if path in self.renamed:
            return f"{format_path(self.renamed[path])} (now {format_path(path)})"
        if path and isinstance(path[0], str):
            path = (self.aliases.get(path[0], path[0]), *path[1:])
        return format_path(path)

    def raise_if_any(self, source: str) -> None:
        """Raise one error that lists everything.

        Raises:
            NotYetSupported: everything wrong is a capability that has not landed.
            ConfigError: anything else is wrong too.
        """
        if not self.found:
            return
        count = len(self.found)
        lines = [f"  {self.written(problem.path)}: {problem.message}" for problem in self.found.values()]
        text = "\n".join([f"{count} problem{'s' if count > 1 else ''} in {source}:", *lines])
        if all(problem.kind == "later" for problem in self.found.values()):
            raise NotYetSupported(text)
        raise ConfigError(text)
