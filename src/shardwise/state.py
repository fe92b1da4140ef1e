"""`PartialState`, `AcceleratorState` and `GradientState` for scripts that read them: they answer from the newest
Accelerator. Nothing is kept here."""

from __future__ import annotations

from typing import Any

from shardwise.accelerator import current
from shardwise.accelerator.kinds import DistributedType
from shardwise.accelerator.process import Processes
from shardwise.accelerator.state import State
from shardwise.accelerator.windows import GradientState as _GradientState


class PartialState:
    """The processes of this run: those of the newest Accelerator, or new ones."""

    def __new__(cls, cpu: bool = False, **kwargs: Any) -> Any:
        """A :class:`shardwise.accelerator.Processes`.

        Args:
            cpu: compute on the CPU, if there are none yet.
            kwargs: ``backend`` and ``timeout``, likewise.
        """
        if cpu or kwargs:
            made = Processes(cpu, **kwargs)
            current.set_current_processes(made)
        return current.current_processes()

    @staticmethod
    def _reset_state() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)


class AcceleratorState:
    """The state of the newest Accelerator; without one, that of the processes alone."""

    def __new__(cls, mixed_precision: str | None = None, cpu: bool = False, **_: Any) -> Any:
        """A :class:`shardwise.accelerator.state.State`."""
        accelerator = current.current_accelerator()
        if accelerator is not None:
            return accelerator.state
        return State(PartialState(cpu), mixed_precision or "no")

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Part with the newest Accelerator: what it is asked from now on raises an error."""
        current.reset()


class GradientState:
    """The windows of the newest Accelerator."""

    def __new__(cls, gradient_accumulation_plugin: Any = None) -> Any:
        """A :class:`shardwise.accelerator.windows.GradientState`."""
        accelerator = current.current_accelerator()
        return _GradientState() if accelerator is None else accelerator.gradient_state

    @staticmethod
    def _reset_state() -> None:
        """Forget the windows of the newest Accelerator."""
        accelerator = current.current_accelerator()
        if accelerator is not None:
            accelerator.gradient_state.reset()


def is_initialized() -> bool:
    """Whether there is an Accelerator."""
    return current.current_accelerator() is not None


__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState", "is_initialized"]
