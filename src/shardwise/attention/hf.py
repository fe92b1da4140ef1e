"""Hugging Face models: their attention registry, by which each model names the implementation it wants."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.attention.backend import routed
from shardwise.attention.check import (
    BATCH,
    LENGTH,
    OTHER_LENGTH,
    Inputs,
    Reference,
    on_real_inputs,
    random_tensor,
    references,
    width_of,
)
from shardwise.attention.install import install, original_forward

_IMPLEMENTATION = "_attn_implementation_internal"
# Names under which attention modules take their mask, the tokens that they look at instead of their own, and a cache.
MASKS = ("attention_mask", "mask", "encoder_attention_mask")
OTHERS = ("key_value_states", "encoder_hidden_states")
CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
_CROSS = re.compile(r"cross_?att|cross$|encdec|enc_dec|encoder_att|encoder_decoder_att|multihead_attn")


def is_cross_name(name: str) -> bool:
    """Whether a module's name (its last two parts) says that it is cross-attention."""
    return any(_CROSS.search(part.lower()) for part in name.split(".")[-2:])


def hf_models(model: nn.Module) -> list[tuple[str, Any]]:
    """The Hugging Face models in a model that are not part of another."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return []  # nobody has imported it, so nothing here is of it
    found: list[tuple[str, Any]] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, library.PreTrainedModel) and id(module) not in inside:
            found.append((name, module))
            inside.update(id(m) for m in module.modules())
    return found


@dataclass
class HFChange:
    """What was done to one model: its implementation before, why it stays if it does, and what undoes it."""

    before: str
    refused: str = ""
    undo: Callable[[], None] = field(default=lambda: None)


def set_implementation(model: Any) -> HFChange:
    """Have a model use the registry's ``sdpa``, if it uses its own code so far.

    Args:
        model: a ``PreTrainedModel``; its configurations are changed.
    """
    before = model.config._attn_implementation or "eager"
    if before != "eager":
        return HFChange(before)
    if getattr(model.config, "output_attentions", False):
        return HFChange(before, "its config asks for output_attentions, which no fast kernel can give")
    parts = [m for m in model.modules() if isinstance(m, sys.modules["transformers.modeling_utils"].PreTrainedModel)]
    unable = next((m for m in parts if not m._can_set_attn_implementation()), None)
    if unable is not None:
        return HFChange(before, f"{type(unable).__name__} does not take its attention from the registry")
    configs = _configs(parts)
    kept = [(c, c.__dict__.get(_IMPLEMENTATION)) for c in configs]

    def undo() -> None:
        for config, value in kept:
            setattr(config, _IMPLEMENTATION, value)

    try:
        model.set_attn_implementation("sdpa")
    except (ValueError, ImportError) as error:
        undo()
        return HFChange(before, str(error).split(". ")[0])
    return HFChange(before, undo=undo)


def _configs(models: list[Any]) -> list[Any]:
    found: dict[int, Any] = {}
    todo = [m.config for m in models]
    while todo:
        config = todo.pop()
        if id(config) in found or config is None:
            continue
        found[id(config)] = config
        todo += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return list(found.values())


def switch_hf(
    module: nn.Module,
    name: str,
    *,
    before: str,
    dropout: float | None,
    cross: bool,
    unchecked: bool,
) -> Callable[[], None]:
    """Route one attention module of a model whose implementation has been set.

    Args:
        module: uses the registry.
        name: of the module.
        before: the implementation that the model had; calls that are not routed still have it.
        dropout: the probability in place of the module's own; None keeps that.
        cross: whether calls that are cross-attention are routed.
        unchecked: compare the first call with the original.

    Returns:
        What undoes it.
    """
    original = original_forward(module)
    always_crosses = is_cross_name(name) or getattr(module, "is_cross_attention", False) is True
    pending = [unchecked]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not cross and (always_crosses or _is_cross_call(self, args, kwargs)):
            return original(self, *args, **kwargs) if before != "eager" else as_eager(self, args, kwargs)
        if pending[0]:
            pending[0] = False
            args_, kwargs_ = _without_cache(self, args, kwargs)
            eager, switched = partial(as_eager, self, args_, kwargs_), partial(original, self, *args_, **kwargs_)
            on_real_inputs(name, self, eager, switched, _masks_of(self, args_, kwargs_))
        with routed(self.training, dropout):
            return original(self, *args, **kwargs)

    return install(module, forward)


def as_eager(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module's forward by its own code, on a mask that was made for ``sdpa``.

    That mask is True where a key is seen; and it is absent where a causal one would hide only later keys. The
    module's own code adds what it gets to the scores.
    """
    bound = inspect.signature(original_forward(module)).bind(module, *args, **kwargs)
    values = bound.arguments
    hidden = next(v for k, v in values.items() if k != "self" and isinstance(v, torch.Tensor))
    crossing = _is_cross_call(module, args, kwargs)
    for name in MASKS:
        if name not in bound.signature.parameters:
            continue
        mask = values.get(name)
        wanted = not crossing and name != "encoder_attention_mask"
        if mask is None and wanted and getattr(module, "is_causal", True):
            length = hidden.shape[-2]
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=hidden.device).tril()
        if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool:
            low = torch.finfo(hidden.dtype).min
            values[name] = torch.zeros(mask.shape, dtype=hidden.dtype, device=hidden.device).masked_fill(~mask, low)
    with _own_code(module):
        return original_forward(module)(*bound.args, **bound.kwargs)


@contextmanager
def _own_code(module: Any) -> Iterator[None]:
    """A context in which the module, and no other, believes that its model's implementation is ``eager``."""
    shared = module.config
    own = copy.copy(shared)
    own.__dict__[_IMPLEMENTATION] = "eager"
    module.config = own
    try:
        yield
    finally:
        module.config = shared


def _is_cross_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if any(kwargs.get(name) is not None for name in OTHERS):
        return True
    if len(args) < 2:
        return False
    bound = inspect.signature(original_forward(module)).bind_partial(module, *args, **kwargs).arguments
    return any(bound.get(name) is not None for name in OTHERS)


def _masks_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    bound = inspect.signature(original_forward(module)).bind_partial(module, *args, **kwargs).arguments
    return [bound.get(name, kwargs.get(name)) for name in MASKS]


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call that leaves no trace in a cache; its output is that of the first tokens."""
    bound = inspect.signature(original_forward(module)).bind(module, *args, **kwargs)
    for name in CACHES:
        if name in bound.arguments:
            bound.arguments[name] = None
    return bound.args[1:], bound.kwargs


def hf_references(module: nn.Module, name: str) -> list[Reference]:
    """What an attention module gives by its own code on random inputs; empty if its inputs cannot be guessed."""
    width = width_of(module)
    parameters = inspect.signature(original_forward(module)).parameters
    mask_name = next((n for n in MASKS if n in parameters), None)
    if width is None or mask_name is None:
        return []
    hidden = random_tensor(BATCH, LENGTH, width, module=module)
    lower = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=hidden.device).tril()
    hides = torch.zeros(LENGTH, LENGTH, device=hidden.device).masked_fill(~lower, torch.finfo(torch.float32).min)
    padded = hides.repeat(BATCH, 1, 1, 1)
    padded[1, ..., :2] = torch.finfo(torch.float32).min
    padded[1, ..., :2, :2] = 0  # every query sees something
    extra: dict[str, Any] = {}
    if "position_embeddings" in parameters:
        angles = random_tensor(1, LENGTH, getattr(module, "head_dim", width), module=module)
        extra["position_embeddings"] = (angles.cos(), angles.sin())
    other = next((n for n in OTHERS if n in parameters), None)
    if is_cross_name(name) and other is not None:
        extra[other] = random_tensor(BATCH, OTHER_LENGTH, width, module=module)
        calls = [((hidden,), extra)]
        return _references(module, calls, calls)
    causal = getattr(module, "is_causal", True)
    own: list[Inputs] = [
        ((hidden,), {**extra, mask_name: hides[None, None] if causal else None}),
        ((hidden,), {**extra, mask_name: padded}),
    ]
    asked: list[Inputs] = [((hidden,), {**extra, mask_name: None}), own[1]]
    return _references(module, own, asked)


def _references(module: nn.Module, own: list[Inputs], asked: list[Inputs]) -> list[Reference]:
    with _own_code(module):
        found = references(module, own, asked)
    return found if len(found) == len(own) else []
