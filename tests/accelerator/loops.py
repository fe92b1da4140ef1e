"""The loop that everybody writes, and the same by hand in plain torch on one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from shardwise import Accelerator, DeepSpeedPlugin
from shardwise.accelerator import preparing
from shardwise.accelerator.current import forget

WIDTH = 6


@contextmanager
def accelerating(*args: Any, **options: Any) -> Iterator[Accelerator]:
    """An Accelerator over the default group, and nothing left of it afterwards."""
    accelerator = Accelerator(*args, **options)
    try:
        yield accelerator
    finally:
        # Without its search for cycles: a tenth of a second that hundreds of tests need not spend.
        with patch.object(preparing, "release_memory", lambda *objects: [None] * len(objects)):
            accelerator.free_memory()
        forget()


def sharded(stage: int, **more: Any) -> DeepSpeedPlugin:
    """A ds_config of this stage, with units so small that the model is cut in several."""
    zero = {"stage": stage, "reduce_bucket_size": 30, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    return DeepSpeedPlugin(hf_ds_config={**config, **more})


class Net(nn.Module):
    """Smooth, so that no gradient is exactly zero by chance; one weight is used twice."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(WIDTH, n) for n in (WIDTH, WIDTH, 1))
        generator = torch.Generator().manual_seed(seed)
        self.to(dtype)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.shared(torch.tanh(self.shared(x))))).squeeze(-1)


def table(rows: int, seed: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Inputs and targets."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=draw, dtype=torch.float64)
    return TensorDataset(x.to(dtype), torch.randn(rows, generator=draw, dtype=torch.float64).to(dtype))


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with a state."""
    if name == "adamw":
        # A large eps: where a gradient is as small as eps, its rounding would be the step.
        return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, eps=1e-5)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def falling(optimizer: Any) -> LambdaLR:
    """A schedule that shows how often it was advanced."""
    return LambdaLR(optimizer, lambda n: 0.97**n)


@dataclass
class Run:
    """One run of the loop.

    Attributes:
        rows: of each rank's micro-batch.
        micros: micro-batches of an epoch, on each rank.
        max_norm: None: gradients are not clipped.
        n_fold: advances of the schedule with an update.
    """

    seed: int
    optimizer: str = "adamw"
    accumulate: int = 1
    rows: int = 4
    micros: int = 7
    epochs: int = 2
    max_norm: float | None = 0.3
    n_fold: int = 1
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    stage: int | None = None

    def data(self, ranks: int) -> TensorDataset:
        """Of all ranks."""
        return table(self.rows * self.micros * ranks, self.seed + 1, self.dtype)


@dataclass
class Trace:
    """What a run shows: losses, norms before clipping and learning rates of its updates, and the last weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def by_accelerator(run: Run) -> Trace:
    """The loop, on each rank."""
    plugin = None if run.stage is None else sharded(run.stage)
    options = {"gradient_accumulation_steps": run.accumulate, "deepspeed_plugin": plugin, **run.options}
    found = Trace()
    with accelerating(cpu=True, **options) as accelerator:
        model: Any = Net(run.seed, run.dtype)
        optimizer: Any = make_optimizer(run.optimizer, model)
        schedule: Any = falling(optimizer)
        loader: Any = DataLoader(run.data(accelerator.num_processes), batch_size=run.rows)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        window: list[torch.Tensor] = []
        for _ in range(run.epochs):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = (model(x) - y).square().mean()
                    window.append(loss.detach().double())
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and run.max_norm is not None:
                        norm = accelerator.clip_grad_norm_(model.parameters(), run.max_norm)
                        found.norms.append(float(norm))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    found.losses.append(float(accelerator.reduce(torch.stack(window).mean(), "mean")))
                    found.rates.append(schedule.get_last_lr()[0])
                    window.clear()
        state = accelerator.get_state_dict(model)
        found.weights = {name: value.detach().clone() for name, value in state.items()}
    return found


def by_hand_in_bf16(run: Run, ranks: int) -> list[float]:
    """The losses in plain torch under autocast: each rank's rows by themselves, and then the mean of the gradients."""
    model = Net(run.seed, run.dtype)
    optimizer = make_optimizer(run.optimizer, model)
    schedule = falling(optimizer)
    losses = []
    for _ in range(run.epochs):
        batches = list(DataLoader(run.data(ranks), batch_size=run.rows * ranks))
        for first in range(0, len(batches), run.accumulate):
            sums = [torch.zeros_like(p) for p in model.parameters()]
            seen = []
            for rank in range(ranks):
                optimizer.zero_grad()
                mine = []
                for x, y in batches[first : first + run.accumulate]:
                    with torch.autocast("cpu", torch.bfloat16):
                        out = model(x.chunk(ranks)[rank])
                    loss = (out.float() - y.chunk(ranks)[rank]).square().mean()
                    mine.append(loss.detach().double())
                    (loss / run.accumulate).backward()
                seen.append(torch.stack(mine).mean())
                for total, p in zip(sums, model.parameters(), strict=True):
                    total.add_(p.grad, alpha=1 / ranks)  # type: ignore[arg-type]
            for total, p in zip(sums, model.parameters(), strict=True):
                p.grad = total
            optimizer.step()
            schedule.step()
            losses.append(float(torch.stack(seen).mean()))
    return losses


def by_hand(run: Run, ranks: int) -> Trace:
    """The same in plain torch: each micro-batch is that of all ranks together."""
    found = Trace()
    model = Net(run.seed, run.dtype)
    optimizer = make_optimizer(run.optimizer, model)
    schedule = falling(optimizer)
    loader = DataLoader(run.data(ranks), batch_size=run.rows * ranks)
    for _ in range(run.epochs):
        batches = list(loader)
        for first in range(0, len(batches), run.accumulate):
            window = batches[first : first + run.accumulate]
            losses = []
            for x, y in window:
                loss = (model(x) - y).square().mean()
                losses.append(loss.detach().double())
                (loss / run.accumulate).backward()
            if run.max_norm is not None:
                found.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), run.max_norm)))
            optimizer.step()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(run.n_fold):
                    schedule.step()
            optimizer.zero_grad()
            found.losses.append(float(torch.stack(losses).mean()))
            found.rates.append(schedule.get_last_lr()[0])
    found.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return found
