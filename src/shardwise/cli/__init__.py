"""The `shardwise` command: one file a subcommand. Nothing here imports torch until a command runs."""

from shardwise.cli._app import app

__all__ = ["app"]
