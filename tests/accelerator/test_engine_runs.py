"""Runs with a ds_config: what it alone names, and what passes through its engine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shardwise import Accelerator, initialize
from tests.accelerator.loops import accelerating, sharded

ADAM = {"type": "AdamW", "params": {"lr": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"}}


def model_of_one() -> Any:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def weight(accelerator: Accelerator, model: Any) -> float:
    return float(accelerator.get_state_dict(model)["weight"])


def test_an_optimizer_that_the_ds_config_alone_has_steps_in_backward() -> None:
    plugin = sharded(2, train_micro_batch_size_per_gpu=1, optimizer=ADAM)
    with accelerating(cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=2) as accelerator:
        model = accelerator.prepare(model_of_one())
        seen = []
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
            seen.append(weight(accelerator, model))
        assert seen[0] == 1 and seen[1] == seen[2] < 1 and seen[3] < seen[2]


def rates(accelerator: Accelerator, model: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        found.append(model.get_lr()[0])
    return found


def test_a_schedule_that_the_ds_config_alone_has_goes_on_after_a_resume(tmp_path: Path) -> None:
    def start() -> Any:
        return sharded(0, train_micro_batch_size_per_gpu=1, optimizer=ADAM, scheduler=WARMUP)

    with accelerating(cpu=True, deepspeed_plugin=start()) as accelerator:
        model = accelerator.prepare(model_of_one())
        rates(accelerator, model, 4)
        accelerator.save_state(tmp_path / "state")
        wanted = rates(accelerator, model, 3)
    with accelerating(cpu=True, deepspeed_plugin=start()) as accelerator:
        model = accelerator.prepare(model_of_one())
        accelerator.load_state(tmp_path / "state")
        assert rates(accelerator, model, 3) == pytest.approx(wanted)


def test_a_backward_after_clipping_is_a_part_of_the_step() -> None:
    model = model_of_one()
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    engine, *_ = initialize(model=model, config=config)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(torch.ones(1, 1)).sum())
    engine.clip_grad_norm_(1.0)
    engine.backward(engine(torch.full((1, 1), math.nan)).sum())
    engine.step()
    assert not engine.was_step_applied()
    assert float(engine.module_state_dict()["weight"]) == 1
    engine.destroy()


class Passed(dict[str, Any]):
    """A mapping with attributes, as outputs of transformers are."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.seen: list[Any] = []

    def forward(self, given: Passed) -> torch.Tensor:
        self.seen.append(given)
        return self.layer(given.states)


def test_a_mapping_keeps_its_class_on_the_way_to_a_bf16_model() -> None:
    with accelerating(cpu=True, mixed_precision="bf16", deepspeed_plugin=sharded(2)) as accelerator:
        given = Reads()
        loader = DataLoader([torch.ones(2)], batch_size=1)
        model, _, _ = accelerator.prepare(given, torch.optim.SGD(given.parameters(), lr=1.0), loader)
        batch = Passed(states=torch.ones(1, 2), ids=torch.ones(1, dtype=torch.int64))
        out = model(batch)
        assert out.dtype == torch.float32
        assert type(given.seen[0]) is Passed and given.seen[0].states.dtype == torch.bfloat16
        assert batch.states.dtype == torch.float32 and given.seen[0].ids is batch.ids
