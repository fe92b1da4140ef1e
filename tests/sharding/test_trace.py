"""What was used last time is expected this time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.sharding.trace import Trace


@dataclass
class Unit:
    """What a trace looks at."""

    numel: int


A, B, C = Unit(10), Unit(20), Unit(30)


def recorded(*units: Unit) -> Any:
    trace: Any = Trace()
    trace.start()
    for unit in units:
        trace.note(unit)
    trace.start()
    return trace


def test_nothing_is_expected_the_first_time() -> None:
    trace: Any = Trace()
    trace.start()
    trace.note(A)
    assert trace.coming(1000) == [] and trace.reuse_distance(A) is None


def test_the_next_ones_up_to_a_size() -> None:
    trace = recorded(A, B, C, A)
    trace.note(A)
    assert trace.coming(1000) == [B, C, A]
    assert trace.coming(50) == [B, C] and trace.coming(49) == [B] and trace.coming(19) == [] and trace.coming(-5) == []


def test_one_is_expected_once() -> None:
    trace = recorded(A, B, B, A)
    trace.note(A)
    assert trace.coming(1000) == [B, A]


def test_distance_to_the_next_use() -> None:
    trace = recorded(A, B, C, A)
    trace.note(A)
    assert trace.reuse_distance(B) == 0 and trace.reuse_distance(A) == 50
    trace.note(B)
    assert trace.reuse_distance(B) is None


def test_a_wrong_guess_stops_guessing_until_it_was_recorded_anew() -> None:
    trace = recorded(A, B, C)
    trace.note(A)
    trace.note(C)
    assert trace.coming(1000) == [] and trace.reuse_distance(B) is None
    trace.start()
    trace.note(A)
    assert trace.coming(1000) == [C]


def test_an_iteration_without_any_keeps_what_is_known() -> None:
    trace = recorded(A, B)
    trace.start()
    trace.note(A)
    assert trace.coming(1000) == [B]
