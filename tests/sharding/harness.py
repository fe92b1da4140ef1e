"""Trains a small model twice: sharded by the engine on every rank, and as plain torch on the global batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import Engine

WIDTH = 8
SAMPLES = 2
# Both runs compute in float64 and differ only in the order of sums: a few units in the 16th digit, times the steps.
RELATIVE = 1e-10

# What is run for each stage. "3s" has every knob of stage 3 at its other end: some parameters rest whole, nothing is
# fetched early or kept, reductions are not overlapped.
ZERO: dict[str, dict[str, Any]] = {
    "0": {"stage": 0, "reduce_bucket_size": 150},
    "1": {"stage": 1, "reduce_bucket_size": 150},
    "2": {"stage": 2, "reduce_bucket_size": 150},
    "3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "3s": {
        "stage": 3,
        "stage3_param_persistence_threshold": 30,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "overlap_comm": False,
        "reduce_bucket_size": 100,
    },
}
STAGES = list(ZERO)


@dataclass(frozen=True)
class At:
    """Where in the run a micro-batch is: both runs ask for the same ones."""

    step: int
    micro: int
    rank: int

    def draw(self, *shape: int, salt: int = 0) -> torch.Tensor:
        """Random numbers that only this micro-batch has."""
        seed = ((self.step * 10 + self.micro) * 10 + self.rank) * 10 + salt
        return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    @property
    def x(self) -> torch.Tensor:
        """An input of the usual size."""
        return self.draw(SAMPLES, WIDTH)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1)


def mean_square(model: nn.Module, at: At) -> torch.Tensor:
    out: torch.Tensor = model(at.x)
    return out.square().mean()


@dataclass(frozen=True)
class Case:
    """A model and how it is used.

    Attributes:
        build: makes the model (fp64, seeded by the caller).
        loss: the loss of one micro-batch, through the model or the engine.
        before: called before each step with the model and the step's number, in both runs.
        steps, gas: length of the run, micro-steps per step.
        optimizer: over all parameters of the model.
        zero, config: keys on top of those of the stage.
        clip: largest gradient norm, 0 for any.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, At], torch.Tensor] = mean_square
    before: Callable[[nn.Module, int], None] = lambda model, step: None
    steps: int = 4
    gas: int = 1
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    zero: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    clip: float = 0.0


@dataclass
class Run:
    """What a run gave: losses by step, micro-step (and rank in the plain run), norms by step, the final state."""

    losses: list[Any] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def built(build: Callable[[], nn.Module]) -> nn.Module:
    """The model with the same values on every rank and in both runs."""
    torch.manual_seed(7)
    return build().double()


def config(stage: str, *, gas: int = 1, zero: Mapping[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """A ds_config for the small models."""
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": gas,
        "communication_timeout": 20,
        "gradient_clipping": 0.0,
        "zero_optimization": {**ZERO[stage], **(zero or {})},
        **keys,
    }


def start(
    model: nn.Module,
    stage: str,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    **keys: Any,
) -> Engine:
    """An engine over all parameters of the model."""
    engine, *_ = shardwise.initialize(
        model=model, optimizer=optimizer(model.parameters()), config=config(stage, **keys)
    )
    return engine


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def plain(case: Case, size: int) -> Run:
    """Plain torch in one process: the mean over the micro-batches of all ranks and the window."""
    model = built(case.build)
    optimizer = case.optimizer(model.parameters())
    run = Run()
    for step in range(case.steps):
        case.before(model, step)
        run.losses.append([])
        for micro in range(case.gas):
            losses = [case.loss(model, At(step, micro, rank)) for rank in range(size)]
            run.losses[-1].append([loss.item() for loss in losses])
            (torch.stack(losses).mean() / case.gas).backward()
        run.norms.append(norm_of(model))
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
    run.state = copied(model)
    return run


def sharded(case: Case, stage: str) -> Run:
    """The same through the engine; the losses are this rank's."""
    model = built(case.build)
    engine = start(
        model, stage, case.optimizer, gas=case.gas, zero=case.zero, gradient_clipping=case.clip, **case.config
    )
    rank, _ = rank_and_size()
    run = Run()
    try:
        for step in range(case.steps):
            case.before(model, step)
            run.losses.append([])
            for micro in range(case.gas):
                loss = case.loss(engine, At(step, micro, rank))
                run.losses[-1].append(loss.item())
                engine.backward(loss)
                engine.step()
            run.norms.append(engine.get_global_grad_norm() or 0.0)
        run.state = engine.module_state_dict()
    finally:
        engine.destroy()
    return run


def check(case: Case, stage: str) -> None:
    """Run both and compare losses, gradient norms and final values."""
    rank, size = rank_and_size()
    expected, found = plain(case, size), sharded(case, stage)
    for step in range(case.steps):
        mine = [losses[rank] for losses in expected.losses[step]]
        for micro in range(case.gas):
            same(found.losses[step][micro], mine[micro], f"loss of step {step}, micro-step {micro}")
        same(found.norms[step], expected.norms[step], f"gradient norm of step {step}")
    same_state(found.state, expected.state)


def same(found: float, expected: float, what: str) -> None:
    """Assert that two numbers are equal but for rounding."""
    error = abs(found - expected) / max(abs(expected), 1e-4)
    assert error <= RELATIVE, f"{what}: {found!r} instead of {expected!r} (relative error {error:.1e})"


def same_state(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


def norm_of(model: nn.Module) -> float:
    """Norm of all gradients there are."""
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
