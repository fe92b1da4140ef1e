"""ZeRO: a model's parameters, gradients and optimizer state, sharded over ranks."""

from shardwise.sharding.access import GatheredParameters, unit_of
from shardwise.sharding.model import ShardedModel
from shardwise.sharding.policy import POLICIES, Policy, model_state_bytes
from shardwise.sharding.unit import Piece, Slot, Unit

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
