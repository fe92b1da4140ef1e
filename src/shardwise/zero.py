"""``shardwise.zero``: the names that scripts written for upstream's ``deepspeed.zero`` use."""

from .sharding.access import GatheredParameters
from .sharding.init import Init

__all__ = ["GatheredParameters", "Init"]
