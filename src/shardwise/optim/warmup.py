"""Schedules that begin with a warm-up: constant, linear decay, cosine."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from enum import Enum

from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.optim.kwargs import did_you_mean
from shardwise.optim.schedule import Schedule, per_group, whole


class _Default(Enum):
    """A default that overrides something the user may have set, told apart so that it can be reported."""

    MAX_LR = 0.001


class _Warmup(Schedule):
    """The rising part that three schedules share: a factor from 0 to 1 over ``warmup_num_steps`` batches."""

    def __init__(self, optimizer: Optimizer, num_steps: int, kind: str, last_batch_iteration: int) -> None:
        steps = whole("warmup_num_steps", num_steps, minimum=0)
        # log(1) = 0 divides: upstream warms up over 2 batches at least. 0 stays 0: no warm-up.
        self._warmup_steps = max(2, steps) if steps else 0
        if kind not in ("log", "linear"):
            hint = did_you_mean(str(kind), ("log", "linear"))
            raise ConfigError(f"warmup_type: expected 'log' or 'linear', got {kind!r}{hint}")
        self._warmup_kind = kind
        super().__init__(optimizer, last_batch_iteration)

    def _warms_up(self, index: int) -> bool:
        return index < self._warmup_steps and self._warmup_steps > 0

    def _risen(self, index: int) -> float:
        if index < 0:
            return 0.0
        if self._warmup_kind == "log":
            return math.log(index + 1) / math.log(self._warmup_steps)
        return index / self._warmup_steps


class WarmupLR(_Warmup):
    """Warm up from ``warmup_min_lr`` to ``warmup_max_lr``, then stay.

    ``min + (max - min) * g`` with ``g = log(i + 1) / log(W)`` or ``i / W`` below ``W``, then 1; ``W`` is
    ``max(2, warmup_num_steps)``. The first optimizer step, set by the constructor, runs at ``warmup_min_lr``.

    Args:
        optimizer: the optimizer to drive.
        warmup_min_lr: the first rate, one or one a group.
        warmup_max_lr: the last rate, one or one a group; null for the optimizer's own.
        warmup_num_steps: batches of warm-up; 0 for none.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: index of the last finished batch; -1 starts from the beginning.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._min_lrs = per_group("warmup_min_lr", optimizer, warmup_min_lr)
        self._max_lrs = None if warmup_max_lr is None else per_group("warmup_max_lr", optimizer, warmup_max_lr)
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def rates(self, index: int) -> list[float]:  # noqa: D102
        factor = self._risen(index) if self._warms_up(index) else self._after_warmup(index)
        highest = self._initial_rates() if self._max_lrs is None else self._max_lrs
        return [low + (high - low) * factor for low, high in zip(self._min_lrs, highest, strict=True)]

    def _after_warmup(self, index: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Warm up as :class:`WarmupLR`, then fall in a line to ``warmup_min_lr`` at batch ``total_num_steps``.

    After the warm-up of ``W`` batches the factor is ``max(0, (T - i) / max(1, T - W))``.

    Args:
        optimizer: the optimizer to drive.
        total_num_steps: ``T``, batches of the whole run.
        warmup_min_lr: the first and the last rate, one or one a group.
        warmup_max_lr: the highest rate, one or one a group; null for the optimizer's own. Left out it is
            0.001, whatever the optimizer's rate, as upstream; a warning says so when the two differ.
        warmup_num_steps: batches of warm-up; 0 for none.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: index of the last finished batch; -1 starts from the beginning.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | _Default | None = _Default.MAX_LR,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total_steps = _checked_total(total_num_steps, warmup_num_steps)
        if isinstance(warmup_max_lr, _Default):
            warmup_max_lr = warmup_max_lr.value
            own = sorted({float(group["lr"]) for group in optimizer.param_groups} - {warmup_max_lr})
            if own:
                warnings.warn(
                    f"scheduler.params.warmup_max_lr is not given: WarmupDecayLR warms up to its default "
                    f"{warmup_max_lr} and not to the optimizer's lr ({', '.join(map(str, own))}). Set it to "
                    "the rate that you want, or to null for the optimizer's.",
                    stacklevel=2,
                )
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after_warmup(self, index: int) -> float:
        # Above 1 only without a warm-up, before the first batch.
        left = (self._total_steps - index) / max(1, self._total_steps - self._warmup_steps)
        return min(1.0, max(0.0, left)) if self._warmup_steps == 0 else max(0.0, left)


class WarmupCosineLR(_Warmup):
    """Warm up to the optimizer's own rate, then fall along half a cosine. The ratios multiply that rate.

    Warm-up ratio ``m + (1 - m) * g`` with ``m = warmup_min_ratio`` and ``g`` as in :class:`WarmupLR`, but 0
    for the first optimizer step. Then, with ``c = cos_min_ratio`` and
    ``x = min(1, (i - W + 1) / max(1, T - W))``, the ratio ``c + (1 - c) * (1 + cos(pi * x)) / 2``.
    Source of the cosine: I. Loshchilov and F. Hutter, arXiv 1608.03983.

    Args:
        optimizer: the optimizer to drive.
        total_num_steps: ``T``, batches of the whole run.
        warmup_min_ratio: ratio at the start of the warm-up.
        warmup_num_steps: batches of warm-up; 0 for none.
        cos_min_ratio: ratio at the end.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: index of the last finished batch; -1 starts from the beginning.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total_steps = _checked_total(total_num_steps, warmup_num_steps)
        self._min_ratio = float(warmup_min_ratio)
        self._cos_min_ratio = float(cos_min_ratio)
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def rates(self, index: int) -> list[float]:  # noqa: D102
        return [rate * self._ratio(index) for rate in self._initial_rates()]

    def _ratio(self, index: int) -> float:
        if self._warms_up(index):
            if index < 0:
                return 0.0
            return self._min_ratio + (1 - self._min_ratio) * self._risen(index)
        span = max(1, self._total_steps - self._warmup_steps)
        progress = min(1.0, (index - self._warmup_steps + 1) / span)
        fallen = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self._cos_min_ratio + (1 - self._cos_min_ratio) * fallen)


def _checked_total(total_num_steps: int, warmup_num_steps: int) -> int:
    total = whole("total_num_steps", total_num_steps, minimum=1)
    if total < whole("warmup_num_steps", warmup_num_steps, minimum=0):
        warnings.warn(
            f"scheduler.params: total_num_steps {total} is below warmup_num_steps {warmup_num_steps}: the "
            "run ends before the warm-up does.",
            stacklevel=3,
        )
    return total
