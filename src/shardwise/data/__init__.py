"""Data: loaders that give each rank its own part."""

from .loader import build_loader

__all__ = ["build_loader"]
