"""What a module has besides its parameters, so that a recomputation finds and leaves it as the first call did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from shardwise import _torch


class ModuleState:
    """Training flags and buffers of a module and its parts, from before the first of two calls.

    Made before the first call; :meth:`first_call_ended` follows it. Copies are made during a recomputation only, and
    only of the buffers that the first call wrote. Such a buffer is read by the recomputation as it is then, not as it
    was: what a block writes must not be what its output depends on (batch normalisation's running statistics are not).

    Args:
        module: None has nothing.
    """

    def __init__(self, module: nn.Module | None) -> None:
        parts = list(module.modules()) if module is not None else []
        self._flags = [(part, part.training) for part in parts]
        self._before = [(part, name, b, _version(b)) for part in parts for name, b in part._buffers.items()]
        self._written: list[tuple[nn.Module, str]] = []

    def first_call_ended(self) -> None:
        """Find out which buffers it wrote."""
        for part, name, tensor, version in self._before:
            now = part._buffers.get(name)
            if now is not tensor or _version(now) != version or _may_be_statistics(tensor):
                self._written.append((part, name))
        self._before = []

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """A context with the flags of the first call, after which flags and buffers are as they were before it."""
        changed = [(part, part.training) for part, flag in self._flags if part.training != flag]
        kept = [(part, name, part._buffers.get(name)) for part, name in self._written]
        copies = [(tensor, tensor.detach().clone()) for _, _, tensor in kept if tensor is not None]
        with ExitStack() as stack:
            for tensor, _ in copies:
                if not tensor.is_inference():
                    # They end with the numbers that they had: what read them since the first call stays valid.
                    stack.enter_context(_torch.preserve_version(tensor))
            for part, flag in changed:
                part.training = not flag
            try:
                yield
            finally:
                for part, flag in changed:
                    part.training = flag
                with torch.no_grad():
                    for tensor, copy in copies:
                        tensor.copy_(copy)
                for part, name, buffer in kept:
                    part._buffers[name] = buffer


def _may_be_statistics(tensor: torch.Tensor | None) -> bool:
    """``batch_norm`` writes a mean and a variance per channel, and torch does not count these writes."""
    return tensor is not None and tensor.dim() == 1 and tensor.is_floating_point()


def _version(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None or tensor.is_inference() else tensor._version
