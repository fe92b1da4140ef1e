"""One training run three ways: plain torch in one process, and shardwise on some ranks under some ds_config.

A :class:`Recipe` says what is trained, a :class:`Layout` how shardwise cuts it. :func:`train` runs on every rank,
:func:`reference` in the test process on the same global batch, and :func:`differences` compares the two.
"""

from __future__ import annotations

import copy
import functools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

import shardwise

# Samples of a step over all ranks: cut evenly by 1 to 4 ranks and 1 to 4 micro-steps (three ranks: 1, 2 or 4).
GLOBAL_BATCH = 24
LENGTH = 5
VOCABULARY = 37
WIDTH = 20
IGNORED = -100

Frozen = tuple[tuple[str, Any], ...]


def fresh_seed() -> int:
    """A seed drawn for this run; every failure message holds it. ``EQUIVALENCE_SEED`` repeats a run."""
    given = os.environ.get("EQUIVALENCE_SEED")
    seed = int(given) if given else secrets.randbelow(2**31)
    print(f"EQUIVALENCE_SEED={seed}")
    return seed


# ---------------------------------------------------------------------------------------------- the model


class Attention(nn.Module):
    """Causal, two heads. The keys have no bias: its gradient is zero but for rounding, which optimizers that divide
    by the gradient's size (Adam, Rprop) would turn into steps of arbitrary direction in any implementation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, length, 2, width // 2).transpose(1, 2)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        scores = (q @ k.transpose(-1, -2)) * (width // 2) ** -0.5
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width + 1), nn.GELU(), nn.Linear(3 * width + 1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """Returns its loss: the mean over the targets that are not ``IGNORED`` (0 if all are). No size is a multiple of
    the alignment; ``position`` and the 0-dimensional ``temperature`` belong to the root module itself."""

    def __init__(
        self, *, tied: bool = False, width: int = WIDTH, vocabulary: int = VOCABULARY, blocks: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.position = nn.Parameter(torch.randn(LENGTH, width) * 0.1)
        self.temperature = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)) * self.temperature
        wide = logits.float() if logits.dtype.itemsize == 2 else logits
        total = F.cross_entropy(
            wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total / max(count_targets(targets), 1)


def count_targets(targets: torch.Tensor) -> int:
    return int((targets != IGNORED).sum())


def batch(seed: int, step: int, *, ragged: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step: tokens and targets, each ``[GLOBAL_BATCH, LENGTH]``.

    On every third step all targets are one token, which makes the gradient several times as large as on the others:
    a threshold between the two clips some steps and not all.
    """
    generator = torch.Generator().manual_seed(seed * 1009 + step)
    tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, LENGTH), generator=generator)
    targets = torch.randint(VOCABULARY, (GLOBAL_BATCH, LENGTH), generator=generator)
    if step % 3 == 1:
        targets = targets[:1, :1].expand_as(targets).clone()
    if ragged:
        lengths = torch.randint(0, LENGTH + 1, (GLOBAL_BATCH,), generator=generator)
        lengths[:3] = 0  # a micro-batch without any target is a case as well
        lengths[3] = LENGTH
        targets[torch.arange(LENGTH) >= lengths[:, None]] = IGNORED
    return tokens, targets


# ---------------------------------------------------------------------------------------------- what and how


@dataclass(frozen=True)
class Recipe:
    """What is trained.

    ``optimizer`` and ``params`` name a torch class and its arguments. ``given``: how shardwise gets it: from the
    ``config``, as a ``callable``, as an ``instance``, as an instance with two ``groups`` (other rate and decay for
    biases), or as one that was ``used`` in plain torch for the first three steps. ``schedule``: ``""``,
    ``"instance"`` or ``"callable"``. ``overflows``: steps at which the last rank's loss is infinite.
    """

    dtype: str = "float64"
    optimizer: str = "AdamW"
    params: Frozen = (("lr", 0.01), ("weight_decay", 0.1))
    given: str = "config"
    schedule: str = ""
    tied: bool = False
    steps: int = 20
    clip: float = 1.2
    ragged: bool = False
    scale_power: int = 0
    scale_rule: Frozen = ()
    overflows: tuple[int, ...] = ()

    @property
    def low(self) -> torch.dtype | None:
        return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.dtype)

    def model(self, seed: int) -> TinyGPT:
        torch.manual_seed(seed)
        return TinyGPT(tied=self.tied).to(torch.float32 if self.low else getattr(torch, self.dtype))

    def make(self, params: Iterable[Any]) -> Optimizer:
        cls: Callable[..., Optimizer] = getattr(torch.optim, self.optimizer)
        return cls(params, **dict(self.params))

    def over(self, model: nn.Module) -> Optimizer:
        if self.given != "groups":
            return self.make(model.parameters())
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        rate = dict(self.params)["lr"]
        return self.make([{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": rate * 3}])

    @property
    def warm_steps(self) -> int:
        return 3 if self.given == "used" else 0


@dataclass(frozen=True)
class Layout:
    """How shardwise cuts the run: the ZeRO stage, the micro-steps, more of ``zero_optimization``, more top keys."""

    stage: int
    gas: int = 1
    zero: Frozen = ()
    top: Frozen = ()

    def config(self, recipe: Recipe, world_size: int) -> dict[str, Any]:
        made: dict[str, Any] = {
            "train_batch_size": GLOBAL_BATCH,
            "gradient_accumulation_steps": self.gas,
            "gradient_clipping": recipe.clip,
            "zero_optimization": {"stage": self.stage, **dict(self.zero)},
            **dict(self.top),
        }
        if recipe.given == "config":
            made["optimizer"] = {"type": recipe.optimizer, "params": dict(recipe.params)}
        if recipe.ragged:
            made["gradient_normalization"] = "tokens"
        if recipe.dtype == "bfloat16":
            made["bf16"] = {"enabled": True}
        if recipe.dtype == "float16":
            made["fp16"] = {
                "enabled": True,
                "initial_scale_power": recipe.scale_power,
                **dict(recipe.scale_rule),
            }
        return made


@dataclass
class Run:
    """What a run gave, step by step. On a rank, ``losses`` are that rank's share of the mean."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: int = 0
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    prints: dict[str, float] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------- shardwise


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


def engine_step(
    engine: Any, recipe: Recipe, layout: Layout, seed: int, step: int, run: Run
) -> None:
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


def schedule(optimizer: Optimizer) -> LRScheduler:
    return ExponentialLR(optimizer, gamma=0.7)


# ---------------------------------------------------------------------------------------------- plain torch


@functools.cache
def reference(recipe: Recipe, seed: int, pieces: int = 1) -> Run:
    """The same run in plain torch. ``pieces``: forward the global batch in this many parts instead of at once,
    which only matters where each part's gradient is rounded to 16 bits."""
    if recipe.low is not None:
        return low_precision_reference(recipe, seed, pieces)
    model = recipe.model(seed)
    optimizer = recipe.over(model)
    scheduler = schedule(optimizer) if recipe.schedule else None
    run = Run()
    for step in range(recipe.steps):
        into = run if step >= recipe.warm_steps else Run()
        into.rates.append([group["lr"] for group in optimizer.param_groups])
        plain_step(recipe, model, optimizer, seed, step, into)
        if scheduler is not None:
            scheduler.step()
    run.state = {name: value.double() for name, value in model.state_dict().items()}
    return run


def plain_step(
    recipe: Recipe, model: nn.Module, optimizer: Optimizer, seed: int, step: int, run: Run
) -> None:
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


def low_precision_reference(recipe: Recipe, seed: int, pieces: int) -> Run:
    """Mixed precision by hand: fp32 master weights, a low-precision copy for forward and backward, the gradients of
    the parts summed in fp32, the loss scale by the rule of the reference (hysteresis 1)."""
    assert recipe.low is not None
    master = recipe.model(seed)
    model = copy.deepcopy(master).to(recipe.low)
    optimizer = recipe.over(master)
    rule = {"hysteresis": 1, "loss_scale_window": 1000, **dict(recipe.scale_rule)}
    scale, clean = 2.0**recipe.scale_power, 0
    run = Run()
    for step in range(recipe.steps):
        tokens, targets = batch(seed, step)
        for into in master.parameters():
            into.grad = torch.zeros_like(into)
        losses = []
        for mine, wanted in zip(tokens.chunk(pieces), targets.chunk(pieces), strict=True):
            loss = model(mine, wanted)
            losses.append(loss.item())
            (loss * (scale / pieces)).backward()
            for into, param in zip(master.parameters(), model.parameters(), strict=True):
                assert into.grad is not None and param.grad is not None
                into.grad += param.grad.float() / scale
                param.grad = None
        run.losses.append(sum(losses) / pieces)
        run.scales.append(scale)
        if step in recipe.overflows:
            run.norms.append(float("nan"))
            run.clipped.append(float("nan"))
            run.skipped += 1
            scale, clean = scale / 2, 0
            continue
        finish_step(recipe, list(master.parameters()), optimizer, run)
        if clean and clean % rule["loss_scale_window"] == 0:
            scale *= 2
        clean += 1
        with torch.no_grad():
            for source, param in zip(master.parameters(), model.parameters(), strict=True):
                param.copy_(source)
    run.state = {name: value.double() for name, value in model.state_dict().items()}
    return run


# ---------------------------------------------------------------------------------------------- comparison


def differences(
    runs: list[Run], expected: Run, rtol: float, *, state_rtol: float | None = None, norm_rtol: float | None = None
) -> list[str]:
    """One sentence for each thing in which the ranks' runs differ from the expected one, or from each other."""
    found = []
    losses = [sum(shares) for shares in zip(*(r.losses for r in runs), strict=True)]
    first = runs[0]
    for name, got, want, limit in (
        ("loss", losses, expected.losses, rtol),
        ("norm before clip", first.norms, expected.norms, norm_rtol or rtol),
        ("norm after clip", first.clipped, expected.clipped, norm_rtol or rtol),
    ):
        found += list(_series(name, got, want, limit))
    for rank, run in enumerate(runs[1:], 1):
        for name in ("norms", "clipped", "rates", "scales", "skipped", "prints"):
            # Compared as text, so that a NaN equals a NaN.
            if repr(getattr(run, name)) != repr(getattr(first, name)):
                found.append(f"{name} of rank {rank} differ from those of rank 0")
    if first.state.keys() != expected.state.keys():
        found.append(f"state_dict has {sorted(first.state.keys() ^ expected.state.keys())} too many or too few")
        return found
    for name, want in expected.state.items():
        worst = float((first.state[name] - want).abs().max() / want.abs().max().clamp(min=1e-300))
        if not worst <= (state_rtol or rtol):
            found.append(f"final {name}: off by {worst:.2e} of its largest value")
    return found


def _series(name: str, got: list[float], want: list[float], limit: float) -> Iterator[str]:
    if len(got) != len(want):
        yield f"{name}: {len(got)} steps instead of {len(want)}"
        return
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        if b != b:  # a skipped step has no norm to compare
            continue
        if not abs(a - b) <= limit * abs(b):
            yield f"{name} of step {step}: {a!r} instead of {b!r} (relative {abs(a - b) / abs(b):.2e} > {limit:g})"
            return  # what follows an error is its consequence


def check(
    pools: Any,
    world_size: int,
    cases: list[tuple[Recipe, Layout]],
    rtol: float | Callable[[Recipe], float],
    *,
    pieces: Callable[[Layout], int] = lambda layout: 1,
    state_rtol: float | None = None,
    norm_rtol: float | None = None,
    timeout: float = 90.0,
) -> list[list[Run]]:
    """Run the cases on ``world_size`` ranks in one go and fail with everything that differs from plain torch.

    Returns each case's runs by rank, for further checks.
    """
    __tracebackhide__ = True
    seed = fresh_seed()
    by_rank = pools(world_size).run(train, cases, seed, timeout=timeout)
    problems, all_runs = [], []
    for i, (recipe, layout) in enumerate(cases):
        runs = [runs_of_rank[i] for runs_of_rank in by_rank]
        all_runs.append(runs)
        expected = reference(recipe, seed, pieces(layout))
        limit = rtol(recipe) if callable(rtol) else rtol
        found = differences(runs, expected, limit, state_rtol=state_rtol, norm_rtol=norm_rtol)
        problems += [f"{layout}\n  {recipe}\n    " + "\n    ".join(found)] if found else []
    assert not problems, f"EQUIVALENCE_SEED={seed}, {world_size} ranks:\n" + "\n".join(problems)
    return all_runs
