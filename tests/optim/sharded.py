"""Trains a small model of awkward parameters through the engine and in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import shardwise

Make = Callable[[Iterable[Any]], Optimizer]
STEPS = 4
CLIP = 0.2


class Branch(nn.Module):
    """A residual part of which a layer is used now and then: at stage 3, one leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 23)
        self.tall = nn.Linear(23, 6)
        self.sometimes = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *, with_all: bool) -> torch.Tensor:
        x = x + self.tall(torch.tanh(self.wide(x)))
        return x + torch.tanh(self.sometimes(x)) if with_all else x


class Net(nn.Module):
    """Matrices and vectors of several sizes, an empty parameter, an unused one, and one that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.branch = Branch()
        self.scale = nn.Parameter(torch.ones(6))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(6, 5)

    def forward(self, tokens: torch.Tensor, *, with_all: bool) -> torch.Tensor:
        x = self.branch(self.embed(tokens), with_all=with_all) * self.scale + self.empty.sum()
        return self.head(x).square().mean()


@dataclass(frozen=True)
class Case:
    """An optimizer: from the configuration (``type`` and ``params``), or made over the model by ``make``."""

    name: str
    type: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    make: Make | None = None
    grouped: bool = False
    dtype: torch.dtype = torch.float64
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)

    def model(self, seed: int) -> Net:
        torch.manual_seed(seed)
        return Net().to(self.dtype)


def groups(model: nn.Module, **more: Any) -> list[dict[str, Any]]:
    """Matrices and the rest, which has a rate of its own."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [{"params": matrices}, {"params": rest, "lr": 0.003, "weight_decay": 0.0, **more}]


def tokens_of(seed: int, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * step + rank)
    return torch.randint(0, 11, (8,), generator=generator)


def with_all(step: int, rank: int) -> bool:
    """One layer has no gradient in the first step, and later on rank 1 only."""
    return step > 0 and rank == 1


def engine_of(case: Case, stage: int, model: Net) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200, **case.zero},
        **case.top,
    }
    if stage == 3:
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "leaf_module": {"classes": ["Branch"]}}
    arguments: dict[str, Any] = {}
    if case.make is not None:
        params = groups(model) if case.grouped else list(model.parameters())
        arguments["optimizer"] = case.make(params)
    else:
        config["optimizer"] = {"type": case.type, "params": case.params}
        if case.grouped:
            arguments["model_parameters"] = groups(model)
    return shardwise.initialize(model=model, config=config, **arguments)[0]


def advance(engine: Any, seed: int, steps: range) -> list[float]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    norms = []
    for step in steps:
        loss = engine(tokens_of(seed, step, rank), with_all=with_all(step, rank))
        engine.backward(loss)
        engine.step()
        norms.append(engine.grad_norm_before_clip)
    return norms


def train(cases: list[tuple[Case, int]], seed: int) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """On a rank: the gradient norms and the final weights of each case at its stage."""
    runs = []
    for case, stage in cases:
        engine = engine_of(case, stage, case.model(seed))
        try:
            norms = advance(engine, seed, range(STEPS))
            runs.append((norms, engine.module_state_dict()))
        finally:
            engine.destroy()
    return runs


def plain(case: Case, make: Make, seed: int, ranks: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    """In one process, on the whole model and the batches of all ranks."""
    model = case.model(seed)
    optimizer = make(groups(model) if case.grouped else [p for p in model.parameters() if p.numel()])
    for group in optimizer.param_groups:  # torch's Adafactor divides by the size
        group["params"] = [p for p in group["params"] if p.numel()]
    norms = []
    for step in range(STEPS):
        losses = [model(tokens_of(seed, step, rank), with_all=with_all(step, rank)) for rank in range(ranks)]
        torch.stack(losses).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        model.zero_grad()
    return norms, model.state_dict()


def interrupted(cases: list[tuple[Case, int]], seed: int) -> list[bool]:
    """On a rank: whether a run that is saved and loaded in between ends with the very bits of the one that is not."""
    same = []
    for case, stage in cases:
        engine = engine_of(case, stage, case.model(seed))
        advance(engine, seed, range(2))
        # What is saved must not move with the run.
        saved, weights = copy.deepcopy(engine.optimizer.state_dict()), engine.module_state_dict()
        advance(engine, seed, range(2, STEPS))
        expected = engine.module_state_dict()
        engine.destroy()
        engine = engine_of(case, stage, case.model(seed + 1))
        engine.load_module_state_dict(weights)
        engine.optimizer.load_state_dict(saved)
        advance(engine, seed, range(2, STEPS))
        found = engine.module_state_dict()
        engine.destroy()
        same.append(all(torch.equal(found[name], value) for name, value in expected.items()))
    return same
