"""A place that keeps values over time: files, TensorBoard, a service."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from shardwise.errors import ConfigError


class Tracker(Protocol):
    """Where a run's values go. Only one rank has one; it is started once, and finished once.

    Attributes:
        name: what messages call it: its section of the configuration.
    """

    name: str

    def start(self, config: Mapping[str, Any]) -> None:
        """Open it, and record how the run was configured.

        Args:
            config: plain JSON values; nested.

        Raises:
            ConfigError: it cannot be opened.
        """

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep some values.

        Args:
            values: numbers by name, such as ``Train/Samples/train_loss``.
            step: where they are on the x axis; never less than in the call before.
        """

    def flush(self) -> None:
        """Bring what was logged to where it is safe if this process ends."""

    def finish(self) -> None:
        """Close it; everything that was logged is kept."""


def require(section: str, package: str, install: str) -> None:
    """Refuse a tracker whose package is missing.

    Args:
        section: of the configuration, for the error.
        package: the module's name.
        install: what to give pip.

    Raises:
        ConfigError: the package cannot be imported.
    """
    if package in sys.modules:
        missing = sys.modules[package] is None
    else:
        missing = importlib.util.find_spec(package) is None
    if missing:
        raise ConfigError(
            f"{section}.enabled: true needs the package `{package}`, which is not installed; run\n"
            f"    pip install {install}\n"
            f"or set {section}.enabled to false."
        )


def leaves(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings by dotted path; an empty mapping is a value."""
    for key, item in config.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(item, Mapping) and item:
            yield from leaves(item, here)
        else:
            yield here, item


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that may be written down: keys of services are hidden."""
    hidden = {}
    for key, item in config.items():
        if isinstance(item, Mapping):
            item = without_secrets(item)
        elif "api_key" in str(key).lower() and item is not None:
            item = "***"
        hidden[str(key)] = item
    return hidden
