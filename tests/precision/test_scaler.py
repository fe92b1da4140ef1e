"""The dynamic loss scale against a plain reading of the rule, and against DeepSpeed itself if installed."""

from __future__ import annotations

import json
import random
import types
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.precision import (
    DynamicLossScaler,
    LossScaleError,
    NoScaler,
    StaticLossScaler,
    build_scaler,
)


@dataclass(frozen=True)
class Fp16:
    enabled: bool = True
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1


def read_plainly(section: Fp16, overflows: list[bool]) -> list[float | None]:
    """The scale after each step by the sentence of the rule, from the steps alone; None: it raises."""
    scale, left, last_overflow = 2.0**section.initial_scale_power, section.hysteresis, -1
    scales: list[float | None] = []
    for iteration, overflow in enumerate(overflows):
        if overflow:
            if left == 1:
                if scale == section.min_loss_scale:
                    return [*scales, None]
                scale = max(scale / 2, section.min_loss_scale)
            else:
                left -= 1
            last_overflow = iteration
        else:
            if section.consecutive_hysteresis:
                left = section.hysteresis
            since = iteration - last_overflow - 1
            if since > 0 and since % section.loss_scale_window == 0:
                left = section.hysteresis
                scale *= 2
        scales.append(scale)
    return scales


def ours(section: Fp16, overflows: list[bool]) -> list[float | None]:
    scaler = build_scaler(section)
    scales: list[float | None] = []
    for overflow in overflows:
        try:
            scaler.update(overflow)
        except LossScaleError:
            return [*scales, None]
        scales.append(scaler.scale)
    return scales


SECTIONS = st.builds(
    Fp16,
    initial_scale_power=st.integers(4, 20),
    loss_scale_window=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    consecutive_hysteresis=st.booleans(),
    min_loss_scale=st.sampled_from([0.25, 1, 3, 16]),
)


@settings(max_examples=300, deadline=None)
@given(SECTIONS, st.lists(st.booleans(), max_size=80))
def test_follows_the_rule_on_any_sequence(section, overflows):
    assert ours(section, overflows) == read_plainly(section, overflows)


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("rate", [0.02, 0.2, 0.6])
def test_same_scales_as_deepspeed(consecutive, hysteresis, rate, upstream):
    theirs = upstream("deepspeed.runtime.fp16.loss_scaler")
    theirs.dist = types.SimpleNamespace(get_rank=lambda: 1)  # It asks for a rank only to print.
    section = Fp16(True, 0, 12, 7, hysteresis, consecutive, 2)
    generator = random.Random(3)
    overflows = [generator.random() < rate for _ in range(2000)]
    reference = theirs.DynamicLossScaler(2.0**12, 7, 2, hysteresis, consecutive)
    scales: list[float | None] = []
    for overflow in overflows:
        try:
            reference.update_scale(overflow)
        except Exception as error:  # It raises a bare Exception.
            assert "already at minimum" in str(error)
            scales.append(None)
            break
        scales.append(reference.loss_scale)
    assert ours(section, overflows) == scales


def test_one_sequence_by_hand():
    section = Fp16(initial_scale_power=4, loss_scale_window=2, hysteresis=2)
    steps = [True, True, True, False, False, False, False, False, True, True]
    # Tolerated, halved, halved; doubled on the third clean step and the fifth; tolerated again, then halved.
    assert ours(section, steps) == [16, 8, 4, 4, 4, 8, 8, 16, 16, 8]


def test_an_overflow_at_the_minimum_is_an_error_that_says_what_to_do():
    scaler = build_scaler(Fp16(initial_scale_power=1, hysteresis=1))
    scaler.update(True)
    assert scaler.scale == 1
    with pytest.raises(LossScaleError, match=r"already at its minimum \(fp16\.min_loss_scale = 1\)") as caught:
        scaler.update(True)
    assert isinstance(caught.value, ShardwiseError)


@pytest.mark.parametrize("stop", range(0, 60, 7))
def test_a_resumed_scaler_continues_exactly(stop):
    section = Fp16(initial_scale_power=20, loss_scale_window=3, hysteresis=3)
    generator = random.Random(5)
    overflows = [generator.random() < 0.3 for _ in range(60)]
    first, second = build_scaler(section), build_scaler(section)
    for overflow in overflows[:stop]:
        first.update(overflow)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for overflow in overflows[stop:]:
        assert second.scale == first.scale
        first.update(overflow)
        second.update(overflow)
    assert second.state_dict() == first.state_dict()


@pytest.mark.parametrize("scaler", [StaticLossScaler(128), NoScaler()])
def test_the_other_scalers_never_change(scaler):
    before = scaler.scale
    for overflow in (True, False, True):
        scaler.update(overflow)
    scaler.load_state_dict(scaler.state_dict())
    assert scaler.scale == before


def test_the_section_chooses_the_scaler():
    assert isinstance(build_scaler(None), NoScaler)
    assert build_scaler(Fp16(enabled=False, loss_scale=8)).scale == 1
    static = build_scaler(Fp16(loss_scale=8))
    assert isinstance(static, StaticLossScaler) and static.scale == 8
    dynamic = build_scaler(Fp16())
    assert isinstance(dynamic, DynamicLossScaler) and dynamic.scale == 65536


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (Fp16(loss_scale=-1), r"fp16\.loss_scale: expected a finite number above 0, got -1"),
        (Fp16(loss_scale=float("nan")), r"fp16\.loss_scale: "),
        (Fp16(loss_scale_window=0), r"fp16\.loss_scale_window: expected at least 1, got 0"),
        (Fp16(hysteresis=0), r"fp16\.hysteresis: expected at least 1, got 0"),
        (Fp16(min_loss_scale=0), r"fp16\.min_loss_scale: expected a number above 0"),
        (
            Fp16(initial_scale_power=0, min_loss_scale=4),
            r"fp16\.initial_scale_power: .* below fp16\.min_loss_scale 4",
        ),
        (Fp16(initial_scale_power=5000), r"fp16\.initial_scale_power: expected at most 127"),
    ],
)
def test_values_that_cannot_work_are_refused_with_their_path(section, message):
    with pytest.raises(ConfigError, match=message):
        build_scaler(section)
