"""Where the settings of this user lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def config_path(environment: Mapping[str, str]) -> Path:
    """`$XDG_CONFIG_HOME/shardwise/config.yaml`, by default under `~/.config`.

    A relative XDG_CONFIG_HOME is ignored, as its specification asks.
    """
    home = Path(environment.get("XDG_CONFIG_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".config") / "shardwise" / "config.yaml"


def default_config_file(environment: Mapping[str, str]) -> Path | None:
    """The file that is read when none is named; None where there is none."""
    path = config_path(environment)
    return path if path.is_file() else None
