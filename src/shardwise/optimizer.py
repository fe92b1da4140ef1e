"""The optimizers that `prepare` returns, for scripts that import them from here."""

from shardwise.accelerator.optimizer import AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
