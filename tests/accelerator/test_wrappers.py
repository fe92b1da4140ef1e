"""Prepared optimizers and schedules: skipped steps, clipping, and how often a schedule advances."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from shardwise import Accelerator, ConfigError
from shardwise.accelerator import GradientAccumulationPlugin, GradScalerKwargs
from tests.accelerator.loops import accelerating, sharded
from tests.accelerator.test_windows import counter, loader, loss_of, prepared, stepped
from tests.ranks import RankPools

SCALE = GradScalerKwargs(init_scale=1024.0)


def fp16(**options: Any) -> Any:
    return accelerating(cpu=True, mixed_precision="fp16", kwargs_handlers=[SCALE], **options)


def train(accelerator: Accelerator, model: Any, optimizer: Any, factor: float = 1.0, schedule: Any = None) -> None:
    """One update."""
    accelerator.backward(loss_of(model) * factor)
    optimizer.step()
    if schedule is not None:
        schedule.step()
    optimizer.zero_grad()


# -- fp16 --


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_that_overflows_skips_the_step_and_the_schedule(fused: bool) -> None:
    with fp16() as accelerator:
        model = counter()
        inner = torch.optim.AdamW(model.parameters(), lr=1.0, fused=fused, weight_decay=0)
        model, optimizer, schedule = accelerator.prepare(model, inner, lr_scheduler.ExponentialLR(inner, 0.5))
        assert isinstance(accelerator.scaler, torch.amp.GradScaler)
        train(accelerator, model, optimizer, math.inf, schedule)
        assert accelerator.optimizer_step_was_skipped and optimizer.step_was_skipped
        assert stepped(model) == 0 and schedule.get_last_lr() == [1.0]
        train(accelerator, model, optimizer, 1.0, schedule)
        assert not accelerator.optimizer_step_was_skipped
        assert stepped(model) == pytest.approx(1) and schedule.get_last_lr() == [0.5]
        assert accelerator.scaler.get_scale() == 512


def test_fp16_is_not_fp32_in_disguise_on_a_cpu() -> None:
    seen = []
    with fp16() as accelerator:
        model = nn.Sequential(nn.Linear(2, 2))
        model[0].register_forward_hook(lambda m, a, out: seen.append(out.dtype))
        accelerator.prepare(model)(torch.ones(1, 2))
    assert seen == [torch.float16]


def test_641_clipping_on_every_micro_step_of_fp16(recwarn: pytest.WarningsRecorder) -> None:
    with fp16(gradient_accumulation_steps=2) as accelerator:
        model, optimizer = prepared(accelerator)
        norms = []
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model))
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                optimizer.zero_grad()
        assert [None if n is None else float(n) for n in norms] == [None, 1.0, None, 1.0]
        assert stepped(model) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("kind", ["fp16", "tokens"])
def test_641_clipping_after_the_block_on_every_micro_step(kind: str) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 2}
    plain = accelerating(cpu=True, gradient_normalization="tokens", **options)
    with fp16(**options) if kind == "fp16" else plain as accelerator:
        model, optimizer = prepared(accelerator)
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model), tokens=3)
            accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
        assert stepped(model) == pytest.approx(1.0)


def test_a_window_that_the_script_does_not_step_leaves_nothing_behind() -> None:
    with fp16() as accelerator:
        model, optimizer = prepared(accelerator)
        for number in range(3):
            accelerator.backward(loss_of(model))
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
            assert float(norm) == 1.0
            if number != 1:  # else the script does not like the gradient
                optimizer.step()
            optimizer.zero_grad()
        assert stepped(model) == 2


def test_unscale_gradients_may_be_called_twice_and_for_two_optimizers() -> None:
    with fp16() as accelerator:
        (one, first), (two, second) = prepared(accelerator), prepared(accelerator)
        for _ in range(2):
            accelerator.backward(loss_of(one) + 2 * loss_of(two))
            accelerator.unscale_gradients(first)
            accelerator.unscale_gradients([first, second])
            accelerator.unscale_gradients()
            assert (float(one.weight.grad), float(two.weight.grad)) == (1, 2)
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        assert (stepped(one), stepped(two)) == (2, 4)


def test_1778_weights_in_fp16_are_refused_by_a_message_that_helps() -> None:
    with fp16() as accelerator:
        model, _ = prepared(accelerator)
        model.half()
        accelerator.backward(model(torch.ones(1, 1).half()).sum())
        with pytest.raises(ValueError, match="unscale FP16 gradients"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)


# -- weights of micro-batches --


@pytest.mark.parametrize("kind", ["tokens", "window"])
def test_a_weighed_window_that_is_dropped_counts_no_more(kind: str) -> None:
    with accelerating(cpu=True, gradient_normalization=kind) as accelerator:
        model, optimizer = prepared(accelerator)
        for number in range(2):
            accelerator.backward(loss_of(model), tokens=3)
            if number:
                optimizer.step()
            optimizer.zero_grad()
        assert stepped(model) == 1


def test_the_windows_of_two_models_are_weighed_separately() -> None:
    with accelerating(cpu=True, gradient_normalization="window", gradient_accumulation_steps=2) as accelerator:
        pairs = [prepared(accelerator), prepared(accelerator)]
        for _ in range(4):
            for model, optimizer in pairs:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model))
                    optimizer.step()
                    optimizer.zero_grad()
        assert [stepped(model) for model, _ in pairs] == [2, 2]


def test_two_losses_in_one_micro_batch_of_a_window() -> None:
    with accelerating(cpu=True, gradient_normalization="window") as accelerator:
        model, optimizer = prepared(accelerator)
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model))
            accelerator.backward(loss_of(model))
            optimizer.step()
        assert -float(model.weight) == pytest.approx(2)
    plugin = sharded(0, train_micro_batch_size_per_gpu=1)
    with accelerating(cpu=True, gradient_normalization="window", deepspeed_plugin=plugin) as accelerator:
        model, optimizer = prepared(accelerator)
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model))
            with pytest.raises(ConfigError, match="two losses in one micro-batch"):
                accelerator.backward(loss_of(model))


def test_tokens_are_needed_and_asked_for() -> None:
    with accelerating(cpu=True, gradient_normalization="tokens") as accelerator:
        model, _ = prepared(accelerator)
        with pytest.raises(ConfigError, match=r"backward\(loss, tokens=n\)"):
            accelerator.backward(loss_of(model))


# -- schedules --


def advances(accelerator: Accelerator, make: Any, updates: int) -> list[float]:
    """The rate after each update."""
    model = counter()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, schedule = accelerator.prepare(model, inner, make(inner))
    found = []
    for _ in range(updates):
        with accelerator.accumulate(model):
            train(accelerator, model, optimizer, schedule=schedule)
        found.append(schedule.get_last_lr()[0])
    return found


def in_torch(make: Any, updates: int, times: int = 1) -> list[float]:
    inner = torch.optim.SGD(counter().parameters(), lr=1.0)
    schedule = make(inner)
    found = []
    for _ in range(updates):
        inner.step()
        for _ in range(times):
            schedule.step()
        found.append(schedule.get_last_lr()[0])
    return found


def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)


def warm_up_then_cosine(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


def rates(make: Any, updates: int, **options: Any) -> list[float]:
    with warnings.catch_warnings(), accelerating(cpu=True, **options) as accelerator:
        warnings.simplefilter("ignore")
        return advances(accelerator, make, updates)


def test_690_one_cycle_advances_on_one_process() -> None:
    assert rates(one_cycle, 9) == pytest.approx(in_torch(one_cycle, 9))
    assert len(set(in_torch(one_cycle, 9))) == 9


def test_843_one_cycle_ends_where_it_should_on_two_processes(ranks: RankPools) -> None:
    # Ten advances in five updates; the sixth has none left, and is no error.
    for found in ranks(2).run(rates, one_cycle, 6):
        assert found[:4] == pytest.approx(in_torch(one_cycle, 4, times=2))
        assert found[4] == found[5] == pytest.approx(in_torch(one_cycle, 9)[-1], abs=0.1)


def test_3875_schedules_inside_of_a_schedule(ranks: RankPools) -> None:
    assert rates(warm_up_then_cosine, 8) == pytest.approx(in_torch(warm_up_then_cosine, 8))
    for found in ranks(2).run(rates, warm_up_then_cosine, 4):
        assert found == pytest.approx(in_torch(warm_up_then_cosine, 4, times=2))
    for found in ranks(2).run(rates, warm_up_then_cosine, 8, step_scheduler="update"):
        assert found == pytest.approx(in_torch(warm_up_then_cosine, 8))


def halving(optimizer: Any) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_662_how_often_a_schedule_advances_on_two_processes(ranks: RankPools) -> None:
    for options, wanted in (
        ({}, [0.25, 0.0625]),
        ({"step_scheduler": "update"}, [0.5, 0.25]),
        ({"split_batches": True}, [0.5, 0.25]),
        ({"step_scheduler_with_optimizer": False}, [0.5, 0.25]),
    ):
        assert ranks(2).run(rates, halving, 2, **options) == [wanted] * 2, options


@pytest.mark.parametrize("adjust", [False, True])
def test_4262_a_schedule_may_advance_for_each_micro_batch(adjust: bool) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=adjust)
    found = rates(halving, 4, gradient_accumulation_plugin=plugin)
    assert found == ([1, 0.25, 0.25, 0.0625] if adjust else [1, 0.5, 0.5, 0.25])
    with accelerating(cpu=True, gradient_accumulation_plugin=copy.copy(plugin)) as accelerator:
        model = counter()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, schedule = accelerator.prepare(model, inner, halving(inner))
        for _ in accelerator.prepare(loader(3)):  # the last window has one
            with accelerator.accumulate(model):
                train(accelerator, model, optimizer, schedule=schedule)
        assert schedule.get_last_lr() == [0.5 ** (3 if adjust else 2)]


def test_995_a_schedule_of_the_scripts_with_an_engine_advances_once_an_update() -> None:
    plugin = sharded(2, train_micro_batch_size_per_gpu=1)
    found = rates(halving, 4, deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    assert found == [1, 0.5, 0.5, 0.25]


def test_a_schedule_made_from_the_prepared_optimizer_and_one_of_another() -> None:
    with accelerating(cpu=True) as accelerator:
        (one, first), (two, second) = prepared(accelerator), prepared(accelerator)
        schedule = accelerator.prepare(halving(first))
        assert schedule.optimizers == [first] and schedule.optimizer is first
        train(accelerator, one, first, schedule=schedule)
        assert first.param_groups[0]["lr"] == 0.5 and second.param_groups[0]["lr"] == 1.0
        plateau = accelerator.prepare(lr_scheduler.ReduceLROnPlateau(second, patience=0))
        for _ in range(2):
            train(accelerator, two, second)
            plateau.step(1.0)
        assert second.param_groups[0]["lr"] == pytest.approx(0.1)
        assert accelerator.prepare(schedule) is schedule and accelerator.prepare(first) is first


def test_an_unknown_step_scheduler_is_refused() -> None:
    with pytest.raises(ConfigError, match="step_scheduler: expected one of accelerate, update"):
        Accelerator(cpu=True, step_scheduler="epoch")


# -- what else an optimizer has --


class ScheduleFree(torch.optim.SGD):
    mode = ""

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"

    def own(self) -> int:
        return 7


def test_what_is_handed_on_to_the_scripts_optimizer() -> None:
    with accelerating(cpu=True) as accelerator:
        model, other = counter(), counter()
        inner = ScheduleFree(model.parameters(), lr=1.0, momentum=0.9)
        optimizer: Any = accelerator.prepare(inner)
        optimizer.eval()
        assert inner.mode == "eval" and optimizer.own() == 7
        optimizer.train()
        assert inner.mode == "train" and optimizer.defaults is inner.defaults
        optimizer.add_param_group({"params": list(other.parameters()), "lr": 2.0})
        assert inner.param_groups[1]["lr"] == 2.0 and optimizer.param_groups is inner.param_groups
        loss_of(model).backward()
        assert float(optimizer.step(lambda: 3.0) or 0) in (0, 3)
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(state)
        assert optimizer.state is inner.state and isinstance(optimizer, torch.optim.Optimizer)
