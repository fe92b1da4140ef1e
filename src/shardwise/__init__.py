"""Train models too large for one device with the ds_config.json and the loop that you already have."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise import checkpointing, zero
    from shardwise.config import Config
    from shardwise.dist import init_distributed
    from shardwise.engine import Engine
    from shardwise.errors import CommError, ConfigError, NotYetSupported, ShardingError, ShardwiseError
    from shardwise.setup import add_config_arguments, initialize

__version__ = "0.1.0"

# Where the public names live. They are loaded when they are first used: the command line then starts without torch.
_HOMES = {
    "CommError": ".errors",
    "Config": ".config",
    "ConfigError": ".errors",
    "Engine": ".engine",
    "NotYetSupported": ".errors",
    "ShardingError": ".errors",
    "ShardwiseError": ".errors",
    "add_config_arguments": ".setup",
    "init_distributed": ".dist",
    "initialize": ".setup",
}

__all__ = [
    "CommError",
    "Config",
    "ConfigError",
    "Engine",
    "NotYetSupported",
    "ShardingError",
    "ShardwiseError",
    "__version__",
    "add_config_arguments",
    "checkpointing",
    "init_distributed",
    "initialize",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in ("checkpointing", "zero"):
        return importlib.import_module(f".{name}", __name__)
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
