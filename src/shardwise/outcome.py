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
        loss: mean over the window and all ranks (0-d), or None if no loss went through the engine.
    """

    norm: torch.Tensor
    clipped_norm: torch.Tensor
    finite: torch.Tensor
    deferred: bool = False
    loss: torch.Tensor | None = None
    bad_units: list[str] = field(default_factory=list)
    _applied: bool | None = None
    _on_host: torch.Tensor | None = None
    _copied: torch.cuda.Event | None = None

    def start_copy(self) -> None:
        """Send ``finite`` to the host behind the step's kernels: nobody then waits for what is queued later."""
        if self.finite.device.type != "cuda":
            return
        self._on_host = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._on_host.copy_(self.finite, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    @property
    def applied(self) -> bool:
        """Whether the parameters were stepped. Waits for the device the first time."""
        if self._applied is None:
            if self._on_host is not None and self._copied is not None:
                self._copied.synchronize()
                self._applied = bool(self._on_host)
            else:
                self._applied = is_finite(torch.where(self.finite, 0.0, torch.inf))
        return self._applied


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of this norm are multiplied with so that it is at most ``max_norm`` (0: never clip)."""
    if max_norm <= 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
