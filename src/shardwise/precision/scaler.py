"""Loss scaling for fp16: the loss is multiplied so that small gradients do not become zero."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from shardwise.errors import ConfigError, ShardwiseError

_LARGEST_POWER = 127


class LossScaleError(ShardwiseError, ArithmeticError):
    """The gradients overflow although the loss scale cannot be lowered any further."""


class LossScaler(Protocol):
    """What the engine asks of a loss scale: a factor, and what to do after each optimizer step."""

    @property
    def scale(self) -> float:
        """Factor of the loss, and divisor of the gradients."""

    def update(self, overflow: bool) -> None:
        """Count one optimizer step; ``overflow``: a gradient was not finite on some rank (step skipped)."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""


class Fp16Section(Protocol):
    """The ``fp16`` section of a ds_config."""

    @property
    def enabled(self) -> bool:
        """Train in fp16."""

    @property
    def loss_scale(self) -> float:
        """0 for a dynamic scale, else the static one."""

    @property
    def initial_scale_power(self) -> int:
        """The dynamic scale begins at 2 to this power."""

    @property
    def loss_scale_window(self) -> int:
        """Clean steps before the scale doubles."""

    @property
    def hysteresis(self) -> int:
        """Overflows until the scale is halved."""

    @property
    def consecutive_hysteresis(self) -> bool:
        """Refill the hysteresis on every clean step."""

    @property
    def min_loss_scale(self) -> float:
        """Lowest scale."""


class NoScaler:
    """No scaling: the scale is 1."""

    scale: float = 1.0

    def update(self, overflow: bool) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, Any]:
        """No state."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """No state."""


class StaticLossScaler:
    """A scale that never changes.

    Args:
        scale: the factor, above 0.
    """

    def __init__(self, scale: float) -> None:
        if not (math.isfinite(scale) and scale > 0):
            raise ConfigError(f"fp16.loss_scale: expected a finite number above 0, got {scale!r}.")
        self.scale: float = float(scale)

    def update(self, overflow: bool) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, Any]:
        """No state: the scale comes from the configuration."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """No state."""


class DynamicLossScaler:
    """A scale that is halved on overflow and doubled after a window of clean steps, by upstream's rule.

    On overflow: with one overflow of ``hysteresis`` left the scale becomes ``max(scale / 2, min_scale)``,
    else one is used up. On a clean step: when the number of clean steps between the last overflow and this
    one is a positive multiple of ``window`` the scale doubles and the hysteresis is refilled; with
    ``consecutive_hysteresis`` every clean step refills it. The count starts as if an overflow came just
    before construction. The scale has no upper bound.

    Args:
        initial_scale: first scale.
        window: clean steps before the scale doubles, at least 1.
        hysteresis: overflows until the scale is halved, at least 1.
        consecutive_hysteresis: refill the hysteresis on every clean step.
        min_scale: lowest scale, above 0; an overflow there is an error.
    """

    def __init__(
        self,
        initial_scale: float = 2.0**16,
        *,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
    ) -> None:
        for name, value in (("loss_scale_window", window), ("hysteresis", hysteresis)):
            if value < 1:
                raise ConfigError(f"fp16.{name}: expected at least 1, got {value}.")
        if not min_scale > 0:
            raise ConfigError(f"fp16.min_loss_scale: expected a number above 0, got {min_scale}.")
        if initial_scale < min_scale:
            raise ConfigError(
                f"fp16.initial_scale_power: the first scale {initial_scale:g} is below fp16.min_loss_scale "
                f"{min_scale:g}; raise the one or lower the other."
            )
        self.scale: float = float(initial_scale)
        self._window = window
        self._hysteresis = hysteresis
        self._refill_always = consecutive_hysteresis
        self._min_scale = float(min_scale)
        self._overflows_left = hysteresis
        self._clean_steps = 0

    def update(self, overflow: bool) -> None:
        """Count one optimizer step.

        Args:
            overflow: a gradient was not finite on any rank. Must be the same on every rank.

        Raises:
            LossScaleError: overflow at the lowest scale.
        """
        if overflow:
            self._lower()
            self._clean_steps = 0
            return
        if self._refill_always:
            self._overflows_left = self._hysteresis
        # Upstream tests the clean steps before this one, so the first step after an overflow never doubles.
        if self._clean_steps > 0 and self._clean_steps % self._window == 0:
            self._overflows_left = self._hysteresis
            self.scale *= 2.0
        self._clean_steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Scale, overflows left and clean steps since the last overflow, as plain numbers."""
        return {
            "scale": self.scale,
            "overflows_left": self._overflows_left,
            "clean_steps": self._clean_steps,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; window, hysteresis and minimum stay as configured."""
        self.scale = float(state_dict["scale"])
        self._overflows_left = min(int(state_dict["overflows_left"]), self._hysteresis)
        self._clean_steps = int(state_dict["clean_steps"])

    def _lower(self) -> None:
        if self._overflows_left > 1:
            self._overflows_left -= 1
            return
        if self.scale <= self._min_scale:
            raise LossScaleError(
                f"The loss scale is already at its minimum (fp16.min_loss_scale = {self._min_scale:g}) and "
                "the gradients still overflow, so no step can be taken. The loss or a weight is probably not "
                "finite: lower the learning rate, look for NaN in the data, or train in bf16."
            )
        self.scale = max(self.scale / 2.0, self._min_scale)


def build_scaler(fp16: Fp16Section | None) -> LossScaler:
    """The loss scale that a ds_config's ``fp16`` section asks for; none when it is absent or off.

    Raises:
        ConfigError: a value that cannot work, with its JSON path.
    """
    if fp16 is None or not fp16.enabled:
        return NoScaler()
    if fp16.loss_scale != 0:
        return StaticLossScaler(fp16.loss_scale)
    if fp16.initial_scale_power > _LARGEST_POWER:
        raise ConfigError(
            f"fp16.initial_scale_power: expected at most {_LARGEST_POWER} (the loss is fp32), got "
            f"{fp16.initial_scale_power}."
        )
    return DynamicLossScaler(
        2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_scale=fp16.min_loss_scale,
    )
