"""The schedules that `prepare` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.accelerator.windows import GradientState
from shardwise.errors import ConfigError

KINDS = ("accelerate", "update")


class AcceleratedScheduler:
    """A schedule that advances when its optimizers stepped.

    Upstream advances it once for each process, because a schedule is written for the number of batches of one process's
    loader, and the processes share these. ``"update"`` advances it once an update, whatever the number of processes.

    Args:
        scheduler: any ``torch.optim.lr_scheduler``, or what has its methods.
        optimizers: prepared; none of them may have skipped its step.
        state: of the windows.
        advances: how often for one update: the processes, or 1 where batches are split or ``"update"`` is asked for.
        with_optimizer: False: advance at every call, as the plain schedule does.
        each_micro_batch: advance so for every micro-batch of the window (``adjust_scheduler``).
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[Any],
        state: GradientState,
        *,
        advances: int,
        with_optimizer: bool = True,
        each_micro_batch: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self.gradient_state = state
        self.step_with_optimizer = with_optimizer
        self.advances = advances
        self._each_micro_batch = each_micro_batch
        self._is_accelerate_prepared = True
        # OneCycleLR and its like end; the last advance of an epoch may want to go past.
        self._ends = hasattr(scheduler, "total_steps")
        self._engines = [o.engine for o in self.optimizers if hasattr(o, "engine")]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, if the window is complete and the step was taken."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        state = self.gradient_state
        if not state.sync_gradients:
            return
        times = self.advances
        if self._each_micro_batch and state.inside:
            times *= state.step
        if len(self._engines) == 1:
            # On a GPU an engine learns only later how its step went; nobody waits for that here.
            self._engines[0].when_settled(lambda applied: self._advance(times, args, kwargs) if applied else None)
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        self._advance(times, args, kwargs)

    def _advance(self, times: int, args: Any, kwargs: Any) -> None:
        for _ in range(times):
            if not self._ends or self.scheduler._step_count <= self.scheduler.total_steps:
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group."""
        for engine in self._engines:
            engine.settle()
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """The schedule's."""
        for engine in self._engines:
            engine.settle()
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load into the schedule."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"AcceleratedScheduler({self.scheduler!r})"


class EngineScheduler:
    """The schedule of a ds_config: its engine advances it with every step that it takes.

    Args:
        scheduler: the engine's.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._is_accelerate_prepared = True

    def step(self, *_: Any, **__: Any) -> None:
        """Nothing: the engine has done it."""

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def check_kind(kind: str) -> str:
    """The given ``step_scheduler``.

    Raises:
        ConfigError: an unknown one.
    """
    if kind not in KINDS:
        raise ConfigError(f"step_scheduler: expected one of {', '.join(KINDS)}, got {kind!r}.")
    return kind
