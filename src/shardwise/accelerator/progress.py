"""A bar that shows how far a loop is, on the first process, where somebody looks at a terminal."""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

T = TypeVar("T")

# Seconds between two drawings: enough for the eye. The loop itself draws. A thread that did would hold rich's lock now
# and then, and a worker of the loader that is forked just then would wait for ever when it prints.
PAUSE = 0.1


class Place(Protocol):
    """Which process this is: :class:`shardwise.accelerator.process.Processes` says it."""

    @property
    def is_main_process(self) -> bool:
        """Whether it is the first of all."""


class Bars:
    """The bars that are on the screen together: a loop within a loop has its bar below the other's.

    Args:
        processes: which process this is; the others show nothing.
        console: where to draw; by default stderr, and in a notebook its output.
    """

    def __init__(self, processes: Place, console: Console | None = None) -> None:
        self._main = processes.is_main_process
        self._console = console
        self._progress: Progress | None = None
        self._active: list[Bar[Any]] = []

    def over(
        self,
        iterable: Iterable[T],
        *,
        total: int | None = None,
        description: str = "",
        leave: bool | None = None,
        disable: bool = False,
    ) -> Bar[T]:
        """What to loop over instead of ``iterable``. Arguments as for :func:`progress`."""
        if total is not None and total < 0:
            raise ConfigError(f"progress: total must not be negative, but is {total}.")
        return Bar(iterable, self, total, description, leave, self._main and not disable)

    def console(self) -> Console | None:
        """Where bars are drawn; None where nobody would see them."""
        from rich.console import Console  # loaded on the process that draws

        if self._console is not None:
            return self._console if self._console.is_terminal else None
        console = Console(stderr=True)
        # Asked of the stream: rich also calls a pipe a terminal when FORCE_COLOR is set, as it is in many a CI.
        seen = console.is_jupyter or (sys.stderr.isatty() and not console.is_dumb_terminal)
        return console if seen else None

    def begin(self, bar: Bar[Any], console: Console) -> Progress:
        """A loop has begun."""
        if self._progress is None:
            self._progress = _display(console)
            self._progress.start()
            atexit.register(self._stop)  # a loop that is never left must not take the cursor along
        self._active.append(bar)
        return self._progress

    def end(self, bar: Bar[Any]) -> None:
        """A loop is over."""
        if bar in self._active:
            self._active.remove(bar)
        if not self._active:
            self._stop()

    def is_outermost(self) -> bool:
        """Whether no loop is going on."""
        return not self._active

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()


class Bar(Generic[T]):
    """An iterable that shows how far it is. Each loop over it has a bar of its own; made by :meth:`Bars.over`."""

    def __init__(
        self, iterable: Iterable[T], bars: Bars, total: int | None, description: str, leave: bool | None, speaks: bool
    ) -> None:
        self._iterable = iterable
        self._bars = bars
        self._total = total
        self._description = description
        self._leave = leave
        self._speaks = speaks
        self._drawn = False
        self._values: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]  # raises TypeError where there is no length

    def __iter__(self) -> Iterator[T]:
        console = self._bars.console() if self._speaks else None
        if console is None:
            return iter(self._iterable)  # nothing in between: no cost
        return self._loop(console)

    def show(self, **values: Any) -> None:
        """Show values behind the bar: ``bar.show(loss=loss)``. They stay until others come.

        A tensor is read (and a GPU waited for) only when the bar is drawn, and not at all where there is no bar.

        Args:
            values: numbers, tensors of one element or texts, by name.
        """
        if self._drawn:
            self._values.update(values)

    def _loop(self, console: Console) -> Iterator[T]:
        total = self._total if self._total is not None else _length(self._iterable)
        leave = self._bars.is_outermost() if self._leave is None else self._leave
        progress = self._bars.begin(self, console)
        task = progress.add_task(self._description, total=total, rate="", values="")
        clock = time.monotonic
        done, drawn = 0, clock()
        self._drawn = True
        self._values.clear()

        def draw() -> None:
            rate, shown = _rate(progress.tasks[progress.task_ids.index(task)].speed), _shown(self._values)
            progress.update(task, completed=done, rate=rate, values=shown, refresh=True)

        try:
            for item in self._iterable:
                yield item
                done += 1
                now = clock()
                if now - drawn >= PAUSE:
                    drawn = now
                    draw()
            draw()
        finally:  # also when the loop is left by break or an error
            self._drawn = False
            progress.update(task, completed=done)
            if leave:
                progress.stop_task(task)
            else:
                progress.remove_task(task)
            self._bars.end(self)


def progress(
    iterable: Iterable[T],
    *,
    processes: Place,
    total: int | None = None,
    description: str = "",
    leave: bool | None = None,
    disable: bool = False,
    bars: Bars | None = None,
) -> Bar[T]:
    """Loop over ``iterable`` with a bar: how many of how many, how many a second, how long still.

    There is a bar on the first process only, and only if stderr is a terminal (or in a notebook); elsewhere the loop
    is that over ``iterable`` itself.

    Args:
        iterable: what to loop over.
        processes: which process this is.
        total: how many there will be; by default the length, if there is one.
        description: before the bar.
        leave: whether the bar stays when the loop is over; by default that of the outermost loop does.
        disable: show nothing.
        bars: to share the screen with; loops within loops need the same.

    Returns:
        What to loop over; its ``show(loss=...)`` puts values behind the bar.

    Raises:
        ConfigError: ``total`` is negative.
    """
    bars = Bars(processes) if bars is None else bars
    return bars.over(iterable, total=total, description=description, leave=leave, disable=disable)


def _display(console: Console) -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[values]}", markup=False),
        console=console,
        auto_refresh=False,
        # What the script prints goes above the bar; but not if it goes into a file.
        redirect_stdout=console.is_jupyter or sys.stdout.isatty(),
    )


def _length(iterable: Iterable[Any]) -> int | None:
    try:
        return len(iterable)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a generator; a loader over a stream
        return None


def _rate(speed: float | None) -> str:
    if not speed:
        return ""
    return f"{speed:,.1f}/s" if speed >= 1 else f"{1 / speed:,.1f} s each"


def _shown(values: dict[str, Any]) -> str:
    return " · ".join(f"{name} {_text(value)}" for name, value in values.items())


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.item() if math.prod(value.shape) == 1 else f"of the shape {tuple(value.shape)}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
