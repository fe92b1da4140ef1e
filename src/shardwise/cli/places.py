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


def accelerates_config_file(environment: Mapping[str, str]) -> Path | None:
    """The file that `accelerate config` writes; it is read only when it is named."""
    hub = environment.get("HF_HOME")
    cache = Path(environment.get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "huggingface"
    path = (Path(hub) if hub else cache) / "accelerate" / "default_config.yaml"
    return path if path.is_file() else None


def default_config_file(environment: Mapping[str, str]) -> Path | None:
    """The file that is read when none is named; None where there is none."""
    path = config_path(environment)
    return path if path.is_file() else None
