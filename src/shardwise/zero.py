"""``shardwise.zero``: the names that scripts written for upstream's ``deepspeed.zero`` use."""

from .sharding.access import GatheredParameters

__all__ = ["GatheredParameters"]
