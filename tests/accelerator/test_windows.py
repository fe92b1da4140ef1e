"""Which micro-batch ends a window. Numbers in the names are those of reports in Accelerate's tracker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shardwise import Accelerator, ConfigError
from shardwise.accelerator import GradientAccumulationPlugin
from tests.accelerator.loops import accelerating
from tests.ranks import RankPools


def counter() -> nn.Linear:
    """Its weight says how often it was stepped with a gradient of one."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def stepped(model: Any) -> float:
    return -model.weight.item()


def loss_of(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(torch.ones(1, 1)).sum()
    return found


def loader(batches: int, rows: int = 1) -> Any:
    return DataLoader(list(range(batches * rows)), batch_size=rows)  # type: ignore[arg-type]


@pytest.fixture
def four() -> Iterator[Accelerator]:
    with accelerating(cpu=True, gradient_accumulation_steps=4) as accelerator:
        yield accelerator


def prepared(accelerator: Accelerator) -> tuple[Any, Any]:
    model = counter()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return model, optimizer


def syncs(accelerator: Accelerator, batches: Any, model: Any = None) -> list[int]:
    """The numbers, from 1, of the micro-batches that ended a window."""
    found = []
    for number, _ in enumerate(batches, 1):
        with accelerator.accumulate(*([] if model is None else [model])):
            if accelerator.sync_gradients:
                found.append(number)
    return found


def test_a_window_ends_after_its_steps_and_with_the_loader(four: Accelerator) -> None:
    data = four.prepare(loader(10))
    assert four.sync_gradients, "without accumulate every backward is a whole window"
    for _ in range(2):  # none goes on in the next epoch
        assert syncs(four, data) == [4, 8, 10]
    data = four.prepare(loader(1))
    assert syncs(four, data) == [1]


def test_windows_may_go_on_over_the_end_of_a_loader() -> None:
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    with accelerating(cpu=True, gradient_accumulation_plugin=plugin) as accelerator:
        data = accelerator.prepare(loader(6))
        assert syncs(accelerator, data) == [4]
        assert syncs(accelerator, data) == [2, 6]


def test_a_loader_that_was_not_prepared_ends_no_window(four: Accelerator) -> None:
    assert syncs(four, loader(6)) == [4]
    assert syncs(four, loader(6)) == [2, 6]
    assert four.gradient_state.active_dataloader is None and not four.gradient_state.end_of_dataloader


@pytest.mark.parametrize("every", [1, 3])
def test_3017_960_evaluation_inside_an_epoch_ends_no_window(four: Accelerator, every: int) -> None:
    train, held_out = four.prepare(loader(10), loader(3))
    found = []
    for number, _ in enumerate(train, 1):
        with four.accumulate():
            if four.sync_gradients:
                found.append(number)
        if number % every == 0:
            assert [four.gradient_state.end_of_dataloader for _ in held_out] == [False, False, True]
            assert four.gradient_state.active_dataloader is train
    assert found == [4, 8, 10]


def test_4248_an_evaluation_left_early_is_in_nobodys_way(four: Accelerator) -> None:
    train, held_out = four.prepare(loader(10), loader(3))
    found, kept = [], []
    for number, _ in enumerate(train, 1):
        with four.accumulate():
            if four.sync_gradients:
                found.append(number)
        iterator = iter(held_out)
        next(iterator)
        kept.append(iterator)  # not even where the loop is kept alive
    assert found == [4, 8, 10]
    for _ in train:
        break
    assert four.gradient_state.active_dataloader is not train
    assert syncs(four, train) == [4, 8, 10]


def test_two_loaders_at_once(four: Accelerator) -> None:
    """The one that handed out a batch last counts."""
    first, second = four.prepare(loader(6), loader(6))
    assert syncs(four, zip(first, second, strict=True)) == [4, 6]
    long, short = four.prepare(loader(8), loader(3))
    found, other = [], iter(short)
    for number, _ in enumerate(long, 1):
        next(other, None)
        with four.accumulate():
            if four.sync_gradients:
                found.append(number)
    # The short one's last batch ends a window as well, and then the long one counts alone.
    assert found == [3, 7, 8]


@pytest.mark.parametrize("pieces", [2, 4])
def test_1847_a_batch_may_be_cut_into_micro_batches(four: Accelerator, pieces: int) -> None:
    model, optimizer = prepared(four)
    four.gradient_accumulation_steps = pieces
    data = four.prepare(loader(3, rows=4))
    for epoch in range(2):
        for number, batch in enumerate(data, 1):
            for piece in batch.chunk(pieces):
                assert len(piece) == 4 // pieces
                with four.accumulate(model):
                    four.backward(loss_of(model))
                    optimizer.step()
                    optimizer.zero_grad()
            assert stepped(model) == 3 * epoch + number, "one step a batch, also for the last"


def test_models_that_accumulate_separately_have_windows_of_their_own() -> None:
    with accelerating(cpu=True, gradient_accumulation_steps=2) as accelerator:
        (one, first), (two, second) = prepared(accelerator), prepared(accelerator)
        data = accelerator.prepare(loader(5))
        seen = []
        for _ in data:
            for model, optimizer in ((one, first), (two, second)):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model))
                    optimizer.step()
                    optimizer.zero_grad()
            seen.append((stepped(one), stepped(two)))
    # The last window is short, and as upstream has it a micro-batch counts half in it too.
    assert seen == [(0, 0), (1, 1), (1, 1), (2, 2), (2.5, 2.5)]


def test_two_models_in_one_accumulate_share_a_window() -> None:
    with accelerating(cpu=True, gradient_accumulation_steps=2) as accelerator:
        (one, first), (two, second) = prepared(accelerator), prepared(accelerator)
        for _ in range(4):
            with accelerator.accumulate(one, two):
                accelerator.backward(loss_of(one) + loss_of(two))
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
        assert (stepped(one), stepped(two)) == (2, 2)


@pytest.mark.filterwarnings("ignore:optimizer.zero_grad")
def test_zero_grad_before_the_forward_drops_the_window_before_and_no_other() -> None:
    with accelerating(cpu=True, gradient_accumulation_steps=2) as accelerator:
        model, optimizer = prepared(accelerator)
        seen = []
        for _ in accelerator.prepare(loader(7)):
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(loss_of(model))
                optimizer.step()
            seen.append(stepped(model))
    assert seen == [0, 1, 1, 2, 2, 3, 3.5]


@pytest.mark.parametrize("named", [True, False])
def test_a_step_after_the_block_waits_for_the_window_too(named: bool) -> None:
    with accelerating(cpu=True, gradient_accumulation_steps=2) as accelerator:
        model, optimizer = prepared(accelerator)
        seen = []
        for _ in range(4):
            with accelerator.accumulate(*([model] if named else [])):
                accelerator.backward(loss_of(model))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(stepped(model))
    assert seen == [0, 1, 1, 2]


def test_a_step_of_another_optimizer_outside_of_the_block_is_not_held_up(four: Accelerator) -> None:
    (one, first), (two, second) = prepared(four), prepared(four)
    with four.accumulate(one):
        four.backward(loss_of(one))
        first.step()
    loss_of(two).backward()
    second.step()
    second.zero_grad()
    assert (stepped(one), stepped(two)) == (0, 1) and two.weight.grad is None


def test_an_exception_inside_of_accumulate_leaves_optimizers_free(four: Accelerator) -> None:
    (one, first), (two, second) = prepared(four), prepared(four)
    with pytest.raises(ZeroDivisionError), four.accumulate(one):
        four.backward(loss_of(one))
        raise ZeroDivisionError
    assert four.sync_gradients
    first.zero_grad()
    assert one.weight.grad is None
    loss_of(two).backward()
    second.step()
    assert stepped(two) == 1


def test_the_number_of_micro_batches_may_change_and_is_checked(four: Accelerator) -> None:
    assert syncs(four, range(8)) == [4, 8]
    four.gradient_accumulation_steps = 2
    assert syncs(four, range(4)) == [2, 4]
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ConfigError, match="gradient_accumulation_steps: expected a whole number"):
            four.gradient_accumulation_steps = wrong  # type: ignore[assignment]


def test_sync_gradients_may_be_set_by_the_script(four: Accelerator) -> None:
    model, optimizer = prepared(four)
    four.gradient_accumulation_steps = 1
    four.sync_gradients = False
    four.backward(loss_of(model))
    optimizer.step()
    optimizer.zero_grad()
    four.sync_gradients = True
    four.backward(loss_of(model))
    optimizer.step()
    assert stepped(model) == 2


def test_the_losss_own_value_is_not_divided(four: Accelerator) -> None:
    model, _ = prepared(four)
    with four.accumulate(model):
        loss = loss_of(model) + 3
        four.backward(loss)
    assert loss.item() == 3 and float(model.weight.grad) == 0.25


# -- on two ranks --


def unequal_gradients(each: bool) -> list[bool]:
    """Whether ``param.grad`` was the same on both ranks after each micro-batch."""
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each)
    with accelerating(cpu=True, gradient_accumulation_plugin=plugin) as accelerator:
        model, optimizer = prepared(accelerator)
        found = []
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 1), 1.0 + accelerator.process_index)).sum())
                both = accelerator.gather(model.weight.grad.clone())
                found.append(bool((both[0] == both[1]).all()))
                optimizer.step()
                optimizer.zero_grad()
        assert stepped(model) == pytest.approx(2 * 1.5)
    return found


@pytest.mark.parametrize("each", [False, True])
def test_gradients_are_averaged_when_the_window_is_complete(ranks: RankPools, each: bool) -> None:
    assert ranks(2).run(unequal_gradients, each) == [[each, True, each, True]] * 2


def by_hand_over_no_sync() -> list[float]:
    """`no_sync` and `trigger_sync_in_backward`, as loops of one's own use them."""
    with accelerating(cpu=True) as accelerator:
        model, optimizer = prepared(accelerator)
        x = torch.full((1, 1), 1.0 + accelerator.process_index)
        with accelerator.no_sync(model):
            accelerator.backward(model(x).sum())
            outside = model(x).sum()
        found = [float(model.weight.grad)]
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(outside)
        found.append(float(model.weight.grad))
        optimizer.step()
        return [*found, stepped(model)]


def test_no_sync_and_the_backward_that_averages_after_all(ranks: RankPools) -> None:
    assert ranks(2).run(by_hand_over_no_sync) == [[1, 3, 3], [2, 3, 3]]


def test_1847_of_the_only_batch_of_a_loader_each_piece_ends_a_window() -> None:
    """How many pieces a batch is cut in is learnt from the batch before. Without one it is as upstream."""
    with accelerating(cpu=True, gradient_accumulation_steps=2) as accelerator:
        found = []
        for batch in accelerator.prepare(loader(1, rows=4)):
            for _ in batch.chunk(2):
                with accelerator.accumulate():
                    found.append(accelerator.sync_gradients)
        assert found == [True, True]


def test_a_window_that_a_loop_leaves_open_is_told() -> None:
    """The last batch is cut in fewer pieces than the one before, which only the end of the loop shows."""
    with accelerating(cpu=True, gradient_accumulation_steps=4) as accelerator:
        found = []
        with pytest.warns(UserWarning, match="not stepped yet"):
            for batch in accelerator.prepare(loader(3, rows=4)):
                for _ in batch.chunk(2)[: 1 if accelerator.gradient_state.end_of_dataloader else 2]:
                    with accelerator.accumulate():
                        found.append(accelerator.sync_gradients)
        assert found == [False, False, False, True, False]
