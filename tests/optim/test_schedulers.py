"""The schedules against their formulas written out, and against DeepSpeed itself when it is installed."""

from __future__ import annotations

import copy
import json
import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.optim import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)


@dataclass
class Section:
    type: str
    params: dict[str, Any] = field(default_factory=dict)


def adamw(*rates: float | torch.Tensor) -> torch.optim.AdamW:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.5,)]
    return torch.optim.AdamW(groups)


def course(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[list[float]]:
    """The rates that optimizer steps 0, 1, ... run with."""
    rates = []
    for _ in range(steps):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        scheduler.step()
    return rates


# -- formulas, optimizer step n uses batch index i = n - 1 --


def test_range_test_grows_in_a_line_and_in_stairs():
    optimizer = adamw()
    line = course(optimizer, LRRangeTest(optimizer, 0.01, 4, 2.0), 9)
    assert [rate for (rate,) in line] == pytest.approx([0.01 * (1 + 2 * n / 4) for n in range(9)])
    optimizer = adamw()
    stairs = course(optimizer, LRRangeTest(optimizer, 0.01, 4, 2.0, True), 9)
    assert [rate for (rate,) in stairs] == pytest.approx([0.01] * 4 + [0.03] * 4 + [0.05])


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_starts_at_the_minimum_twice_and_stays_at_the_maximum(kind):
    optimizer = adamw()
    rates = course(optimizer, WarmupLR(optimizer, 0.1, 0.9, 5, kind), 10)

    def expected(n):
        i = n - 1
        if i < 0:
            return 0.1
        gamma = 1 if i >= 5 else math.log(i + 1) / math.log(5) if kind == "log" else i / 5
        return 0.1 + 0.8 * gamma

    assert [rate for (rate,) in rates] == pytest.approx([expected(n) for n in range(10)], rel=1e-12)
    assert rates[0] == rates[1] == [0.1]


def test_warmup_without_maximum_takes_each_groups_own_rate():
    optimizer = adamw(0.5, 0.25)
    assert course(optimizer, WarmupLR(optimizer, warmup_num_steps=3), 6)[-1] == [0.5, 0.25]


def test_decay_reaches_the_minimum_at_the_last_step_and_stays():
    optimizer = adamw()
    scheduler = WarmupDecayLR(optimizer, 10, 0.0, 0.8, 4, "linear")
    rates = [rate for (rate,) in course(optimizer, scheduler, 14)]
    assert rates[5:11] == pytest.approx([0.8 * (10 - i) / 6 for i in range(4, 10)])
    assert rates[11:] == [0, 0, 0]


def test_cosine_falls_from_the_optimizers_rate_to_the_ratio():
    optimizer = adamw(0.5, 0.25)
    scheduler = WarmupCosineLR(optimizer, 12, 0.1, 4, 0.01, "linear")
    rates = course(optimizer, scheduler, 16)
    assert rates[0] == [0, 0]
    assert rates[1] == pytest.approx([0.05, 0.025])
    for n in range(5, 16):
        progress = min(1, (n - 1 - 4 + 1) / 8)
        ratio = 0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2
        assert rates[n] == pytest.approx([0.5 * ratio, 0.25 * ratio])
    assert rates[-1] == pytest.approx([0.005, 0.0025])


def test_one_cycle_rises_falls_and_decays_with_the_momentum_against_it():
    optimizer = adamw()
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    scheduler = OneCycle(optimizer, 0.1, 0.5, 1.0, 4, 2, decay_step_size=2, decay_mom_rate=0.01)
    rates, momenta = [], []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["betas"])
        scheduler.step()
    assert rates[:7] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1])
    assert rates[7:] == pytest.approx([0.1 / (1 + d / 2) for d in (1, 2, 3)])
    # The constructor sets the lowest momentum, as upstream.
    assert [beta for beta, _ in momenta[:7]] == pytest.approx([0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9])
    assert [beta for beta, _ in momenta[7:]] == pytest.approx([0.9 * (1 + 0.01 * d / 2) for d in (1, 2, 3)])
    assert {beta2 for _, beta2 in momenta} == {0.99}


def test_one_cycle_stairs_hold_the_rate():
    optimizer = adamw()
    scheduler = OneCycle(optimizer, 0.0, 1.0, cycle_first_step_size=6, cycle_first_stair_count=2, cycle_momentum=False)
    rates = [rate for (rate,) in course(optimizer, scheduler, 12)]
    assert rates == pytest.approx([0, 0, 0, 0.5, 0.5, 0.5, 1, 0.5, 0.5, 0.5, 0, 0])


# -- DeepSpeed itself --

CASES = [
    (LRRangeTest, {}),
    (
        LRRangeTest,
        {"lr_range_test_min_lr": 3e-4, "lr_range_test_step_size": 37, "lr_range_test_step_rate": 1.7},
    ),
    (LRRangeTest, {"lr_range_test_step_size": 37, "lr_range_test_staircase": True}),
    (LRRangeTest, {"lr_range_test_min_lr": [1e-4, 2e-3]}),
    (OneCycle, {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2}),
    (OneCycle, {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 211}),
    (
        OneCycle,
        {
            "cycle_min_lr": [1e-4, 2e-4],
            "cycle_max_lr": [1e-2, 3e-2],
            "cycle_first_step_size": 300,
            "cycle_second_step_size": 701,
            "decay_step_size": 17,
            "decay_lr_rate": 0.3,
            "decay_mom_rate": 1e-4,
            "cycle_min_mom": [0.7, 0.75],
        },
    ),
    (
        OneCycle,
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 300,
            "cycle_second_step_size": 701,
            "cycle_first_stair_count": 7,
            "cycle_second_stair_count": 11,
        },
    ),
    (
        OneCycle,
        {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_second_step_size": 0, "cycle_first_step_size": 9},
    ),
    (WarmupLR, {}),
    (WarmupLR, {"warmup_num_steps": 1}),
    (WarmupLR, {"warmup_min_lr": [1e-5, 1e-6], "warmup_max_lr": [1e-3, 1e-2], "warmup_type": "linear"}),
    (WarmupDecayLR, {"total_num_steps": 1500}),
    (
        WarmupDecayLR,
        {"total_num_steps": 1500, "warmup_max_lr": 3e-3, "warmup_num_steps": 10, "warmup_type": "linear"},
    ),
    (WarmupDecayLR, {"total_num_steps": 100, "warmup_max_lr": 3e-3, "warmup_num_steps": 100}),
    (WarmupDecayLR, {"total_num_steps": 50, "warmup_max_lr": 3e-3, "warmup_num_steps": 100}),
    (WarmupCosineLR, {"total_num_steps": 1500}),
    (
        WarmupCosineLR,
        {"total_num_steps": 1500, "warmup_min_ratio": 0.1, "warmup_num_steps": 33, "cos_min_ratio": 0.05},
    ),
    (WarmupCosineLR, {"total_num_steps": 20, "warmup_num_steps": 33, "warmup_type": "linear"}),
]


@pytest.mark.parametrize(("ours", "params"), CASES, ids=lambda value: getattr(value, "__name__", None))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_same_rates_as_deepspeed_over_2000_steps(ours, params, upstream):
    theirs = upstream("deepspeed.runtime.lr_schedules")
    mine, other = adamw(1e-3, 7e-4), adamw(1e-3, 7e-4)
    my_scheduler = ours(mine, **copy.deepcopy(params))
    other_scheduler = getattr(theirs, ours.__name__)(other, **copy.deepcopy(params))
    for step in range(2000):
        for group, reference in zip(mine.param_groups, other.param_groups, strict=True):
            # A few roundings of the same formula in another order.
            assert group["lr"] == pytest.approx(reference["lr"], rel=1e-11, abs=1e-18), step
            assert group["betas"] == pytest.approx(reference["betas"], rel=1e-12), step
        my_scheduler.step()
        other_scheduler.step()


# -- as a torch scheduler --

SMALL = [
    ("LRRangeTest", {"lr_range_test_step_size": 3}),
    (
        "OneCycle",
        {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 3, "decay_step_size": 1},
    ),
    ("WarmupLR", {"warmup_num_steps": 4}),
    ("WarmupDecayLR", {"warmup_num_steps": 4, "total_num_steps": 9, "warmup_max_lr": None}),
    ("WarmupCosineLR", {"warmup_num_steps": 4, "total_num_steps": 9}),
]


@pytest.mark.parametrize(("name", "params"), SMALL)
@pytest.mark.filterwarnings("ignore:scheduler.params.cycle_momentum")
@pytest.mark.parametrize("stop", [0, 1, 5, 8])
def test_a_resumed_run_has_the_rates_of_an_unbroken_one(name, params, stop):
    def settings(optimizer):
        return [(float(group["lr"]), group["betas"]) for group in optimizer.param_groups]

    optimizer = adamw(0.5, 0.25)
    scheduler = build_scheduler(Section(name, params), optimizer)
    unbroken = []
    for step in range(12):
        if step == stop:
            saved = json.loads(json.dumps(scheduler.state_dict())), copy.deepcopy(optimizer.state_dict())
        unbroken.append(settings(optimizer))
        scheduler.step()

    # Whether the optimizer's state is loaded before, after, or not at all.
    for order in ("before", "after", "no"):
        again = adamw(0.5, 0.25)
        if order == "before":
            again.load_state_dict(copy.deepcopy(saved[1]))
        resumed = build_scheduler(Section(name, params), again)
        if order == "after":
            again.load_state_dict(copy.deepcopy(saved[1]))
        resumed.load_state_dict(saved[0])
        for step in range(stop, 12):
            assert settings(again) == unbroken[step], (order, step)
            assert resumed.get_last_lr() == [rate for rate, _ in unbroken[step]]
            resumed.step()


@pytest.mark.parametrize(("name", "params"), SMALL)
@pytest.mark.filterwarnings("ignore:scheduler.params.cycle_momentum")
def test_position_given_at_construction_continues_there(name, params):
    optimizer = adamw(0.5, 0.25)
    rates = course(optimizer, build_scheduler(Section(name, params), optimizer), 12)
    optimizer = adamw(0.5, 0.25)
    late = build_scheduler(Section(name, {**params, "last_batch_iteration": 4}), optimizer)
    assert course(optimizer, late, 7) == rates[5:]
    late.step(2)
    assert late.last_batch_iteration == 2
    assert course(optimizer, late, 9) == rates[3:]


@pytest.mark.parametrize(("name", "params"), SMALL)
@pytest.mark.filterwarnings("ignore:scheduler.params.cycle_momentum")
def test_a_tensor_rate_is_filled_and_never_replaced(name, params):
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer, plain = adamw(rate), adamw(0.5)
    scheduler, reference = (build_scheduler(Section(name, params), which) for which in (optimizer, plain))
    for _ in range(10):
        assert optimizer.param_groups[0]["lr"] is rate
        assert float(rate) == pytest.approx(plain.param_groups[0]["lr"], rel=1e-12)
        last = scheduler.get_last_lr()[0]
        assert isinstance(last, torch.Tensor) and last is not rate and last == rate
        scheduler.step()
        reference.step()


@pytest.mark.parametrize(("name", "params"), SMALL)
@pytest.mark.filterwarnings("ignore:scheduler.params.cycle_momentum")
def test_rates_can_be_read_before_any_step_and_the_order_of_calls_warns_of_nothing(name, params, recwarn):
    optimizer = adamw(0.5, 0.25)
    scheduler = build_scheduler(Section(name, params), optimizer)
    recwarn.clear()
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups] == scheduler.get_lr()
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == scheduler.get_lr()
    assert not recwarn.list


@pytest.mark.parametrize(
    ("name", "params", "first"),
    [
        ("WarmupLR", {}, [0.5, 0.5]),
        ("WarmupDecayLR", {"total_num_steps": 4, "warmup_max_lr": None}, [0.5, 0.5, 0.375, 0.25, 0.125, 0]),
        ("WarmupCosineLR", {"total_num_steps": 2, "cos_min_ratio": 0}, [0.5, 0.25, 0, 0]),
    ],
)
def test_no_warmup_starts_at_the_top(name, params, first):
    optimizer = adamw(0.5)
    scheduler = build_scheduler(Section(name, {**params, "warmup_num_steps": 0}), optimizer)
    rates = [rate for (rate,) in course(optimizer, scheduler, len(first))]
    assert rates == pytest.approx(first, abs=1e-15)


def test_a_group_added_later_is_an_error_that_says_so():
    optimizer = adamw(0.5)
    scheduler = WarmupLR(optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ConfigError, match="built for 1 parameter groups and the optimizer now has 2"):
        scheduler.step()


# -- what is reported --


def test_the_decay_default_that_overrides_the_optimizers_rate_is_reported():
    with pytest.warns(UserWarning, match=r"warmup_max_lr is not given.*0\.001.*\(0\.5\)"):
        scheduler = build_scheduler(
            Section("WarmupDecayLR", {"total_num_steps": 10, "warmup_num_steps": 0}), adamw(0.5)
        )
    assert scheduler.get_last_lr() == [0.001]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_scheduler(Section("WarmupDecayLR", {"total_num_steps": 2000, "warmup_max_lr": 0.001}), adamw(0.5))
        build_scheduler(Section("WarmupDecayLR", {"total_num_steps": 2000}), adamw(0.001))


def test_one_cycle_reports_what_it_does_to_the_betas():
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 2}
    with pytest.warns(UserWarning, match=r"sets beta2 to 0\.99 \(the optimizer's: 0\.999\)"):
        build_scheduler(Section("OneCycle", params), adamw())
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.warns(UserWarning, match="cycle_momentum has no effect: SGD has no betas"):
        scheduler = build_scheduler(Section("OneCycle", params), sgd)
    scheduler.step()
    assert "betas" not in sgd.param_groups[0]


@pytest.mark.filterwarnings("ignore:scheduler.params.cycle_momentum")
def test_one_cycle_reports_a_momentum_of_one_when_it_comes_and_once():
    scheduler = OneCycle(adamw(), 0.1, 1.0, cycle_first_step_size=1, decay_step_size=1, decay_mom_rate=0.05)
    for _ in range(3):
        scheduler.step()
    with pytest.warns(UserWarning, match="decay_mom_rate: beta1 reached 1.035") as caught:
        for _ in range(3):
            scheduler.step()
    assert len(caught) == 1


# -- names and arguments --


def test_any_torch_scheduler_by_name():
    optimizer = adamw(0.5)
    scheduler = build_scheduler(Section("StepLR", {"step_size": 2.0, "gamma": 0.5}), optimizer)
    assert type(scheduler) is torch.optim.lr_scheduler.StepLR and scheduler.step_size == 2
    optimizer.step()
    assert course(optimizer, scheduler, 4) == [[0.5], [0.5], [0.25], [0.25]]
    milestones = build_scheduler(Section("MultiStepLR", {"milestones": [1, 3]}), adamw(1.0))
    assert sorted(milestones.milestones) == [1, 3]
    plateau = build_scheduler(Section("ReduceLROnPlateau", {"mode": "max", "patience": 0}), adamw(1.0))
    assert plateau.mode == "max"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            Section("WarmupRL"),
            r"scheduler\.type: no scheduler is called 'WarmupRL'; did you mean 'WarmupLR'\?",
        ),
        (Section("LambdaLR"), r"scheduler\.type: LambdaLR takes Python objects"),
        (Section("LRScheduler"), r"scheduler\.type: no scheduler is called 'LRScheduler'"),
        (Section("EPOCH_DEPRECATION_WARNING"), r"scheduler\.type: no scheduler"),
        (
            Section("WarmupLR", {"warmup_steps": 3}),
            r"scheduler\.params\.warmup_steps: WarmupLR has no parameter .*did you mean 'warmup_num_steps'\?",
        ),
        (Section("WarmupDecayLR"), r"scheduler\.params\.total_num_steps: WarmupDecayLR needs it"),
        (Section("WarmupCosineLR"), r"scheduler\.params\.total_num_steps: WarmupCosineLR needs it"),
        (Section("OneCycle"), r"cycle_min_lr: OneCycle needs it.*\n.*cycle_max_lr: OneCycle needs it"),
        (Section("StepLR", {"gamma": 0.5}), r"scheduler\.params\.step_size: StepLR needs it"),
        (
            Section("StepLR", {"step_size": 0.5}),
            r"scheduler\.params\.step_size: expected a whole number, got 0\.5",
        ),
        (
            Section("CosineAnnealingLR", {"T_max": "9"}),
            r"scheduler\.params\.T_max: expected a whole number, got '9'",
        ),
        (
            Section("WarmupLR", {"warmup_type": "linaer"}),
            r"scheduler\.params\.warmup_type: .*did you mean 'linear'\?",
        ),
        (
            Section("WarmupLR", {"warmup_num_steps": -1}),
            r"scheduler\.params\.warmup_num_steps: .* at least 0, got -1",
        ),
        (
            Section("WarmupLR", {"warmup_num_steps": "auto"}),
            r"scheduler\.params\.warmup_num_steps: expected a whole",
        ),
        (
            Section("WarmupLR", {"warmup_num_steps": True}),
            r"scheduler\.params\.warmup_num_steps: expected a whole",
        ),
        (
            Section("WarmupLR", {"warmup_max_lr": math.inf}),
            r"scheduler\.params\.warmup_max_lr: expected a finite",
        ),
        (
            Section("WarmupLR", {"warmup_max_lr": [1, 2, 3]}),
            r"scheduler\.params\.warmup_max_lr: got 3 values.*1 param",
        ),
        (
            Section("WarmupDecayLR", {"total_num_steps": 0}),
            r"scheduler\.params\.total_num_steps: .* at least 1, got 0",
        ),
        (
            Section("LRRangeTest", {"lr_range_test_step_size": 0}),
            r"scheduler\.params\.lr_range_test_step_size: ",
        ),
        (
            Section("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}),
            r"scheduler\.params\.cycle_first_step_size: must be above 0",
        ),
        (
            Section("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "decay_step_size": -1}),
            r"scheduler\.params\.decay_step_size: must not be negative",
        ),
        (
            Section("CyclicLR", {"base_lr": 0.1, "max_lr": 1, "scale_fn": "x"}),
            r"scheduler\.params\.scale_fn: CyclicLR",
        ),
        (Section("ExponentialLR", {"gamma": None}), r"scheduler\.params\.gamma: expected a value, not null"),
        (Section("LinearLR", {"start_factor": 7}), r"scheduler\.params: LinearLR refused these values: "),
    ],
    ids=lambda value: f"{value.type}-{'-'.join(value.params)}" if isinstance(value, Section) else "",
)
def test_a_bad_section_is_refused_with_its_path(section, message):
    optimizer = adamw(0.5)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        build_scheduler(section, optimizer)
    # Nothing was half done.
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_short_run_warns():
    with pytest.warns(UserWarning, match="total_num_steps 5 is below warmup_num_steps 9"):
        WarmupCosineLR(adamw(), 5, warmup_num_steps=9)


def test_whole_numbers_may_be_written_as_floats():
    optimizer = adamw(1.0)
    scheduler = build_scheduler(Section("WarmupCosineLR", {"total_num_steps": 2e1, "warmup_num_steps": 1e1}), optimizer)
    same = adamw(1.0)
    assert course(optimizer, scheduler, 25) == course(same, WarmupCosineLR(same, 20, warmup_num_steps=10), 25)
