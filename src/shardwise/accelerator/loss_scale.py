"""The loss scale of fp16 runs without an engine: torch's own, one for each window, updated once an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.accelerator.windows import Window


class LossScale:
    """A ``torch.amp.GradScaler`` that several optimizers may share.

    The scale is updated when the next loss is scaled, not after each optimizer's step: an update between two steps
    would let the second one take out the scale again.

    Args:
        device: type of the device.
        options: arguments of the scaler.

    Attributes:
        scaler: torch's.
        generation: how often it was updated.
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


class LossScales:
    """A loss scale for each window: an update while another window is open would spoil its gradients.

    Args:
        device: type of the device.
        options: arguments of the scalers.
    """

    def __init__(self, device: str, options: dict[str, Any]) -> None:
        self._device = device
        self._options = options
        self._loaded: list[dict[str, Any]] = []

    def of(self, window: Window) -> LossScale:
        """The scale of a window's losses."""
        if window.scale is None:
            window.scale = LossScale(self._device, self._options)
            if self._loaded:
                window.scale.scaler.load_state_dict(self._loaded.pop(0))
        scale: LossScale = window.scale
        return scale

    def state_dict(self, windows: Sequence[Window]) -> dict[str, Any]:
        """The states of those that were used, in the order of their windows."""
        found = []
        for window in windows:
            if window.scale is not None:
                window.scale.settle()
                found.append(window.scale.scaler.state_dict())
        return {"scales": found}

    def load_state_dict(self, state: dict[str, Any], windows: Sequence[Window]) -> None:
        """Go on with them, in the order in which windows begin."""
        self._loaded = list(state["scales"])
        for window in windows:
            if window.scale is not None and self._loaded:
                window.scale.scaler.load_state_dict(self._loaded.pop(0))
