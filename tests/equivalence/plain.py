"""The run in plain torch, in one process on the global batch: what every layout is compared with."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

from tests.equivalence.model import batch
from tests.equivalence.recipe import Recipe, Run


def schedule(optimizer: Optimizer) -> LRScheduler:
    return ExponentialLR(optimizer, gamma=0.7)


@functools.cache
def reference(recipe: Recipe, seed: int, pieces: int = 1, rounded: bool = False) -> Run:
    """The same run in plain torch.

    ``pieces``: forward the global batch in this many parts instead of at once, and ``rounded``: round their summed
    gradient to the model's dtype. Both only matter in 16 bits.
    """
    if recipe.low is not None:
        return low_precision_reference(recipe, seed, pieces, rounded)
    model = recipe.model(seed)
    optimizer = recipe.over(model)
    scheduler = schedule(optimizer) if recipe.schedule else None
    run = Run()
    for step in range(recipe.steps):
        into = run if step >= recipe.warm_steps else Run()
        into.rates.append([float(group["lr"]) for group in optimizer.param_groups])
        plain_step(recipe, model, optimizer, seed, step, into)
        if scheduler is not None:
            scheduler.step()
    run.state = {name: value.double() for name, value in model.state_dict().items()}
    return run


def plain_step(recipe: Recipe, model: nn.Module, optimizer: Optimizer, seed: int, step: int, run: Run) -> None:
    loss = model(*batch(seed, step, ragged=recipe.ragged))
    loss.backward()
    run.losses.append(loss.item())
    finish_step(recipe, list(model.parameters()), optimizer, run)


def finish_step(recipe: Recipe, params: list[nn.Parameter], optimizer: Optimizer, run: Run) -> None:
    run.norms.append(norm_of(params))
    torch.nn.utils.clip_grad_norm_(params, recipe.clip)
    run.clipped.append(norm_of(params))
    optimizer.step()
    optimizer.zero_grad()


def norm_of(params: Iterable[nn.Parameter]) -> float:
    return sum(float(p.grad.double().square().sum()) for p in params if p.grad is not None) ** 0.5


def low_precision_reference(recipe: Recipe, seed: int, pieces: int, rounded: bool) -> Run:
    """Mixed precision by hand: fp32 master weights, a 16-bit copy for forward and backward, the gradients of the
    parts summed in fp32, upstream's rule for the loss scale."""
    assert recipe.low is not None
    master = recipe.model(seed)
    model = copy.deepcopy(master).to(recipe.low)
    pairs = list(zip(master.parameters(), model.parameters(), strict=True))
    optimizer = recipe.over(master)
    scheduler = schedule(optimizer) if recipe.schedule else None
    scale = LossScale(2.0**recipe.scale_power, **dict(recipe.scale_rule))
    run = Run()
    for step in range(recipe.steps):
        tokens, targets = batch(seed, step)
        sums = [torch.zeros_like(into) for into, _ in pairs]
        losses = []
        for mine, wanted in zip(tokens.chunk(pieces), targets.chunk(pieces), strict=True):
            loss = model(mine, wanted)
            losses.append(loss.item())
            (loss * (scale.value / pieces)).backward()
            for total, (_, param) in zip(sums, pairs, strict=True):
                assert param.grad is not None
                total += param.grad
                param.grad = None
        run.losses.append(sum(losses) / pieces)
        run.scales.append(scale.value)
        run.rates.append([float(group["lr"]) for group in optimizer.param_groups])
        overflow = step in recipe.overflows
        scale_now = scale.value
        scale.update(step, overflow)
        if overflow:
            run.norms.append(float("nan"))
            run.clipped.append(float("nan"))
            run.skipped += 1
            continue
        for total, (into, _) in zip(sums, pairs, strict=True):
            into.grad = (total.to(recipe.low).float() if rounded else total) / scale_now
        finish_step(recipe, [into for into, _ in pairs], optimizer, run)
        if scheduler is not None:
            scheduler.step()
        with torch.no_grad():
            for source, param in pairs:
                param.copy_(source)
    run.state = {name: value.double() for name, value in model.state_dict().items()}
    return run


@dataclass
class LossScale:
    """Upstream's dynamic loss scale, told by step numbers: doubled where the steps strictly between the last overflow
    and this one are a positive multiple of the window; halved when an overflow finds no hysteresis left."""

    value: float
    loss_scale_window: int = 1000
    hysteresis: int = 2
    last_overflow: int = -1
    used: int = 1

    def update(self, step: int, overflow: bool) -> None:
        if overflow:
            if self.used >= self.hysteresis:
                self.value /= 2
            else:
                self.used += 1
            self.last_overflow = step
            return
        between = step - self.last_overflow - 1
        if between > 0 and between % self.loss_scale_window == 0:
            self.value *= 2
            self.used = 1
