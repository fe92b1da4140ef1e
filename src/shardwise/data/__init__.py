"""Data: loaders that give each rank its own part."""

from shardwise.data.loader import build_loader

__all__ = ["build_loader"]
