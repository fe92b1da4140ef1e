"""Train models too large for one device with the ds_config.json and the loop that you already have."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise import checkpointing, zero
    from shardwise.accelerator import (
        Accelerator,
        AutocastKwargs,
        DataLoaderConfiguration,
        DDPCommunicationHookType,
        DeepSpeedPlugin,
        DistributedDataParallelKwargs,
        DistributedType,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
    )
    from shardwise.accelerator.launchers import debug_launcher, notebook_launcher
    from shardwise.accelerator.loaders import skip_first_batches
    from shardwise.accelerator.memory import find_executable_batch_size
    from shardwise.accelerator.seeds import synchronize_rng_states
    from shardwise.big_models import (
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
        infer_auto_device_map,
        init_empty_weights,
        init_on_device,
        load_checkpoint_and_dispatch,
        load_checkpoint_in_model,
    )
    from shardwise.config import Config
    from shardwise.dist import init_distributed
    from shardwise.engine import Engine
    from shardwise.errors import CommError, ConfigError, NotYetSupported, ShardingError, ShardwiseError
    from shardwise.setup import add_config_arguments, initialize
    from shardwise.state import PartialState
    from shardwise.utils import is_rich_available

__version__ = "0.1.0"

# Where the public names live. They are loaded when they are first used: the command line then starts without torch.
_HOMES = {
    ".accelerator": (
        "Accelerator",
        "AutocastKwargs",
        "DDPCommunicationHookType",
        "DataLoaderConfiguration",
        "DeepSpeedPlugin",
        "DistributedDataParallelKwargs",
        "DistributedType",
        "GradScalerKwargs",
        "InitProcessGroupKwargs",
        "ProfileKwargs",
    ),
    ".accelerator.launchers": ("debug_launcher", "notebook_launcher"),
    ".accelerator.loaders": ("skip_first_batches",),
    ".accelerator.memory": ("find_executable_batch_size",),
    ".accelerator.seeds": ("synchronize_rng_states",),
    ".big_models": (
        "cpu_offload",
        "cpu_offload_with_hook",
        "disk_offload",
        "dispatch_model",
        "infer_auto_device_map",
        "init_empty_weights",
        "init_on_device",
        "load_checkpoint_and_dispatch",
        "load_checkpoint_in_model",
    ),
    ".config": ("Config",),
    ".dist": ("init_distributed",),
    ".engine": ("Engine",),
    ".errors": ("CommError", "ConfigError", "NotYetSupported", "ShardingError", "ShardwiseError"),
    ".setup": ("add_config_arguments", "initialize"),
    ".state": ("PartialState",),
    ".utils": ("is_rich_available",),
}
_WHERE = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("checkpointing", "zero")

# Names of Accelerate's that have no counterpart, and what to do instead.
_REFUSED = {
    "FullyShardedDataParallelPlugin": "choose a ZeRO stage: DeepSpeedPlugin(zero_stage=3) shards as FSDP does",
    "ParallelismConfig": "parallelism other than ZeRO has not landed",
    "prepare_pippy": "pipeline parallelism has not landed",
}

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "CommError",
    "Config",
    "ConfigError",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "Engine",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "NotYetSupported",
    "PartialState",
    "ProfileKwargs",
    "ShardingError",
    "ShardwiseError",
    "__version__",
    "add_config_arguments",
    "checkpointing",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "find_executable_batch_size",
    "infer_auto_device_map",
    "init_distributed",
    "init_empty_weights",
    "init_on_device",
    "initialize",
    "is_rich_available",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "skip_first_batches",
    "synchronize_rng_states",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name], __name__), name)
    if name in _REFUSED:
        # Not an AttributeError: an import would hide its message.
        raise ImportError(f"shardwise.{name}: {_REFUSED[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
