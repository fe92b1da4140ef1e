"""The sections that are honoured: every key, its type, its bounds, its default, and what it does."""

from shardwise.config.fields import Section
from shardwise.config.sections.activations import (
    ActivationCheckpointingSection,
    CompileSection,
    FlashAttentionSection,
)
from shardwise.config.sections.monitors import (
    CometSection,
    CommsLoggerSection,
    CSVMonitorSection,
    TensorBoardSection,
    TimersSection,
    WandbSection,
)
from shardwise.config.sections.named import COMMON_OPTIMIZER_PARAMS, OptimizerSection, SchedulerSection
from shardwise.config.sections.precision import BF16Section, DataTypesSection, FP16Section, TorchAutocastSection
from shardwise.config.sections.schedules import SCHEDULER_PARAMS
from shardwise.config.sections.top import BATCH_KEYS, BATCH_SAYS, TopLevel
from shardwise.config.sections.zero import LeafModuleSection, ZeroSection

SECTIONS: dict[str, type[Section]] = {
    "optimizer": OptimizerSection,
    "scheduler": SchedulerSection,
    "fp16": FP16Section,
    "bf16": BF16Section,
    "torch_autocast": TorchAutocastSection,
    "data_types": DataTypesSection,
    "zero_optimization": ZeroSection,
    "activation_checkpointing": ActivationCheckpointingSection,
    "flashattention": FlashAttentionSection,
    "compile": CompileSection,
    "tensorboard": TensorBoardSection,
    "csv_monitor": CSVMonitorSection,
    "wandb": WandbSection,
    "comet": CometSection,
    "comms_logger": CommsLoggerSection,
    "timers": TimersSection,
}

__all__ = [
    "BATCH_KEYS",
    "BATCH_SAYS",
    "COMMON_OPTIMIZER_PARAMS",
    "SCHEDULER_PARAMS",
    "SECTIONS",
    "ActivationCheckpointingSection",
    "BF16Section",
    "CSVMonitorSection",
    "CometSection",
    "CommsLoggerSection",
    "CompileSection",
    "DataTypesSection",
    "FP16Section",
    "FlashAttentionSection",
    "LeafModuleSection",
    "OptimizerSection",
    "SchedulerSection",
    "Section",
    "TensorBoardSection",
    "TimersSection",
    "TopLevel",
    "TorchAutocastSection",
    "WandbSection",
    "ZeroSection",
]
