"""Flat buffers that are used again, because fresh pages cost as much as the exchange that fills them."""

from __future__ import annotations

import torch


class BufferPool:
    """A free list of flat buffers by dtype and device.

    A buffer handed out is the smallest free one that is large enough, so a training step reaches a steady set of
    buffers after its first pass: as many as are ever in flight at once.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of ``numel`` elements with undefined content."""
        free = self._free.setdefault((dtype, device), [])
        fitting = [b for b in free if b.numel() >= numel]
        if fitting:
            best = min(fitting, key=torch.Tensor.numel)
            free[:] = [b for b in free if b is not best]
            return best[:numel]
        if free:
            # A larger one is needed: drop the smallest instead of keeping both.
            smallest = min(free, key=torch.Tensor.numel)
            free[:] = [b for b in free if b is not smallest]
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: torch.Tensor) -> None:
        """Hand a buffer back (whole, or the part that ``take`` returned)."""
        base = buffer if buffer._base is None else buffer._base
        self._free.setdefault((base.dtype, base.device), []).append(base)

    def clear(self) -> None:
        """Forget all free buffers."""
        self._free.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the free buffers."""
        return sum(b.numel() * b.element_size() for free in self._free.values() for b in free)
