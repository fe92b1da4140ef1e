"""A ds_config in, one frozen Config out."""

from shardwise.config.config import Config
from shardwise.config.sections import (
    BF16Section,
    FP16Section,
    LeafModuleSection,
    OptimizerSection,
    SchedulerSection,
    TorchAutocastSection,
    ZeroSection,
)

__all__ = [
    "BF16Section",
    "Config",
    "FP16Section",
    "LeafModuleSection",
    "OptimizerSection",
    "SchedulerSection",
    "TorchAutocastSection",
    "ZeroSection",
]
