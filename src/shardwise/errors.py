"""Every exception that shardwise raises on purpose."""

from __future__ import annotations


class ShardwiseError(Exception):
    """Base of all errors that shardwise raises on purpose."""


class ConfigError(ShardwiseError, ValueError):
    """A configuration that cannot be honoured. The message lists every problem with its JSON path."""


class NotYetSupported(ConfigError):
    """A key or argument that shardwise knows, whose capability has not landed yet."""


class ShardingError(ShardwiseError, RuntimeError):
    """A model, parameter or call that does not fit the way the model is sharded."""


class CommError(ShardwiseError, RuntimeError):
    """A collective that failed: a rank died, diverged, or did not arrive in time."""
