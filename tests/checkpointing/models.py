"""Models with dropout and blocks of every calling style, and what they keep for the backward pass."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import shardwise
from shardwise import Engine

WIDTH, ROWS, LENGTH, BLOCKS = 8, 2, 5, 4


class Block(nn.Module):
    """Called with a tensor, a table in a tuple, and a mask by keyword; drops; returns a tuple."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, tables: Any, *, mask: torch.Tensor | None = None) -> tuple[Any, ...]:
        hidden = torch.tanh(self.up(self.norm(x) + tables[0])) * tables[1]["scale"]
        if mask is not None:
            hidden = hidden * mask
        out = x + self.drop(self.down(hidden))
        return out, {"norm": out.square().mean()}


class Model(nn.Module):
    def __init__(self, blocks: int = BLOCKS, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = (torch.ones(x.shape[-1], dtype=x.dtype) * 0.1, {"scale": torch.full((), 1.5, dtype=x.dtype)})
        mask = (torch.arange(x.shape[1]) < x.shape[1] - 1)[:, None].to(x.dtype)
        x, extra = self.first(x), torch.zeros((), dtype=x.dtype)
        for layer in self.layers:
            x, more = layer(x, tables, mask=mask)
            extra = extra + more["norm"]
        return self.last(x).square().mean() + 0.01 * extra


class NeverCalled(Model):
    """Uses its blocks' parts, not the blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer.down(torch.tanh(layer.up(x)))
        return x.square().mean()


def start(model: nn.Module, stage: int = 0, **keys: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "communication_timeout": 20,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **keys,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def made(kind: Any = Model, *args: Any) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = kind(*args)
    return model.train()


def counted(model: nn.Module) -> nn.Module:
    """The model, whose ``runs`` count how often the inside of each block ran."""
    runs = model.__dict__["runs"] = [0] * len(model.layers)
    for i, layer in enumerate(model.layers):
        layer.norm.register_forward_pre_hook(lambda m, args, i=i: runs.__setitem__(i, runs[i] + 1))
    return model


def batch(step: int, rank: int = 0, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(ROWS, length, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def train(engine: Engine, steps: int = 3) -> list[tuple[float, float | None]]:
    """Loss and gradient norm of each step; every step draws its own dropout."""
    seen = []
    for step in range(steps):
        torch.manual_seed(1000 * step + engine.global_rank)
        loss = engine(batch(step, engine.global_rank))
        engine.backward(loss)
        engine.step()
        seen.append((loss.item(), engine.get_global_grad_norm()))
    return seen


class Kept:
    """Counts the bytes of the tensors that a forward saves for the backward pass, parameters left out.

    A storage counts once. Exact: autograd hands every tensor that it saves to these hooks, except inside a checkpoint,
    which saves none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __enter__(self) -> Kept:
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._note, lambda t: t)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self.storages[storage.data_ptr()] = storage
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes() for s in self.storages.values())


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __str__(self) -> str:
        return "\n".join(self.lines)


@contextmanager
def said() -> Iterator[Lines]:
    """What shardwise says inside the context."""
    lines, logger = Lines(), logging.getLogger("shardwise")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    try:
        yield lines
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)
