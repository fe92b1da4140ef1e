"""The ten real configs, for every test that wants one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "real_configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))

WORLD_SIZE = 2
"""Every real config fits this number of ranks."""


OLD_SPELLINGS = ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory")
"""Keys that are read under their new names, with a warning."""


def real_config(name: str) -> dict[str, Any]:
    """Read one of them, as plain JSON."""
    config: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return config


def minimal(**keys: Any) -> dict[str, Any]:
    """The smallest config that loads, and the given keys."""
    return {"train_micro_batch_size_per_gpu": 1, **keys}


STYLES = Path(__file__).parent / "style_configs"
STYLE_NAMES = sorted(path.stem for path in STYLES.glob("*.json"))

AUTO: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "fp16.enabled": False,
    "bf16.enabled": True,
    "optimizer.params.lr": 1e-3,
    "optimizer.params.betas": [0.9, 0.95],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.1,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_max_lr": 1e-3,
    "scheduler.params.warmup_num_steps": 0,
    "scheduler.params.total_num_steps": 100,
    "zero_optimization.reduce_bucket_size": 16 * 16,
    "zero_optimization.stage3_prefetch_bucket_size": 230,
    "zero_optimization.stage3_param_persistence_threshold": 160,
}
"""What a Hugging Face trainer fills in, for two ranks and a model of width 16."""
