"""Optimizers by their ds_config names, and what an optimizer can do on a shard."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch.optim import Optimizer

from shardwise.errors import ConfigError, NotYetSupported
from shardwise.optim.kwargs import NamedSection, checked_kwargs, constructed, did_you_mean

Parameters: TypeAlias = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Classes of ``torch.optim`` that update each entry from that entry's own values and the step count alone.

A flat slice of a parameter may then be stepped by itself. A subclass may do anything: look up
``type(optimizer)``.
"""

_PATH = "optimizer.params"
_ANY_CASE = ("Adam", "AdamW", "SGD", "Adagrad")
_NOT_LANDED = frozenset(
    {"lamb", "lion", "muon", "onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd"}
)
# Upstream's switches of its Adam, which torch's constructor does not have.
_ADAM_SWITCHES = ("adam_w_mode", "torch_adam", "bias_correction", "fp32_optimizer_states")
_FUSED_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def build_optimizer(section: NamedSection, params: Parameters) -> Optimizer:
    """The optimizer that a ds_config's ``optimizer`` section names.

    ``Adam`` is AdamW unless ``adam_w_mode`` is false; both have no weight decay unless given, as upstream.
    The fused implementation is taken where torch has a right one for these tensors, unless ``fused`` or
    ``foreach`` is given.

    Args:
        section: ``type`` is ``Adam``, ``AdamW``, ``SGD``, ``Adagrad`` (any case) or a class of
            ``torch.optim``; ``params`` are its keyword arguments.
        params: the tensors that will be stepped (their device and dtype decide ``fused``), or groups of them.

    Raises:
        ConfigError: an unknown name, or arguments that the class does not take, with their JSON path.
        NotYetSupported: an optimizer or option of upstream that shardwise does not have yet.
    """
    cls = _optimizer_class(section.type)
    given = dict(section.params)
    if "max_grad_norm" in given:
        raise ConfigError(
            f"{_PATH}.max_grad_norm: an optimizer does not clip; use the top-level key gradient_clipping."
        )
    is_adam = cls in (torch.optim.Adam, torch.optim.AdamW)
    if is_adam:
        cls, given = _adam(cls, given)
    kwargs = checked_kwargs(
        cls,
        given,
        _PATH,
        also_known=_ADAM_SWITCHES if is_adam else (),
        unwritable=("decoupled_weight_decay",) if is_adam else (),
    )
    if is_adam:
        kwargs.setdefault("weight_decay", 0.0)
    listed: list[Any] = list(params)
    if _may_fuse(cls, kwargs, listed):
        kwargs["fused"] = True
    return cast(Optimizer, constructed(cls, listed, kwargs, _PATH))


def supports_grad_scale(optimizer: Optimizer) -> bool:
    """Whether ``step()`` divides by ``optimizer.grad_scale`` (a one-element tensor) inside its kernel.

    torch's fused optimizers do, and write the divided gradient back to ``.grad``. Loaded state can switch a
    group back to another implementation, which refuses the attribute, so ask after loading too.
    """
    # Private: torch.amp.GradScaler reads the same attribute.
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return all(group.get("fused") for group in optimizer.param_groups)


def supports_found_inf(optimizer: Optimizer) -> bool:
    """Whether ``step()`` changes nothing, now, when ``optimizer.found_inf`` is 1.

    Fused SGD allocates its momentum before it looks at ``found_inf`` and takes it as filled afterwards, so it
    can skip only once every parameter has its momentum.
    """
    if not supports_grad_scale(optimizer):
        return False
    return all(
        "momentum_buffer" in optimizer.state.get(param, {})
        for group in optimizer.param_groups
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0
        for param in group["params"]
    )


def _optimizer_class(name: str | None) -> type[Optimizer]:
    known = {
        cls.__name__: cls
        for cls in vars(torch.optim).values()
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer
    }
    folded = str(name).casefold()
    for candidate in _ANY_CASE:
        if candidate.casefold() == folded:
            return known[candidate]
    if folded in _NOT_LANDED:
        raise NotYetSupported(
            f"optimizer.type: {name} is not available in shardwise yet; use AdamW, SGD or another class of torch.optim."
        )
    if name not in known:
        raise ConfigError(
            f"optimizer.type: no optimizer is called {name!r}{did_you_mean(str(name), known)} Known: "
            f"{', '.join(sorted(known))}."
        )
    return known[name]


def _adam(cls: type[Optimizer], given: dict[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    """Take upstream's switches out of ``given`` and choose between Adam and AdamW."""
    switches = {name: given.pop(name) for name in _ADAM_SWITCHES if name in given}
    problems = [
        f"{_PATH}.{name}: expected true or false, got {value!r}."
        for name, value in switches.items()
        if not isinstance(value, bool)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    if not switches.get("bias_correction", True):
        raise NotYetSupported(
            f"{_PATH}.bias_correction: false is not available; torch's Adam always corrects. Remove it."
        )
    if not switches.get("fp32_optimizer_states", True):
        raise NotYetSupported(
            f"{_PATH}.fp32_optimizer_states: false is not available; the moments have the dtype of the fp32 "
            "shard. Remove it."
        )
    if not switches.get("adam_w_mode", True):
        if cls is torch.optim.AdamW:
            warnings.warn(
                f"{_PATH}.adam_w_mode: false has no effect with type AdamW, as upstream; use type Adam.",
                stacklevel=3,
            )
        return cls, given
    return torch.optim.AdamW, given


def _may_fuse(cls: type[Optimizer], kwargs: Mapping[str, Any], params: list[Any]) -> bool:
    """Whether torch has a fused implementation for the class, the tensors and the options, left to us."""
    choices = {"fused", "foreach", "differentiable"}
    groups = [item for item in params if isinstance(item, dict)]
    if "fused" not in inspect.signature(cls).parameters or choices & kwargs.keys():
        return False
    if any(choices & group.keys() for group in groups):
        return False
    if cls is torch.optim.SGD and any(options.get("momentum", 0) != 0 for options in (kwargs, *groups)):
        # Fused SGD raises when a parameter gets its first gradient after another one has momentum.
        return False
    tensors = _tensors(params)
    return bool(tensors) and all(_fusable(cls, tensor) for tensor in tensors)


def _fusable(cls: type[Optimizer], tensor: torch.Tensor) -> bool:
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided:
        return False
    if cls is torch.optim.SGD and tensor.device.type == "cpu" and tensor.dtype.itemsize == 2:
        # Wrong values for 16 elements and more (torch 2.13, CPU, bf16 and fp16).
        return False
    return tensor.dtype in _FUSED_DTYPES


def _tensors(params: list[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for item in params:
        if isinstance(item, dict):
            inner = item["params"]
            if not isinstance(inner, (torch.Tensor, list)):
                # The optimizer reads it after us, and an iterator would be used up.
                inner = item["params"] = list(inner)
            found += _tensors([inner] if isinstance(inner, torch.Tensor) else inner)
        elif isinstance(item, tuple):
            found.append(item[1])
        else:
            found.append(item)
    return found
