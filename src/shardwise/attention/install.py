"""Forwards of single modules, replaced so that copies of the module and its state keep working."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def original_forward(module: nn.Module) -> Forward:
    """The class's own forward, as a function of the module and its arguments."""
    forward: Forward = type(module).forward
    return forward


def has_own_forward(module: nn.Module) -> bool:
    """Whether somebody has replaced the forward of this very module."""
    return "forward" in module.__dict__


def install(module: nn.Module, forward: Forward) -> Callable[[], None]:
    """Give one module another forward.

    It becomes a method of the module, not a function that knows the module: a deep copy then gets a method of the
    copy, and a pickled module comes back with its class's forward.

    Args:
        module: changed in place; parameters, buffers and hooks stay.
        forward: called with the module first.

    Returns:
        What takes it away again.
    """
    forward.__name__ = "forward"
    method = MethodType(forward, module)
    module.__dict__["forward"] = method

    def undo() -> None:
        if module.__dict__.get("forward") is method:
            del module.__dict__["forward"]

    return undo
