"""The way of a step's values to the trackers."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from shardwise import ConfigError
from shardwise.monitor import Entry, Recorder
from shardwise.monitor import recorder as module
from shardwise.monitor.recorder import TOGETHER


class Memory:
    """A tracker that keeps what it is given."""

    name = "memory"

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.seen: list[Any] = []

    def _do(self, what: str, *values: Any) -> None:
        if what == self.fails:
            raise (ConfigError if what == "start" else OSError)("the disk is full")
        self.seen.append((what, *values))

    def start(self, config: Mapping[str, Any]) -> None:
        self._do("start", config)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._do("log", step, dict(values))

    def flush(self) -> None:
        self._do("flush")

    def finish(self) -> None:
        self._do("finish")

    def logged(self) -> list[Any]:
        return [each[1:] for each in self.seen if each[0] == "log"]


def step(samples: int, settled: bool = True) -> Entry:
    return Entry(samples, {"loss": torch.tensor(samples / 2)}, {"lr": 0.5} if settled else {}, settled)


def started(*trackers: Memory) -> Recorder:
    recorder = Recorder()
    recorder.start(trackers, {"a": 1})
    return recorder


def test_values_are_written_together_and_in_order() -> None:
    tracker = Memory()
    recorder = started(tracker)
    for i in range(1, TOGETHER):
        recorder.add(step(i))
        recorder.tick()
    assert tracker.seen == [("start", {"a": 1})]
    recorder.add(step(TOGETHER))
    recorder.tick()
    assert tracker.logged() == [(i, {"loss": i / 2, "lr": 0.5}) for i in range(1, TOGETHER + 1)]
    assert tracker.seen[-1] == ("flush",)
    recorder.close()
    assert tracker.seen[-1] == ("finish",)


def test_an_unsettled_step_waits_for_the_next_time() -> None:
    tracker = Memory()
    recorder = started(tracker)
    last = step(TOGETHER, settled=False)
    for entry in [*(step(i) for i in range(1, TOGETHER)), last]:
        recorder.add(entry)
        recorder.tick()
    assert [samples for samples, _ in tracker.logged()] == list(range(1, TOGETHER))
    last.known["lr"] = 0.25
    recorder.close()
    assert tracker.logged()[-1] == (TOGETHER, {"loss": TOGETHER / 2, "lr": 0.25}), "what is known then, is written"


def test_closing_writes_the_rest_once() -> None:
    tracker = Memory()
    before = atexit._ncallbacks()  # type: ignore[attr-defined]
    recorder = started(tracker)
    assert atexit._ncallbacks() == before + 1  # type: ignore[attr-defined]
    recorder.add(step(1))
    recorder.close()
    recorder.close()
    assert [each[0] for each in tracker.seen] == ["start", "log", "flush", "finish"]
    recorder.add(step(2))
    recorder.flush()
    assert not recorder.enabled and len(tracker.seen) == 4, "nothing after the end"


def test_a_tracker_that_fails_is_given_up_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("shardwise"), "error", lambda text, *args: said.append(text % args))
    broken, good = Memory("log"), Memory()
    recorder = started(broken, good)
    recorder.add(step(1))
    recorder.add(step(2))
    recorder.close()
    assert said == ["memory: records nothing more (OSError: the disk is full)"]
    assert len(good.logged()) == 2


def test_a_tracker_that_cannot_start_ends_the_others() -> None:
    good = Memory()
    recorder = Recorder()
    with pytest.raises(ConfigError, match="the disk is full"):
        recorder.start([good, Memory("start")], {})
    assert [each[0] for each in good.seen] == ["start", "finish"] and not recorder.enabled


def test_values_of_the_script() -> None:
    tracker = Memory()
    recorder = started(tracker)
    recorder.write_events([("Eval/loss", 3, 8), ("Eval/accuracy", torch.tensor(0.5), 8)])
    recorder.close()
    assert tracker.logged() == [(8, {"Eval/loss": 3.0}), (8, {"Eval/accuracy": 0.5})]
    Recorder().write_events([("Eval/loss", 3, 8)])  # a rank without trackers


def test_values_of_the_script_are_those_of_their_moment() -> None:
    tracker = Memory()
    recorder = started(tracker)
    running = torch.zeros(1)
    for samples in (1, 2, 3):
        running += 1
        recorder.write_events([("mine", running, samples)])
    with pytest.raises(ConfigError, match=r"mine has the shape \(2,\); give one number"):
        recorder.write_events([("mine", torch.zeros(2), 4)])
    recorder.close()
    assert tracker.logged() == [(1, {"mine": 1.0}), (2, {"mine": 2.0}), (3, {"mine": 3.0})]


def test_values_that_have_not_arrived_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shipment(module._Shipment):
        here = False

        @property
        def arrived(self) -> bool:
            return self.here

    monkeypatch.setattr(module, "_Shipment", Shipment)
    tracker = Memory()
    recorder = started(tracker)
    for i in range(TOGETHER + 1):
        recorder.add(step(i))
        recorder.tick()
    assert not tracker.logged()
    Shipment.here = True
    recorder.tick()
    assert len(tracker.logged()) == TOGETHER
    recorder.close()
    assert len(tracker.logged()) == TOGETHER + 1
