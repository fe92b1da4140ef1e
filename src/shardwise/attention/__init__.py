"""Routes attention to ``scaled_dot_product_attention``: the ``flashattention`` section."""

from shardwise.attention.switch import Switched, switch_attention

__all__ = ["Switched", "switch_attention"]
