"""``shardwise.zero``: the names that scripts written for upstream's ``deepspeed.zero`` use."""

from shardwise.sharding.access import GatheredParameters
from shardwise.sharding.init import Init

__all__ = ["GatheredParameters", "Init"]
