"""How the micro-batches of a window weigh in its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.accelerator.windows import Window
from shardwise.dist import Axis
from shardwise.errors import ConfigError

KINDS = ("micro_steps", "window", "tokens")


@dataclass(eq=False, slots=True)
class Weights:
    """Of the micro-batches of one window.

    Attributes:
        total: on this process.
        scale: what the gradient is to be multiplied with, once somebody wanted to know.
    """

    total: float = 0.0
    scale: torch.Tensor | None = None


class Weighting:
    """Weights of the micro-batches of plain runs.

    Upstream divides each loss by the number of micro-batches that a window should have (``"micro_steps"``), so the
    short last window of an epoch counts less than it should, and so do long sequences in losses that are means over
    tokens. ``"window"`` divides by the micro-batches that the window had, ``"tokens"`` by the target tokens of the
    whole window on all processes; both when the window is complete, before anyone looks at the gradient.

    Args:
        kind: "window" or "tokens".
        axis: the processes.
        device: where they talk.
    """

    def __init__(self, kind: str, axis: Axis, device: torch.device) -> None:
        self.kind = kind
        self._axis = axis
        self._device = device

    def weigh(self, window: Window, tokens: float | None, again: bool) -> float:
        """What the next loss of a window is multiplied with.

        Args:
            window: whose micro-batch it is.
            tokens: that the loss is the mean of.
            again: another loss of the same micro-batch went before.
        """
        if window.weights is None or window.weights.scale is not None:  # the window before was used
            window.weights = Weights()
        weight = weight_of(self.kind, tokens, again)
        window.weights.total += 0.0 if again else weight
        return weight

    def scale(self, window: Window) -> torch.Tensor:
        """What a window's gradient, averaged over the processes, is to be multiplied with. All processes must call this
        in the same order; they talk once a window."""
        if window.weights is None:
            window.weights = Weights()
        weights: Weights = window.weights
        if weights.scale is None:
            total = torch.tensor([weights.total], dtype=torch.float64, device=self._device)
            self._axis.sum_small(total, "weights of the window")
            weights.scale = (self._axis.size / total.clamp(min=1.0))[0]
        return weights.scale


def weight_of(kind: str, tokens: float | None, again: bool) -> float:
    """The weight of a loss.

    Args:
        kind: "window" or "tokens".
        tokens: that the loss is the mean of.
        again: another loss of the same micro-batch went before.

    Raises:
        ConfigError: tokens are needed and not given, or given for two losses of one micro-batch.
    """
    if kind == "window":
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
    return float(tokens)
