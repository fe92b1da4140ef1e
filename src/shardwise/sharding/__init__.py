"""ZeRO: a model's parameters, gradients and optimizer state, sharded over ranks."""

from .access import GatheredParameters, unit_of
from .model import ShardedModel
from .policy import POLICIES, Policy, model_state_bytes
from .unit import Piece, Slot, Unit

__all__ = [
    "POLICIES",
    "GatheredParameters",
    "Piece",
    "Policy",
    "ShardedModel",
    "Slot",
    "Unit",
    "model_state_bytes",
    "unit_of",
]
