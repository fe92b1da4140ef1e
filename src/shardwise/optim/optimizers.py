"""Optimizers by their ds_config names, and what each can do inside its kernel."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.optim.common import has_fused_kernel
from shardwise.optim.hidden import split_groups
from shardwise.optim.kwargs import NamedSection, checked_kwargs, constructed, did_you_mean
from shardwise.optim.lamb import Lamb
from shardwise.optim.lion import Lion
from shardwise.optim.muon import Muon
from shardwise.optim.uncorrected import UncorrectedAdam

Parameters: TypeAlias = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]

OURS: Mapping[str, type[Optimizer]] = {"Lamb": Lamb, "Lion": Lion, "Muon": Muon}
"""Optimizers that shardwise has itself, by their ds_config names. ``Muon`` beats torch's class of that name."""

ANY_CASE = ("Adam", "AdamW", "SGD", "Adagrad", *OURS)
"""Names that upstream takes in any case."""

_PATH = "optimizer.params"
# Upstream's switches of its Adam, which torch's constructor does not have.
_ADAM_SWITCHES = ("adam_w_mode", "torch_adam", "bias_correction", "fp32_optimizer_states")
# Upstream's CPU versions of the others take this one of them.
_STATE_SWITCH = "fp32_optimizer_states"
_WITH_STATE_SWITCH = (Lion, torch.optim.Adagrad)
# Clipping is the engine's; the configuration has made it gradient_clipping already.
_CLIPPING = "max_grad_norm"


def build_optimizer(section: NamedSection, params: Parameters, model: nn.Module | None = None) -> Optimizer:
    """The optimizer that a ds_config's ``optimizer`` section names.

    ``Adam`` is AdamW unless ``adam_w_mode`` is false; both have no weight decay unless given, as upstream.
    The fused implementation is taken where torch has a right one for these tensors, unless ``fused`` or
    ``foreach`` is given.

    Args:
        section: ``type`` is ``Adam``, ``AdamW``, ``SGD``, ``Adagrad``, ``Lamb``, ``Lion``, ``Muon`` (any case) or a
            class of ``torch.optim``; ``params`` are its keyword arguments.
        params: the tensors that will be stepped (their device and dtype decide ``fused``), or groups of them.
        model: has the names and places of the parameters, by which Muon tells hidden matrices from the rest.

    Raises:
        ConfigError: an unknown or refused name, or arguments that the class does not take, with their JSON path.
    """
    cls = _optimizer_class(section.type)
    given = {name: value for name, value in section.params.items() if name != _CLIPPING}
    is_adam = cls in (torch.optim.Adam, torch.optim.AdamW)
    listed: list[Any] = list(params)
    also_known: tuple[str, ...] = (_CLIPPING,)
    if is_adam:
        also_known = (*_ADAM_SWITCHES, _CLIPPING)
        cls, given = _adam(cls, given)
    elif cls in _WITH_STATE_SWITCH and _STATE_SWITCH in given:
        _said_of_states(_switches(given, (_STATE_SWITCH,)))
    unwritable = ("decoupled_weight_decay", "decoupled") if is_adam else ()
    decoupled = given.pop("decoupled", None) if cls is UncorrectedAdam else None
    kwargs = checked_kwargs(cls, given, _PATH, also_known=also_known, unwritable=unwritable)
    if decoupled is not None:
        kwargs["decoupled"] = decoupled
    if is_adam:
        kwargs.setdefault("weight_decay", 0.0)
    if cls is Muon:
        listed = split_groups(listed, model)
    elif _may_fuse(cls, kwargs, listed):
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
    if getattr(optimizer, "takes_found_inf", False):
        return True
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
    known.update(OURS)
    folded = str(name).casefold()
    for candidate in ANY_CASE:
        if candidate.casefold() == folded:
            return known[candidate]
    from shardwise.config.optimizers import refusal  # not at import time: pydantic is slow to import

    if (reason := refusal(str(name))) is not None:
        raise ConfigError(f"optimizer.type: {name} {reason}.")
    if name not in known:
        raise ConfigError(
            f"optimizer.type: no optimizer is called {name!r}{did_you_mean(str(name), known)} Known: "
            f"{', '.join(sorted(known))}."
        )
    return known[name]


def _adam(cls: type[Optimizer], given: dict[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    """Take upstream's switches out of ``given``, and choose among Adam, AdamW and both without bias correction."""
    switches = _switches(given, _ADAM_SWITCHES)
    _said_of_states(switches)
    decoupled = switches.get("adam_w_mode", True) or cls is torch.optim.AdamW
    if not switches.get("adam_w_mode", True) and cls is torch.optim.AdamW:
        warnings.warn(
            f"{_PATH}.adam_w_mode: false has no effect with type AdamW, as upstream; use type Adam.",
            stacklevel=4,
        )
    if not switches.get("bias_correction", True):
        return UncorrectedAdam, {**given, "decoupled": decoupled}
    return (torch.optim.AdamW if decoupled else cls), given


def _switches(given: dict[str, Any], names: Iterable[str]) -> dict[str, bool]:
    """Take the switches of these names out of ``given``."""
    switches = {name: given.pop(name) for name in names if name in given}
    problems = [
        f"{_PATH}.{name}: expected true or false, got {value!r}."
        for name, value in switches.items()
        if not isinstance(value, bool)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return switches


def _said_of_states(switches: Mapping[str, bool]) -> None:
    if not switches.get(_STATE_SWITCH, True):
        warnings.warn(
            f"{_PATH}.{_STATE_SWITCH}: false has no effect: the state has the dtype of the weights that are stepped, "
            "which are fp32 masters unless bf16.bf16_master_weights_and_grads is true.",
            stacklevel=4,
        )


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
    if cls is torch.optim.SGD and tensor.device.type == "cpu" and tensor.dtype.itemsize == 2:
        # Wrong values for 16 elements and more (torch 2.13, CPU, bf16 and fp16).
        return False
    return has_fused_kernel(tensor)


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
