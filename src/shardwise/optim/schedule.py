"""What every learning-rate schedule of ours is: a closed form over the index of the last batch.

Upstream counts an index ``i`` of the last finished batch: -1 at construction, 0 after the first ``step()``.
torch counts ``last_epoch``, which is 0 at construction, so ``i = last_epoch - 1``. The rate of optimizer step
``n`` (from 0) is therefore the formula at ``i = n - 1``, and the first one is what the constructor sets.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwise.errors import ConfigError


class Schedule(LRScheduler):
    """A schedule in closed form: the rate depends on the index of the last batch and on nothing else.

    Args:
        optimizer: the optimizer whose groups get the rate; a rate that is a tensor is filled in place.
        last_batch_iteration: index of the last finished batch; -1 starts from the beginning.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        for group in optimizer.param_groups:
            # torch wants it there when it resumes; upstream asks only for the index.
            group.setdefault("initial_lr", _copied(group["lr"]))
        index = whole("last_batch_iteration", last_batch_iteration, minimum=-1)
        # torch's constructor steps once, which writes the first rates.
        super().__init__(optimizer, last_epoch=index)

    @property
    def last_batch_iteration(self) -> int:
        """Index of the last finished batch, -1 before the first."""
        return self.last_epoch - 1

    @abstractmethod
    def rates(self, index: int) -> list[float]:
        """The rate of each group when ``index`` is the last finished batch."""

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rate of each group at the current index, from the formula (not from the optimizer)."""
        return list(self.rates(self.last_batch_iteration))

    def step(self, epoch: int | None = None) -> None:
        """Count one batch and write its rates into the optimizer.

        Args:
            epoch: go to this index of the last batch instead of the next one.
        """
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch + 1
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain numbers. The shape of the schedule comes from the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a saved position and write its rates into the optimizer."""
        self.step(int(state_dict["last_batch_iteration"]))

    def _initial_rates(self) -> list[float]:
        """What the optimizer's groups had before any scheduler."""
        return [float(rate) for rate in self.base_lrs]

    def _write(self) -> None:
        groups = self.optimizer.param_groups
        rates = self.rates(self.last_batch_iteration)
        if len(rates) != len(groups):
            raise ConfigError(
                f"{type(self).__name__} was built for {len(rates)} parameter groups and the optimizer now "
                f"has {len(groups)}; build the scheduler after the last add_param_group()."
            )
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [_copied(group["lr"]) for group in groups]


def per_group(name: str, optimizer: Optimizer, value: float | Sequence[float]) -> list[float]:
    """``value`` for each parameter group. Raises ConfigError when a list has another length."""
    count = len(optimizer.param_groups)
    if not isinstance(value, Sequence):
        return [float(value)] * count
    if len(value) != count:
        raise ConfigError(
            f"{name}: got {len(value)} values, but the optimizer has {count} parameter groups; give one "
            "number, or one for each group."
        )
    return [float(item) for item in value]


def whole(name: str, value: float, *, minimum: int) -> int:
    """``value`` as an int. Raises ConfigError when it is not a whole number of at least ``minimum``."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or value != value // 1 or value < minimum:
        raise ConfigError(f"{name}: expected a whole number of at least {minimum}, got {value!r}.")
    return int(value)


def _copied(value: Any) -> Any:
    """A rate that no later in-place write reaches."""
    return value.clone() if isinstance(value, torch.Tensor) else value
