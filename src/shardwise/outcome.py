"""How a step went."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shardwise.sharding.agreement import is_finite

# Added to the norm before it divides, as torch.nn.utils.clip_grad_norm_ does.
CLIP_EPSILON = 1e-6


@dataclass
class StepOutcome:
    """Norms and success of one step, kept on the device until someone asks.

    Attributes:
        norm: gradient norm before clipping (0-d).
        clipped_norm: after clipping (0-d).
        finite: whether the gradient was finite (0-d, bool).
        bad_units: names of the units whose gradients were not finite, where that was looked up.
        deferred: whether the step was decided on the device, without waiting for it.
    """

    norm: torch.Tensor
    clipped_norm: torch.Tensor
    finite: torch.Tensor
    deferred: bool = False
    bad_units: list[str] = field(default_factory=list)
    _applied: bool | None = None

    @property
    def applied(self) -> bool:
        """Whether the parameters were stepped. Waits for the device the first time."""
        if self._applied is None:
            self._applied = is_finite(torch.where(self.finite, 0.0, torch.inf))
        return self._applied


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of this norm are multiplied with so that it is at most ``max_norm`` (0: never clip)."""
    if max_norm <= 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
