"""The random states of a process, for a checkpoint: Python's, NumPy's, torch's, and that of its GPU."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """All of them, as numbers and tensors."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Go on with what :func:`random_states` gave. A GPU's state is passed over where there is none."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"].cpu())
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())
