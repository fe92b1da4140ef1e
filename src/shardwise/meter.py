"""How long the parts of a step take, and how many samples and tokens go through."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Union

import psutil
import torch

# A moment: seconds on the host's clock, or an event in the queue of a device.
Mark = Union[float, torch.cuda.Event]  # noqa: UP007  the alias is evaluated by Python 3.10


def on_gpu(device: torch.device) -> bool:
    """Whether work for this device is queued on a GPU. A dry run of a GPU may have none."""
    return device.type == "cuda" and torch.cuda.is_available()


class Stopwatch:
    """Times between moments of a device's work, without ever waiting for it.

    On a CPU a moment is now. On CUDA it is an event in the current stream; the time between two of them is known when
    the device has passed them, which is looked up later. It covers what that stream did or waited for in between.

    Args:
        device: whose work is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._queued = on_gpu(device)
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event, Callable[[float], None]]] = []

    def mark(self) -> Mark:
        """This moment."""
        if not self._queued:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def measure(self, start: Mark, end: Mark, then: Callable[[float], None]) -> None:
        """Call ``then`` with the seconds between two moments, as soon as they are known; what is known by now is."""
        if isinstance(start, float) and isinstance(end, float):
            then(end - start)
        elif isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            self._pending.append((start, end, then))
            self.look()

    def look(self) -> None:
        """Hand out the times that the device has passed, oldest first."""
        done = 0
        for start, end, then in self._pending:
            if not end.query():  # type: ignore[no-untyped-call]
                break
            then(start.elapsed_time(end) / 1e3)
            done += 1
        del self._pending[:done]

    def wait(self) -> None:
        """Wait for the device, and hand out all times."""
        if self._queued:
            torch.cuda.synchronize(self.device)
        self.look()


@dataclass(frozen=True)
class Reading:
    """What was counted up to a moment, or between two."""

    seconds: float
    steps: int
    samples: int
    tokens: float
    spent: dict[str, float]  # seconds by part

    def since(self, before: Reading) -> Reading:
        """What came between ``before`` and this one."""
        return Reading(
            max(self.seconds - before.seconds, 1e-9),
            self.steps - before.steps,
            self.samples - before.samples,
            self.tokens - before.tokens,
            {name: spent - before.spent.get(name, 0.0) for name, spent in self.spent.items()},
        )

    def part(self, name: str) -> float:
        """Milliseconds of this part in one step."""
        return self.spent[name] / max(self.steps, 1) * 1e3


@dataclass
class Meter:
    """Counts steps, samples and tokens, and times the parts of a step (``wall_clock_breakdown``).

    Args:
        device: whose work is timed and whose memory is reported.
        breakdown: time the parts.
    """

    device: torch.device
    breakdown: bool
    _spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _steps: int = 0
    _samples: int = 0
    _tokens: float = 0.0

    def __post_init__(self) -> None:
        self.watch = Stopwatch(self.device)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time one part of a step. One that raises is not counted: nothing may come between an error and its user."""
        if not self.breakdown:
            yield
            return
        self._spent[name] += 0.0  # parts are listed in the order in which they first began
        start = self.watch.mark()
        yield
        self.watch.measure(start, self.watch.mark(), lambda seconds: self.add(name, seconds))

    def add(self, name: str, seconds: float) -> None:
        """Time that a part took."""
        self._spent[name] += seconds

    def count(self, samples: int, tokens: float) -> None:
        """One step more, with this many samples and (if known) target tokens over all ranks."""
        self._steps += 1
        self._samples += samples
        self._tokens += tokens

    def read(self, *, wait: bool = False) -> Reading:
        """Everything so far.

        Args:
            wait: for the device first. Else the clock is ahead of the device by the steps that are queued.
        """
        if wait:
            self.watch.wait()
        return Reading(time.perf_counter(), self._steps, self._samples, self._tokens, dict(self._spent))

    def memory(self) -> int:
        """Bytes: the most that tensors held on the GPU, or what the process holds now."""
        if on_gpu(self.device):
            return int(torch.cuda.max_memory_allocated(self.device))
        return int(psutil.Process().memory_info().rss)
