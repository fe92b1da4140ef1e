"""``nn.MultiheadAttention``: its own code, asked for no weights, is already a call of ``scaled_dot_product_attention``.

So all its ways (``batch_first``, ``kdim`` and ``vdim``, both kinds of masks, ``add_bias_kv``, ``add_zero_attn``) are
those of torch. What is added: the flash back-end first, the configuration's dropout, and what is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.attention.backend import flash_first
from shardwise.attention.check import BATCH, LENGTH, OTHER_LENGTH, Inputs, random_tensor
from shardwise.attention.install import install, original_forward


def is_mha(module: nn.Module) -> bool:
    """Whether the module is one, with torch's own forward."""
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward


def is_cross_call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether keys come from another sequence than queries, as far as the tensors tell.

    They do if they have another shape, or if keys and values are one tensor that the queries are not. Three different
    tensors of one shape count as self-attention (each may have been normalised by itself).
    """
    return query is not key and (key is value or query.shape != key.shape)


def switch_mha(
    module: nn.MultiheadAttention, *, dropout: float | None, cross: bool, warn: Callable[[str], None]
) -> Callable[[], None]:
    """Route a ``nn.MultiheadAttention``.

    Args:
        module: changed in place.
        dropout: the probability in place of the module's own; None keeps that.
        cross: whether calls that are cross-attention are routed.
        warn: says once what happens when weights are asked for.

    Returns:
        What undoes it.
    """
    original = original_forward(module)

    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        rest = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        if not cross and is_cross_call(query, key, value):
            return original(self, query, key, value, *rest)
        if need_weights:
            warn("it is called with need_weights=True (the default), which no fast kernel can give; call it with False")
        own = self.dropout
        try:
            self.dropout = own if dropout is None else dropout
            with flash_first():
                return original(self, query, key, value, *rest)
        finally:
            self.dropout = own

    return install(module, forward)


def mha_inputs(module: nn.MultiheadAttention, *, cross: bool) -> tuple[list[Inputs], list[Inputs]]:
    """Random inputs: for the original, which computes its weights; for the switched module, which does not."""

    def made(length: int, width: int) -> torch.Tensor:
        sizes = (BATCH, length) if module.batch_first else (length, BATCH)
        return random_tensor(*sizes, width, module=module)

    query = made(LENGTH, module.embed_dim)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool, device=query.device)
    padding[1, -2:] = True
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=query.device).triu(1)
    calls: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = []
    if module.kdim == module.vdim == module.embed_dim:
        calls.append(((query, query, query), {}))
        calls.append(((query, query, query), {"attn_mask": hidden, "key_padding_mask": padding}))
    if cross:
        calls.append(((query, made(OTHER_LENGTH, module.kdim), made(OTHER_LENGTH, module.vdim)), {}))
    with_weights: list[Inputs] = [(args, {**kwargs, "need_weights": True}) for args, kwargs in calls]
    without: list[Inputs] = [(args, {**kwargs, "need_weights": False}) for args, kwargs in calls]
    return with_weights, without
