"""The Accelerate face: write the loop once, run it on one process or many, with or without a ds_config."""

from shardwise.accelerator.accelerator import Accelerator
from shardwise.accelerator.deepspeed import DeepSpeedPlugin, DummyOptim, DummyScheduler
from shardwise.accelerator.kinds import DistributedType
from shardwise.accelerator.process import Processes
from shardwise.accelerator.settings import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "Processes",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
]
