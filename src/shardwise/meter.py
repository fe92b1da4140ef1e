"""What a training run tells its user: one line every so many steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import psutil
import torch


@dataclass
class Meter:
    """Times the parts of a step and composes the line.

    Args:
        device: whose memory is reported; with ``breakdown`` it is waited for at the ends of each part.
        breakdown: time forward, backward and step apart (``wall_clock_breakdown``).
        total_steps: length of the run, if it is known, for the time left.
    """

    device: torch.device
    breakdown: bool
    total_steps: int | None
    _spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _since: float = field(default_factory=time.perf_counter)
    _steps: int = 0
    _samples: int = 0
    _tokens: float = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time one part of a step."""
        if not self.breakdown:
            yield
            return
        self._wait()
        started = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            self._spent[name] += time.perf_counter() - started

    def count(self, samples: int, tokens: float) -> None:
        """One step more, with this many samples and (if known) target tokens over all ranks."""
        self._steps += 1
        self._samples += samples
        self._tokens += tokens

    def line(self, step: int, values: dict[str, str]) -> str:
        """The log line for the steps since the last one; starts counting anew."""
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        steps = max(self._steps, 1)
        parts = [f"step {step}"] + [f"{name} {value}" for name, value in values.items()]
        if self._tokens:
            parts.append(f"{self._tokens / seconds:,.0f} tokens/s")
        else:
            parts.append(f"{self._samples / seconds:,.1f} samples/s")
        parts.append(f"{seconds / steps * 1e3:,.0f} ms/step")
        parts.append(f"mem {self._memory() / 2**30:.2f} GiB")
        if self.total_steps is not None and self.total_steps > step:
            left = timedelta(seconds=round((self.total_steps - step) * seconds / steps))
            parts.append(f"left {left}")
        for name, spent in self._spent.items():
            parts.append(f"{name} {spent / steps * 1e3:,.0f} ms")
        self._spent.clear()
        self._since, self._steps, self._samples, self._tokens = now, 0, 0, 0.0
        return " | ".join(parts)

    def _memory(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return int(psutil.Process().memory_info().rss)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
