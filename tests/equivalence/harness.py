"""Trains a recipe with shardwise on some ranks and compares every step with plain torch."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import shardwise
from tests.equivalence.model import batch, count_targets
from tests.equivalence.plain import plain_step, reference, schedule
from tests.equivalence.recipe import Layout, Recipe, Run


def fresh_seed() -> int:
    """A seed drawn for this run; every failure message holds it. ``EQUIVALENCE_SEED`` repeats a run."""
    given = os.environ.get("EQUIVALENCE_SEED")
    seed = int(given) if given else secrets.randbelow(2**31)
    print(f"EQUIVALENCE_SEED={seed}")
    return seed


def train(cases: list[tuple[Recipe, Layout]], seed: int) -> list[Run]:
    """Run the cases one after the other on this rank."""
    return [train_one(recipe, layout, seed) for recipe, layout in cases]


def train_one(recipe: Recipe, layout: Layout, seed: int) -> Run:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    # Rank 0's initial values count; the others start from their own to prove it. (Not with an optimizer that has
    # state already, which every rank has had to make from the same values.)
    model = recipe.model(seed + (rank if recipe.given != "used" else 0))
    arguments: dict[str, Any] = {"model": model, "config": layout.config(recipe, world_size)}
    if recipe.given == "callable":
        arguments["optimizer"] = recipe.make
    elif recipe.given != "config":
        arguments["optimizer"] = recipe.over(model)
    if recipe.given == "used":
        for step in range(recipe.warm_steps):
            plain_step(recipe, model, arguments["optimizer"], seed, step, Run())
    if recipe.schedule == "instance":
        arguments["lr_scheduler"] = schedule(arguments["optimizer"])
    elif recipe.schedule == "callable":
        arguments["lr_scheduler"] = schedule
    engine, *_ = shardwise.initialize(**arguments)
    run = Run()
    try:
        for step in range(recipe.warm_steps, recipe.steps):
            engine_step(engine, recipe, layout, seed, step, run)
        whole = engine.module.state_dict()
        run.prints = {name: float(value.double().abs().sum()) for name, value in whole.items()}
        if rank == 0:
            run.state = {name: value.double() for name, value in whole.items()}
        run.skipped = engine.skipped_steps
    finally:
        engine.destroy()
    return run


def engine_step(engine: Any, recipe: Recipe, layout: Layout, seed: int, step: int, run: Run) -> None:
    tokens, targets = batch(seed, step, ragged=recipe.ragged)
    pieces = layout.gas * engine.world_size
    share = 0.0
    poisoned = step in recipe.overflows and engine.global_rank == engine.world_size - 1
    run.rates.append(engine.get_lr())
    run.scales.append(engine.loss_scale)
    for micro in range(layout.gas):
        i = micro * engine.world_size + engine.global_rank
        mine, wanted = tokens.chunk(pieces)[i], targets.chunk(pieces)[i]
        loss = engine(mine, wanted)
        n = count_targets(wanted)
        share += loss.item() * n / count_targets(targets)
        if poisoned and micro == layout.gas - 1:
            loss = loss * float("inf")
        engine.backward(loss, **({"tokens": n} if recipe.ragged else {}))
        engine.step()
    run.losses.append(share)
    run.norms.append(engine.grad_norm_before_clip)
    run.clipped.append(engine.grad_norm_after_clip)


@dataclass(frozen=True)
class Tolerance:
    """Relative. ``norm`` and ``state`` default to ``loss``; ``first``: of the first step, before any update.

    ``floor``: norms below the first step's are compared on the scale of that one. A norm that shrinks does so because
    samples cancel, and the rounding of what cancels does not shrink with it.
    """

    loss: float
    norm: float | None = None
    state: float | None = None
    first: float | None = None
    floor: bool = False


def differences(runs: list[Run], expected: Run, tolerance: Tolerance) -> list[str]:
    """One sentence for each thing in which the ranks' runs differ from the expected one, or from each other."""
    found: list[str] = []
    losses = [sum(shares) for shares in zip(*(r.losses for r in runs), strict=True)]
    first = runs[0]
    limit = tolerance.norm or tolerance.loss
    found += _series("loss", losses, expected.losses, tolerance.loss, tolerance.first)
    for name, got, want in (
        ("norm before clip", first.norms, expected.norms),
        ("norm after clip", first.clipped, expected.clipped),
    ):
        found += _series(name, got, want, limit, tolerance.first, want[0] if tolerance.floor else 0.0)
    found += _series("rate", _flat(first.rates), _flat(expected.rates), 1e-12)
    if expected.scales and first.scales != expected.scales:
        found.append(f"loss scales {first.scales} instead of {expected.scales}")
    if first.skipped != expected.skipped:
        found.append(f"{first.skipped} skipped steps instead of {expected.skipped}")
    for rank, run in enumerate(runs[1:], 1):
        for name in ("norms", "clipped", "rates", "scales", "skipped", "prints"):
            # Compared as text, so that a NaN equals a NaN.
            if repr(getattr(run, name)) != repr(getattr(first, name)):
                found.append(f"{name} of rank {rank} differ from those of rank 0")
    if first.state.keys() != expected.state.keys():
        found.append(f"state_dict has {sorted(first.state.keys() ^ expected.state.keys())} too many or too few")
        return found
    limit = tolerance.state or tolerance.loss
    for name, value in expected.state.items():
        worst = float((first.state[name] - value).abs().max() / value.abs().max().clamp(min=1e-300))
        if not worst <= limit:
            found.append(f"final {name}: off by {worst:.2e} of its largest value (> {limit:g})")
    return found


def _series(
    name: str, got: list[float], want: list[float], limit: float, first: float | None = None, floor: float = 0.0
) -> list[str]:
    if len(got) != len(want):
        return [f"{name}: {len(got)} steps instead of {len(want)}"]
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        allowed = limit if step or first is None else first
        # A skipped step has no norm to compare (NaN). What follows an error is its consequence: the first is told.
        if b == b and not abs(a - b) <= allowed * max(abs(b), floor):
            return [f"{name} {step}: {a!r} instead of {b!r}, relative {abs(a / b - 1):.2e} > {allowed:g}"]
    return []


def _flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def whole_batch(world_size: int, layout: Layout) -> tuple[int, bool]:
    """The reference sees the global batch at once."""
    return 1, False


def check(
    pools: Any,
    world_size: int,
    cases: list[tuple[Recipe, Layout]],
    tolerance: Tolerance,
    *,
    parts: Callable[[int, Layout], tuple[int, bool]] = whole_batch,
) -> list[list[Run]]:
    """Run the cases on ``world_size`` ranks in one go and fail with everything that differs from plain torch.

    ``parts`` gives ``pieces`` and ``rounded`` of the reference. Returns each case's runs by rank.
    """
    __tracebackhide__ = True
    seed = fresh_seed()
    by_rank = pools(world_size).run(train, cases, seed, timeout=110)
    problems, all_runs = [], []
    for i, (recipe, layout) in enumerate(cases):
        runs = [runs_of_rank[i] for runs_of_rank in by_rank]
        all_runs.append(runs)
        found = differences(runs, reference(recipe, seed, *parts(world_size, layout)), tolerance)
        problems += [f"{layout}\n  {recipe}\n    " + "\n    ".join(found)] if found else []
    assert not problems, f"EQUIVALENCE_SEED={seed}, {world_size} ranks:\n" + "\n".join(problems)
    return all_runs
