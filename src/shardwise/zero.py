"""``shardwise.zero``: the names that scripts written for upstream's ``deepspeed.zero`` use."""

from shardwise.sharding.access import GatheredParameters, register_external_parameter
from shardwise.sharding.init import Init

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]
