"""How the micro-batches of a window weigh in its gradient."""

from __future__ import annotations

import torch

from shardwise.dist import Axis
from shardwise.errors import ConfigError

KINDS = ("micro_steps", "window", "tokens")


class Weighting:
    """Weights of the micro-batches of plain runs.

    Upstream divides each loss by the number of micro-batches that a window should have (``"micro_steps"``), so the
    short last window of an epoch counts less than it should, and so do long sequences in losses that are means over
    tokens. ``"window"`` divides by the micro-batches that the window had, ``"tokens"`` by the target tokens of the
    whole window on all processes; both when the window is complete, before anyone looks at the gradient.

    Args:
        kind: one of the three.
        axis: the processes.
        device: of the gradients.

    Raises:
        ConfigError: another kind.
    """

    def __init__(self, kind: str, axis: Axis, device: torch.device) -> None:
        if kind not in KINDS:
            raise ConfigError(f"gradient_normalization: expected one of {', '.join(KINDS)}, got {kind!r}.")
        self.kind = kind
        self.generation = 0
        self._axis = axis
        self._device = device
        self._total = 0.0
        self._scale: torch.Tensor | None = None

    @property
    def late(self) -> bool:
        """Whether gradients are divided when the window is complete."""
        return self.kind != "micro_steps"

    def weigh(self, tokens: float | None, again: bool) -> float:
        """What the next loss is multiplied with.

        Args:
            tokens: that the loss is the mean of.
            again: another loss of the same micro-batch went before.
        """
        if self._scale is not None:  # the window before was used
            self._scale, self._total = None, 0.0
            self.generation += 1
        if self.kind == "window":
            self._total += 0.0 if again else 1.0
            return 1.0
        if tokens is None:
            raise ConfigError(
                'gradient_normalization="tokens" needs the number of target tokens of each micro-batch: '
                "accelerator.backward(loss, tokens=n), where loss is the mean over these n tokens."
            )
        if again:
            raise ConfigError(
                'gradient_normalization="tokens": two losses in one micro-batch. Add them up, and call backward once.'
            )
        self._total += float(tokens)
        return float(tokens)

    def scale(self) -> torch.Tensor:
        """What the window's gradient, averaged over the processes, is to be multiplied with. All ranks must call this
        in the same order; it talks once a window."""
        if self._scale is None:
            total = torch.tensor([self._total], dtype=torch.float64, device=self._device)
            self._axis.sum_small(total, "weights of the window")
            self._scale = (self._axis.size / total.clamp(min=1.0))[0]
        return self._scale
