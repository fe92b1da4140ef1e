"""The ten real configs, for every test that wants one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "real_configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))

WORLD_SIZE = 2
"""Every real config fits this number of ranks."""


def real_config(name: str) -> dict[str, Any]:
    """Read one of them, as plain JSON."""
    config: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return config


def minimal(**keys: Any) -> dict[str, Any]:
    """The smallest config that loads, and the given keys."""
    return {"train_micro_batch_size_per_gpu": 1, **keys}
