"""Loops that do more than the canonical one, and objects that are prepared twice."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shardwise import Accelerator, ConfigError
from shardwise.accelerator import current
from tests.accelerator.loops import accelerating, sharded
from tests.accelerator.test_windows import counter, loss_of, prepared, stepped
from tests.ranks import RankPools

STAGES = [None, 0, 1, 2, 3]


def plugin(stage: int | None) -> Any:
    return None if stage is None else sharded(stage, train_micro_batch_size_per_gpu=1)


def value(accelerator: Accelerator, model: Any) -> float:
    return -float(accelerator.get_state_dict(model)["weight"])


def of_rank(accelerator: Accelerator) -> torch.Tensor:
    return torch.full((1, 1), 1.0 + accelerator.process_index)


def forwards_between(stage: int | None) -> list[float]:
    """Evaluation, and forwards that lead to no backward, inside of a window."""
    with accelerating(cpu=True, deepspeed_plugin=plugin(stage), gradient_accumulation_steps=2) as accelerator:
        model, optimizer = prepared(accelerator)
        found = []
        for _ in range(4):
            with accelerator.accumulate(model):
                loss = model(of_rank(accelerator)).sum()
                model(of_rank(accelerator))
                accelerator.backward(loss)
                model.eval()
                with torch.no_grad():
                    model(of_rank(accelerator))
                model.train()
                optimizer.step()
                optimizer.zero_grad()
            model(of_rank(accelerator))
            found.append(value(accelerator, model))
    return found


def losses_of_one_graph(stage: int | None) -> list[float]:
    """Two backwards in a micro-batch, the first of which keeps the graph."""
    with accelerating(cpu=True, deepspeed_plugin=plugin(stage), gradient_accumulation_steps=2) as accelerator:
        model, optimizer = prepared(accelerator)
        found = []
        for _ in range(2):
            with accelerator.accumulate(model):
                y = model(of_rank(accelerator)).sum()
                accelerator.backward(y, retain_graph=True)
                accelerator.backward(2 * y)
                optimizer.step()
                optimizer.zero_grad()
            found.append(value(accelerator, model))
    return found


def dropped(stage: int | None) -> list[float]:
    """The script drops its second micro-batch's window, as it does when it does not like a norm."""
    with accelerating(cpu=True, deepspeed_plugin=plugin(stage), gradient_accumulation_steps=2) as accelerator:
        model, optimizer = prepared(accelerator)
        found = []
        for number in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(of_rank(accelerator)).sum())
                if number != 1:
                    optimizer.step()
                optimizer.zero_grad()
            found.append(value(accelerator, model))
    return found


def fails(stage: int | None) -> list[float]:
    """All ranks skip a micro-batch by an exception."""
    with accelerating(cpu=True, deepspeed_plugin=plugin(stage), gradient_accumulation_steps=2) as accelerator:
        model, optimizer = prepared(accelerator)
        found = []
        for number in range(6):
            try:
                with accelerator.accumulate(model):
                    loss = model(of_rank(accelerator)).sum()
                    if number == 1:
                        raise ZeroDivisionError
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            except ZeroDivisionError:
                optimizer.zero_grad()
            found.append(value(accelerator, model))
    return found


def every_loop(stage: int | None) -> list[list[float]]:
    return [loop(stage) for loop in (forwards_between, losses_of_one_graph, dropped, fails)]


@pytest.mark.parametrize("stage", STAGES)
def test_loops_that_do_more(ranks: RankPools, stage: int | None) -> None:
    for found in ranks(2).run(every_loop, stage):
        # The mean over the ranks of a gradient is 1.5.
        assert found == [[0, 1.5, 1.5, 3], [0, 4.5], [0, 0, 0, 1.5], [0, 0, 0, 1.5, 1.5, 3]]


def penalised(stage: int | None) -> list[float]:
    """A penalty on the gradient by the input, which is differentiated again."""
    with accelerating(cpu=True, deepspeed_plugin=plugin(stage)) as accelerator:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        x = torch.full((2, 2), 1.0 + accelerator.process_index, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        accelerator.backward(grad.square().sum())
        optimizer.step()
        weights = accelerator.get_state_dict(model)
        return [float(weights[name].sum()) for name in ("0.weight", "2.weight")]


def test_a_penalty_on_a_gradient(ranks: RankPools) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for rank in range(2):
        x = torch.full((2, 2), 1.0 + rank, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (grad.square().sum() / 2).backward()
    optimizer.step()
    want = [model[0].weight.detach().sum().item(), model[2].weight.detach().sum().item()]
    for stage in (None, 0, 3):
        for found in ranks(2).run(penalised, stage):
            assert found == pytest.approx(want, rel=1e-12)


# -- prepared twice --


def by_two(gone: bool) -> float:
    first = Accelerator(cpu=True)
    model, _ = prepared(first)
    if gone:
        del first
        gc.collect()
    second = Accelerator(cpu=True)
    try:
        second.prepare(model)
        second.backward(model(of_rank(second)).sum())
        return float(model.weight.grad)
    finally:
        second.free_memory()
        if not gone:
            first.free_memory()
        current.forget()


def test_a_model_of_another_accelerator_is_not_averaged_twice(ranks: RankPools) -> None:
    errors = ranks(2).run_expecting(ConfigError, by_two, False, match="prepared by another Accelerator")
    assert len(errors) == 2
    assert ranks(2).run(by_two, True) == [1.5, 1.5]  # that one is gone


def test_an_optimizer_that_another_accelerator_prepares_again() -> None:
    with accelerating(cpu=True) as first:
        model, optimizer = prepared(first)
        first.free_memory()
        with accelerating(cpu=True, gradient_accumulation_steps=2) as second:
            model, optimizer = second.prepare(model, optimizer)
            with second.accumulate(model):
                second.backward(loss_of(model))
                optimizer.step()
                optimizer.zero_grad()
            assert stepped(model) == 0


def hook_fails(folder: str) -> str:
    def hook(models: list[Any], weights: list[Any], place: str) -> None:
        if accelerator.is_main_process:
            raise ValueError("the hook")

    with accelerating(cpu=True) as accelerator:
        accelerator.prepare(counter())
        accelerator.register_save_state_pre_hook(hook)
        try:
            accelerator.save_state(folder)
        except Exception as error:
            return str(error)
        return "saved"


def test_a_hook_that_fails_on_one_process_fails_on_all(tmp_path: Path, ranks: RankPools) -> None:
    for said in ranks(2).run(hook_fails, str(tmp_path / "state"), timeout=2.0):
        assert "the hook" in said


def test_loaders_schedules_and_precision_of_an_earlier_accelerator() -> None:
    with accelerating(cpu=True, mixed_precision="bf16") as first:
        model, optimizer = prepared(first)
        schedule = first.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
        loader = first.prepare(DataLoader(torch.ones(3, 1), batch_size=1))
        with accelerating(cpu=True, gradient_accumulation_steps=2) as second:
            model, optimizer, loader, schedule = second.prepare(model, optimizer, loader, schedule)
            found = []
            for batch in loader:
                with second.accumulate(model):
                    out = model(batch)
                    found.append((second.sync_gradients, out.grad_fn.name() != "ToCopyBackward0"))
                    second.backward(out.sum())
                    optimizer.step()
                    schedule.step()
            assert found == [(False, True), (True, True), (True, True)]  # the loader's end is the second's
            assert schedule.gradient_state is second.gradient_state
            assert len(second._schedulers) == len(second._dataloaders) == 1


def penalised_in_uneven_loops() -> float:
    accelerator = Accelerator(cpu=True)
    try:
        model: Any = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        model = accelerator.prepare(model)
        with accelerator.join_uneven_inputs([model]):
            for _ in range([3, 1][accelerator.process_index]):
                x = torch.ones(1, 1, requires_grad=True)
                (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
                model.zero_grad()
                accelerator.backward(grad.square().sum())
        return float(model.weight.grad) if accelerator.process_index == 0 else 0.0
    finally:
        accelerator.free_memory()
        current.forget()


def test_a_gradient_that_is_only_looked_at_is_no_averaging(ranks: RankPools) -> None:
    # d/dw of w**2 is 2; in the last step of the first rank the other one gives zero.
    assert ranks(2).run(penalised_in_uneven_loops) == [1.0, 0.0]
