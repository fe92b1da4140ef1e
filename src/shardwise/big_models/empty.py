"""Models without memory: modules that are built on another device than the CPU, most of all on ``meta``."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from shardwise.big_models.tensors import Device, as_device, parameter_like


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build modules whose parameters have a shape and a dtype but no values, and take no memory.

    Args:
        include_buffers: build buffers without values as well. By default they are real, since tables that a module
            computes for itself (rotary frequencies, masks) are in no checkpoint.
    """
    with init_on_device("meta", include_buffers=include_buffers):
        yield


@contextlib.contextmanager
def init_on_device(device: Device, include_buffers: bool | None = None) -> Iterator[None]:
    """Build modules whose parameters lie on a device from the start.

    Each parameter moves as it is registered, so at most one lies on the CPU at a time, and a module that fills its
    parameters afterwards fills them on the device. Parameters that are registered twice stay tied. Only modules built
    by the same thread (or asyncio task) are touched; of nested contexts, the innermost decides about parameters.

    Args:
        device: where parameters go: a name, an index of the accelerator, or a ``torch.device``.
        include_buffers: buffers, and every other tensor made within the context, go there as well.

    Raises:
        ConfigError: there is no such device.
    """
    target = as_device(device)
    mover = _Mover(target)
    before = _innermost.set(mover)
    register: Any = register_module_parameter_registration_hook  # its type says that hooks return nothing
    handle = register(mover)
    try:
        with target if include_buffers else contextlib.nullcontext():
            yield
    finally:
        handle.remove()
        _innermost.reset(before)


class _Mover:
    """Torch's registration hook, which every module of the process calls: acts for its own context alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A parameter that is registered under a second name is found here, so that both names share one.
        self._done: dict[int, tuple[weakref.ref[nn.Parameter], torch.Tensor]] = {}

    def __call__(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> torch.Tensor | None:
        if _innermost.get() is not self or parameter is None or parameter.device == self._device:
            return None
        original, placed = self._done.get(id(parameter), (None, None))
        if placed is not None and original is not None and original() is parameter:
            return placed
        if is_lazy(parameter):
            placed = type(parameter)(parameter.requires_grad, device=self._device, dtype=parameter.dtype)
        else:
            placed = parameter_like(parameter, parameter.detach().to(self._device))
        self._done[id(parameter)] = (weakref.ref(parameter), placed)
        return placed


# Which context the running thread or task is in. A context variable, so that other threads see none.
_innermost: ContextVar[_Mover | None] = ContextVar("shardwise_init_on_device", default=None)
