"""Optimizers and learning-rate schedules by their ds_config names."""

from shardwise.optim.kinds import ELEMENTWISE
from shardwise.optim.lamb import Lamb
from shardwise.optim.lion import Lion
from shardwise.optim.muon import Muon
from shardwise.optim.optimizers import build_optimizer, supports_found_inf, supports_grad_scale
from shardwise.optim.schedulers import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)
from shardwise.optim.uncorrected import UncorrectedAdam

__all__ = [
    "ELEMENTWISE",
    "LRRangeTest",
    "Lamb",
    "Lion",
    "Muon",
    "OneCycle",
    "UncorrectedAdam",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_optimizer",
    "build_scheduler",
    "supports_found_inf",
    "supports_grad_scale",
]
