"""Times and counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise import meter as module
from shardwise.meter import Meter, Reading, Stopwatch

CPU = torch.device("cpu")


def test_parts_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    meter = Meter(CPU, breakdown=True)
    before = meter.read()
    for _ in range(2):
        with meter.part("forward"):
            now[0] += 2
            with meter.part("inner"):
                now[0] += 1
        meter.count(8, 32)
    lap = meter.read().since(before)
    assert lap == Reading(6.0, 2, 16, 64.0, {"forward": 6.0, "inner": 2.0})
    assert lap.part("forward") == 3000.0
    now[0] += 1
    assert meter.read().since(meter.read()).spent == {"forward": 0.0, "inner": 0.0}


def test_parts_are_not_timed_unless_asked_for() -> None:
    meter = Meter(CPU, breakdown=False)
    with meter.part("forward"):
        pass
    assert meter.read().spent == {}


def test_an_error_passes_through_a_part() -> None:
    meter = Meter(CPU, breakdown=True)
    with pytest.raises(RuntimeError, match="mine"), meter.part("forward"):
        raise RuntimeError("mine")


class Queue:
    """Plays a GPU: events are passed when `run` says so; looking at one never waits."""

    passed = 0.0
    now = 0.0

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self, _stream: Any) -> None:
            self.at = Queue.now

        def query(self) -> bool:
            return Queue.passed >= self.at

        def elapsed_time(self, end: Any) -> float:
            assert end.query()
            return (end.at - self.at) * 1e3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "Event", Queue.Event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: setattr(Queue, "passed", Queue.now))
    monkeypatch.setattr(Queue, "now", 0.0)
    monkeypatch.setattr(Queue, "passed", 0.0)
    return torch.device("cuda", 0)


def test_on_a_gpu_nothing_waits_until_it_is_told_to(gpu: torch.device) -> None:
    meter = Meter(gpu, breakdown=True)
    for _ in range(3):
        with meter.part("forward"):
            Queue.now += 1
        meter.count(1, 0)
    assert meter.read().spent == {"forward": 0.0}
    Queue.passed = 2.0
    meter.watch.look()
    assert meter.read().spent == {"forward": 2.0}, "what the device has passed"
    assert meter.read(wait=True).spent == {"forward": 3.0}


def test_times_are_handed_out_in_order(gpu: torch.device) -> None:
    watch, seen = Stopwatch(gpu), []
    for i in range(3):
        start = watch.mark()
        Queue.now += i
        watch.measure(start, watch.mark(), seen.append)
    watch.wait()
    assert seen == [0.0, 1.0, 2.0]
