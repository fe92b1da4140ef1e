"""Schedules that sweep the rate: the range test and the single cycle."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.optim.schedule import Schedule, per_group, whole


class LRRangeTest(Schedule):
    """Learning-rate range test: the rate grows from ``min_lr`` by a constant amount.

    ``min_lr * (1 + rate * (i + 1) / step_size)``; with ``staircase`` the fraction is floored.
    Source: L. N. Smith, arXiv 1803.09820.

    Args:
        optimizer: the optimizer to drive.
        lr_range_test_min_lr: the first rate, one or one a group.
        lr_range_test_step_size: batches per unit of growth.
        lr_range_test_step_rate: growth per unit, as a multiple of ``min_lr``.
        lr_range_test_staircase: grow in steps instead of every batch.
        last_batch_iteration: index of the last finished batch; -1 starts from the beginning.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self._min_lrs = per_group("lr_range_test_min_lr", optimizer, lr_range_test_min_lr)
        self._step_size = whole("lr_range_test_step_size", lr_range_test_step_size, minimum=1)
        self._step_rate = float(lr_range_test_step_rate)
        self._staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, index: int) -> list[float]:  # noqa: D102
        grown = (index + 1) / self._step_size
        if self._staircase:
            grown = float(math.floor(grown))
        return [rate * (1 + self._step_rate * grown) for rate in self._min_lrs]


class OneCycle(Schedule):
    """One triangle of the rate from ``cycle_min_lr`` to ``cycle_max_lr`` and back, then a slow decay.

    With ``h`` the height of the triangle in [0, 1]: rate ``min + (max - min) * h``, beta1
    ``max - (max - min) * h``; after the cycle, with ``d`` batches since its end in units of
    ``decay_step_size``: rate ``min / (1 + decay_lr_rate * d)``, beta1 ``max * (1 + decay_mom_rate * d)``.
    Source: L. N. Smith, arXiv 1803.09820.

    Two facts of upstream are kept: beta2 becomes 0.99 while the momentum is cycled (reported), and the
    constructor sets beta1 to ``cycle_min_mom``, so that the very first optimizer step runs with it.

    Args:
        optimizer: the optimizer to drive; the momentum is cycled only if it has ``betas``.
        cycle_min_lr: the rate at both ends of the cycle, one or one a group.
        cycle_max_lr: the rate at the peak, one or one a group.
        decay_lr_rate: decay of the rate after the cycle; 0 for none.
        cycle_first_step_size: batches on the way up.
        cycle_second_step_size: batches on the way down; null for as many as up.
        cycle_first_stair_count: stairs on the way up; 0 for a straight line.
        cycle_second_stair_count: stairs on the way down; null for as many as up.
        decay_step_size: batches per unit of decay; 0 for no decay.
        cycle_momentum: cycle beta1 against the rate.
        cycle_min_mom: beta1 at the peak of the rate, one or one a group.
        cycle_max_mom: beta1 at both ends, one or one a group.
        decay_mom_rate: growth of beta1 after the cycle; 0 for none.
        last_batch_iteration: index of the last finished batch; -1 starts from the beginning.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self._min_lrs = per_group("cycle_min_lr", optimizer, cycle_min_lr)
        self._max_lrs = per_group("cycle_max_lr", optimizer, cycle_max_lr)
        self._min_moms = per_group("cycle_min_mom", optimizer, cycle_min_mom)
        self._max_moms = per_group("cycle_max_mom", optimizer, cycle_max_mom)
        self._up = float(cycle_first_step_size)
        self._down = self._up if cycle_second_step_size is None else float(cycle_second_step_size)
        if self._up <= 0:
            raise ConfigError(f"cycle_first_step_size: must be above 0, got {cycle_first_step_size}.")
        if self._down < 0:
            raise ConfigError(f"cycle_second_step_size: must not be negative, got {cycle_second_step_size}.")
        if decay_step_size < 0:
            raise ConfigError(f"decay_step_size: must not be negative, got {decay_step_size}.")
        self._up_stairs = whole("cycle_first_stair_count", cycle_first_stair_count, minimum=0)
        self._down_stairs = (
            self._up_stairs
            if cycle_second_stair_count is None
            else whole("cycle_second_stair_count", cycle_second_stair_count, minimum=0)
        )
        self._decay_step_size = float(decay_step_size)
        self._decay_lr_rate = float(decay_lr_rate)
        self._decay_mom_rate = float(decay_mom_rate)
        self._cycles_momentum = cycle_momentum and _takes_betas(optimizer)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, index: int) -> list[float]:  # noqa: D102
        if index < self._up + self._down:
            height = self._height(index)
            bounds = zip(self._min_lrs, self._max_lrs, strict=True)
            return [low + (high - low) * height for low, high in bounds]
        return [low / (1 + self._decay_lr_rate * self._decayed(index)) for low in self._min_lrs]

    def momenta(self, index: int) -> list[float]:
        """beta1 of each group when ``index`` is the last finished batch."""
        if index < 0:
            return list(self._min_moms)
        if index < self._up + self._down:
            height = self._height(index)
            bounds = zip(self._min_moms, self._max_moms, strict=True)
            return [high - (high - low) * height for low, high in bounds]
        return [high * (1 + self._decay_mom_rate * self._decayed(index)) for high in self._max_moms]

    def _write(self) -> None:
        super()._write()
        if not self._cycles_momentum:
            return
        momenta = self.momenta(self.last_batch_iteration)
        for group, beta1 in zip(self.optimizer.param_groups, momenta, strict=True):
            if beta1 >= 1 > group["betas"][0]:
                warnings.warn(
                    f"scheduler.params.decay_mom_rate: beta1 reached {beta1:.4g} at batch "
                    f"{self.last_batch_iteration}; from 1 on Adam's average grows without bound. Lower it.",
                    stacklevel=3,
                )
            group["betas"] = (beta1, 0.99)

    def _height(self, index: int) -> float:
        position = (index + 1) % (self._up + self._down)
        rising = position <= self._up
        done, length, stairs = (
            (position, self._up, self._up_stairs)
            if rising
            else (self._up + self._down - position, self._down, self._down_stairs)
        )
        return math.floor(done * stairs / length) / stairs if stairs else done / length

    def _decayed(self, index: int) -> float:
        since = index - (self._up + self._down) + 1
        return since / self._decay_step_size if self._decay_step_size else 0.0


def _takes_betas(optimizer: Optimizer) -> bool:
    """Whether momentum can be cycled on this optimizer; warns of what cycling, or not cycling, changes."""
    if "betas" not in optimizer.defaults:
        warnings.warn(
            f"scheduler.params.cycle_momentum has no effect: {type(optimizer).__name__} has no betas. Set it to false.",
            stacklevel=3,
        )
        return False
    replaced = sorted({float(group["betas"][1]) for group in optimizer.param_groups} - {0.99})
    if replaced:
        warnings.warn(
            f"scheduler.params.cycle_momentum: OneCycle sets beta2 to 0.99 (the optimizer's: "
            f"{', '.join(map(str, replaced))}). Set cycle_momentum to false to keep the optimizer's betas.",
            stacklevel=3,
        )
    return True
