"""Train models too large for one device with the ds_config.json and the loop that you already have."""

from typing import TYPE_CHECKING, Any

from . import zero
from .dist import init_distributed
from .engine import Engine
from .errors import CommError, ConfigError, NotYetSupported, ShardingError, ShardwiseError
from .initialize import initialize

if TYPE_CHECKING:
    from .config import Config

__version__ = "0.1.0"

__all__ = [
    "CommError",
    "Config",
    "ConfigError",
    "Engine",
    "NotYetSupported",
    "ShardingError",
    "ShardwiseError",
    "__version__",
    "init_distributed",
    "initialize",
    "zero",
]


def __getattr__(name: str) -> Any:
    # pydantic costs more to import than all the rest: it is loaded when a configuration is.
    if name == "Config":
        from .config import Config

        return Config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
