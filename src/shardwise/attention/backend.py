"""The call that everything is routed to: ``scaled_dot_product_attention``, flash back-end first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from shardwise.errors import ConfigError

# The math back-end comes last: it can do everything, and holds the whole matrix of scores.
ORDER = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class FlashAttentionSection(Protocol):
    """``flashattention`` of a configuration."""

    @property
    def enable(self) -> bool:
        """Whether attention is routed at all."""

    @property
    def attention_dropout(self) -> bool | float | None:
        """None: what the module says; False: none; True: the module's own, required; a number: that one."""

    @property
    def cross_attention(self) -> bool:
        """Whether cross-attention is routed as well."""


class Unsuitable(Exception):
    """A call that turned out not to be an attention that ``scaled_dot_product_attention`` computes."""


def flash_first() -> AbstractContextManager[Any]:
    """A context in which the flash back-end is tried first, then cuDNN's, the memory-efficient one, and math."""
    return sdpa_kernel(ORDER, set_priority=True)  # type: ignore[no-any-return, unused-ignore]


def dropout_of(setting: bool | float | None) -> float | None:
    """The probability that replaces every module's own; None where the module's own stays."""
    if setting is None or setting is True:
        return None
    return float(setting)


class DropoutMode(TorchFunctionMode):
    """A context in which ``scaled_dot_product_attention`` drops with this probability, whatever it is called with."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self._p = p

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace the probability; pass on everything else."""
        named = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], self._p, *args[5:])
            else:
                named["dropout_p"] = self._p
        return func(*args, **named)


class Heard(TorchFunctionMode):
    """A context that notes whether ``scaled_dot_product_attention`` is called; ``called`` is None before the first."""

    called: bool | None = None

    def __enter__(self) -> Any:
        self.called = False
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note the call, and pass on everything."""
        self.called = self.called or func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def routed(training: bool, dropout: float | None) -> AbstractContextManager[Any]:
    """Flash first, and the probability that the configuration sets (none outside training)."""
    if dropout is None:
        return flash_first()
    stack = ExitStack()
    stack.enter_context(flash_first())
    stack.enter_context(DropoutMode(dropout if training else 0.0))
    return stack


# Added to a score, at most this hides it: exp(-1e4) is 0 in every floating-point format.
HIDES = -1e4


def attend(
    query: torch.Tensor,
    key_transposed: torch.Tensor,
    value: torch.Tensor,
    steps: Sequence[tuple[Any, ...]],
    dropout: float,
    dim: int,
) -> torch.Tensor:
    """``dropout(softmax(steps(query @ key_transposed), dim)) @ value`` without the matrix of scores.

    Args:
        query: (..., L, D).
        key_transposed: (..., D, S).
        value: (..., S, E); leading dimensions broadcast as in ``matmul``.
        steps: what is done to the scores, first to last: ``("scale", s)``, ``("divide", s)``, ``("add", bias)``,
            ``("subtract", bias)``, ``("fill", mask, value)``, ``("keep", mask, value)``, and ``("causal", step)``,
            a step that hides the keys after each query where there are as many keys as queries.
        dropout: probability.
        dim: that the softmax is taken over; must be the last.

    Returns:
        (..., L, E).

    Raises:
        Unsuitable: not an attention: another dimension, or a fill that does not hide.
    """
    if query.dim() < 2 or dim not in (-1, max(query.dim(), key_transposed.dim()) - 1):
        raise Unsuitable(f"its softmax is taken over dimension {dim}")
    if query.dtype != value.dtype:  # scores in higher precision, which the kernels have inside
        query, key_transposed = query.to(value.dtype), key_transposed.to(value.dtype)
    length, keys = query.shape[-2], key_transposed.shape[-1]
    scale, causal = 1.0, False
    bias: torch.Tensor | None = None
    shown: torch.Tensor | None = None
    for step in steps:
        if step[0] == "causal":
            if length == keys:
                causal = True
                continue
            step = step[1]
        kind, operand = step[0], step[1]
        if kind in {"scale", "divide"}:
            if isinstance(operand, torch.Tensor):
                if operand.dim() and operand.shape[-1] != 1:
                    raise Unsuitable("its scores are scaled key by key")
                query = query * operand if kind == "scale" else query / operand
            else:
                scale = scale * operand if kind == "scale" else scale / operand
            if bias is not None:
                bias = bias * operand if kind == "scale" else bias / operand
        elif kind in {"add", "subtract"}:
            if isinstance(operand, torch.Tensor):  # a number changes no softmax
                operand = operand.to(query.dtype) if kind == "add" else -operand.to(query.dtype)
                bias = operand if bias is None else bias + operand
        else:
            mask = operand.bool() if kind == "fill" else ~operand.bool()
            if step[2] > HIDES:
                raise Unsuitable(f"its scores are filled with {step[2]:g}, which hides nothing")
            if math.isinf(step[2]):
                shown = ~mask if shown is None else shown & ~mask
            else:
                # A finite value: where a query sees no key at all, all of them count alike, as in the original.
                base = query.new_zeros(()) if bias is None else bias
                low = max(float(step[2]), torch.finfo(query.dtype).min)
                bias = torch.where(mask, base.new_tensor(low), base)
    if causal and (shown is not None or bias is not None):
        lower = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril()
        shown, causal = (lower if shown is None else shown & lower), False
    mask = shown
    if bias is not None:
        mask = bias if shown is None else bias.masked_fill(~shown, -torch.inf)
    return _call(query, key_transposed.transpose(-2, -1), value, mask, dropout, causal, scale)


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """With four dimensions, which the fast back-ends want, whatever there were."""
    leading = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])  # type: ignore[no-untyped-call]

    def four(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[:-2] != leading:
            tensor = tensor.expand(*leading, *tensor.shape[-2:])
        return tensor if len(leading) == 2 else tensor.reshape(-1, 1, *tensor.shape[-2:])

    if mask is not None and len(leading) != 2:
        mask = four(mask.expand(*leading, query.shape[-2], key.shape[-2]))
    elif mask is not None and mask.dim() < 2:
        mask = mask.expand(query.shape[-2], key.shape[-2])
    out = F.scaled_dot_product_attention(
        four(query), four(key), four(value), attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale
    )
    return out if len(leading) == 2 else out.reshape(*leading, *out.shape[-2:])


# Where modules keep the probability with which they drop attention weights.
DROPOUT_NAMES = ("attention_dropout", "attn_dropout", "attn_drop", "dropout", "dropout_p", "dropout_prob", "attn_pdrop")


def own_dropout(module: nn.Module) -> float | None:
    """The probability that a module's attention has, None if it has none."""
    for name in DROPOUT_NAMES:
        found = getattr(module, name, None)
        if isinstance(found, nn.Dropout):
            return float(found.p)
        if isinstance(found, int | float) and not isinstance(found, bool):
            return float(found)
    return None


def require_own_dropout(name: str, p: float | None) -> None:
    """For ``attention_dropout: true``.

    Raises:
        ConfigError: the module has no probability of its own.
    """
    if p is None:
        raise ConfigError(
            f"flashattention.attention_dropout: true asks for each module's own probability, and {name} has none; "
            "write a number, or null to leave every module as it is."
        )
