"""Train models too large for one device with the ds_config.json and the loop that you already have."""

from . import zero
from .config import Config
from .dist import init_distributed
from .engine import Engine
from .errors import CommError, ConfigError, NotYetSupported, ShardingError, ShardwiseError
from .initialize import initialize

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
