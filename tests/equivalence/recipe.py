"""What is trained (:class:`Recipe`), how shardwise cuts it (:class:`Layout`), and what came of it (:class:`Run`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tests.equivalence.model import GLOBAL_BATCH, TinyGPT

Frozen = tuple[tuple[str, Any], ...]


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
