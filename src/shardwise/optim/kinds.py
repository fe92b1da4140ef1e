"""What an optimizer needs to see of a parameter: its elements, the norms of the whole, or the whole."""

from __future__ import annotations

import enum
import inspect

import torch
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.optim.lamb import Lamb
from shardwise.optim.lion import Lion
from shardwise.optim.muon import Muon
from shardwise.optim.uncorrected import UncorrectedAdam

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        Lion,
        UncorrectedAdam,
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
"""Classes that update each entry from that entry's own values and the step count alone.

A flat slice of a parameter may then be stepped by itself.
"""

BY_PARAMETER: frozenset[type[Optimizer]] = frozenset({torch.optim.Adafactor, torch.optim.Muon})
"""Classes that update each parameter from that parameter's own values, all of them at once."""


class Kind(enum.Enum):
    """How an optimizer steps a sharded model."""

    ELEMENTS = "each rank steps its slices"
    NORMS = "each rank steps its slices, with norms of whole parameters"
    MATRICES = "slices, with one operation on whole matrices"
    WHOLE = "each parameter is stepped whole, by one rank"
    UNKNOWN = "as WHOLE, in one call for all parameters: it may count its own steps"


def kind_of(optimizer: Optimizer, *, allow_untested: bool, cut: bool) -> Kind:
    """How an optimizer steps a sharded model.

    A subclass that changes nothing but its constructor is what its base is. Of any other class it is taken that it
    steps each parameter by itself, as all of ``torch.optim`` do; it then gets whole parameters.

    Args:
        optimizer: any optimizer.
        allow_untested: accept classes of which nothing is known (``zero_allow_untested_optimizer``).
        cut: whether any parameter may be spread over ranks.

    Raises:
        ConfigError: the class takes a closure, or nothing is known of it and it is not allowed.
    """
    _check_closure(optimizer)
    cls = type(optimizer)
    known = (*ELEMENTWISE, *BY_PARAMETER, Lamb, Muon)
    base = next((k for k in known if issubclass(cls, k) and _inherits_all(cls, k)), None)
    if base in ELEMENTWISE:
        return Kind.ELEMENTS
    if base is Lamb:
        return Kind.NORMS
    if base is Muon:
        return Kind.MATRICES
    if base in BY_PARAMETER:
        return Kind.WHOLE
    if cut and not allow_untested and not issubclass(cls, known):
        raise ConfigError(
            f"it is not known whether the optimizer {cls.__name__} steps each parameter by itself, which it must where "
            "each rank steps a part of the model. If it does, set `zero_allow_untested_optimizer` to true (it then "
            "gets whole parameters); if it looks at several parameters at once, use stage 0."
        )
    return Kind.UNKNOWN


def _inherits_all(cls: type[Optimizer], base: type[Optimizer]) -> bool:
    """Whether the class has the methods of ``base``, except those that make and print it."""
    own = [c for c in cls.__mro__[: cls.__mro__.index(base)]]
    changed = {name for c in own for name, value in vars(c).items() if callable(value) or isinstance(value, property)}
    # `step` of any class is wrapped when its first instance is made; an inherited one is the same underneath.
    return not {n for n in changed if not n.startswith("__")} - {"step"} and _plain(cls.step) is _plain(base.step)


def _plain(function: object) -> object:
    return inspect.unwrap(function) if callable(function) else function


def _check_closure(optimizer: Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} evaluates the loss itself, several times a step (a closure); the "
            "engine's loop of forward, backward and step cannot serve it. Use an optimizer that steps from gradients."
        )
