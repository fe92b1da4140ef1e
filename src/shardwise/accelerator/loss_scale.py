"""The loss scale of fp16 runs without an engine: torch's own, updated once an iteration."""

from __future__ import annotations

from typing import Any

import torch


class LossScale:
    """A ``torch.amp.GradScaler`` that several optimizers may share.

    The scale is updated when the next loss is scaled, not after each optimizer's step: an update between two steps
    would let the second one take out the scale again.

    Args:
        device: type of the device.
        options: arguments of the scaler.

    Attributes:
        scaler: torch's.
    """

    def __init__(self, device: str, options: dict[str, Any]) -> None:
        self.scaler = torch.amp.GradScaler(device, **options)
        self.generation = 0
        self._used = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that is differentiated."""
        self.settle()
        return self.scaler.scale(loss)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        """Step, unless a gradient is not finite."""
        self._used = True
        self.scaler.step(optimizer, *args)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the scale out of an optimizer's gradients."""
        self._used = True  # also where the script then takes no step
        self.scaler.unscale_(optimizer)

    def settle(self) -> None:
        """Update the scale by what the last gradients were, if that is still to be done."""
        if self._used:
            self._used = False
            self.generation += 1
            self.scaler.update()
