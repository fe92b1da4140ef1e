"""Optimizers and learning-rate schedules by their ds_config names."""

from shardwise.optim.optimizers import ELEMENTWISE, build_optimizer, supports_found_inf, supports_grad_scale
from shardwise.optim.schedulers import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)

__all__ = [
    "ELEMENTWISE",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_optimizer",
    "build_scheduler",
    "supports_found_inf",
    "supports_grad_scale",
]
