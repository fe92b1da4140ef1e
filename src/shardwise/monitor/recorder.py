"""Takes the values of every step from the device to the trackers, without waiting for the device."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shardwise.errors import ConfigError
from shardwise.messages import logger
from shardwise.monitor.tracker import Tracker

# Steps whose values leave the device together.
TOGETHER = 10


@dataclass(eq=False)
class Entry:
    """One step.

    Attributes:
        samples: seen over all ranks so far: the x axis.
        on_device: values by name that the device may not have computed yet (0-d tensors).
        known: values by name that the host knows.
        settled: whether ``known`` is complete.
    """

    samples: int
    on_device: dict[str, torch.Tensor]
    known: dict[str, float] = field(default_factory=dict)
    settled: bool = False


class _Shipment:
    """Entries whose values are on their way to the host."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        values = [value.detach().double() for entry in entries for value in entry.on_device.values()]
        self._values = torch.stack(values) if values else torch.empty(0)
        self._event: torch.cuda.Event | None = None
        if self._values.device.type == "cuda":
            there = self._values
            self._values = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
            self._values.copy_(there, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def arrived(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """Samples and values of each entry; waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        numbers = iter(self._values.tolist())
        return [(e.samples, {**{name: next(numbers) for name in e.on_device}, **e.known}) for e in self.entries]


class Recorder:
    """Buffers the values of steps and gives them to trackers; on the rank that has trackers.

    Every :data:`TOGETHER` steps the values start for the host, and are written when they have arrived. What is still
    here when the program ends, by whatever exception, is written then. Without trackers it takes nothing.
    """

    def __init__(self) -> None:
        self._trackers: list[Tracker] = []
        self._entries: list[Entry] = []
        self._on_the_way: list[_Shipment] = []

    @property
    def enabled(self) -> bool:
        """Whether there is a tracker: on rank 0, if the configuration has one."""
        return bool(self._trackers)

    def start(self, trackers: Iterable[Tracker], config: Mapping[str, Any]) -> None:
        """Open trackers.

        Args:
            trackers: not started.
            config: how the run was configured: recorded once in each.

        Raises:
            ConfigError: one of them cannot be opened; those that were are finished.
        """
        try:
            for tracker in trackers:
                tracker.start(config)
                self._trackers.append(tracker)
        except ConfigError:
            self.close()
            raise
        # After the trackers have started: exit handlers run last in, first out, and theirs end them. Comet's is among
        # those that run before the threads are joined, which is before atexit's.
        atexit.register(self.close)
        before_threads: Callable[..., None] | None = getattr(threading, "_register_atexit", None)
        if before_threads is not None and self._trackers:
            before_threads(_close_if_alive, weakref.ref(self))

    def add(self, entry: Entry) -> None:
        """A step more."""
        if self._trackers:
            self._entries.append(entry)

    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        """Record values of the script's own, as upstream's ``engine.monitor`` does.

        Args:
            event_list: name, value (a number or a tensor of one element) and where on the x axis: usually the global
                samples. A value on a GPU is not waited for.

        Raises:
            ConfigError: a value is not one number.
        """
        for name, value, samples in event_list:
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise ConfigError(f"monitor.write_events: {name} has the shape {tuple(value.shape)}; give one number.")
            on_device, known = {}, {}
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                on_device[name] = value.detach().reshape(()).clone()  # the script may go on adding to it
            else:
                known[name] = float(value)
            self.add(Entry(samples, on_device, known, settled=True))

    def tick(self) -> None:
        """Once in a step: start what is due, write what has arrived."""
        if len(self._entries) >= TOGETHER:
            self._ship([e for e in self._entries if e.settled])
        while self._on_the_way and self._on_the_way[0].arrived:
            self._write(self._on_the_way.pop(0))

    def flush(self) -> None:
        """Write everything; waits for the device."""
        self._ship(self._entries)
        while self._on_the_way:
            self._write(self._on_the_way.pop(0))

    def close(self) -> None:
        """Write everything and finish the trackers. Does nothing the second time."""
        atexit.unregister(self.close)
        if not self._trackers:
            return
        try:
            self.flush()
        except RuntimeError as error:  # the device has failed: that error is known already, this is what it took along
            logger.error("the values of the last steps are lost with the device (%s)", error)
        self._each(lambda tracker: tracker.finish())
        self._trackers.clear()

    def _ship(self, entries: list[Entry]) -> None:
        if entries:
            self._entries = [entry for entry in self._entries if entry not in entries]
            self._on_the_way.append(_Shipment(entries))

    def _write(self, shipment: _Shipment) -> None:
        for samples, values in shipment.rows():
            self._each(partial(_log, values, samples))
        self._each(lambda tracker: tracker.flush())

    def _each(self, do: Callable[[Tracker], None]) -> None:
        """Do something with each tracker. One that fails is given up, and said: it must not end the training."""
        for tracker in list(self._trackers):
            try:
                do(tracker)
            except Exception as error:  # whatever its package raises
                self._trackers.remove(tracker)
                logger.error("%s: records nothing more (%s: %s)", tracker.name, type(error).__name__, error)


def _close_if_alive(recorder: weakref.ref[Recorder]) -> None:
    alive = recorder()
    if alive is not None:
        alive.close()


def _log(values: Mapping[str, float], samples: int, tracker: Tracker) -> None:
    tracker.log(values, samples)
