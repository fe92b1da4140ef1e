"""Tiny models, and counters of the bytes that their parameters take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn
from torch.nn.modules.module import register_module_forward_hook


class Block(nn.Module):
    """A residual block with a saved buffer and one that is not saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("shift", torch.arange(float(width)))
        self.register_buffer("scale", torch.full((width,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale + self.shift


class Tied(nn.Module):
    """Embedding, blocks, a parameter on the root, and a head tied to the embedding."""

    def __init__(self, width: int = 8, vocabulary: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((width,), 1.5))
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.gain
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tied(**kwargs: Any) -> Tied:
    torch.manual_seed(0)
    return Tied(**kwargs).eval()


IDS = torch.tensor([3, 1, 4, 1, 5])


def saved(model: nn.Module, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, str(folder / "model.safetensors"))
    return folder


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the distinct parameters that have values now."""
    return sum({id(p): p.nbytes for p in model.parameters() if not p.is_meta}.values())


@contextmanager
def peak_bytes(model: nn.Module) -> Iterator[list[int]]:
    """Parameter bytes after each module's forward, before its own hooks let its weights go."""
    seen: list[int] = []
    handle = register_module_forward_hook(lambda *_: seen.append(parameter_bytes(model)))
    try:
        yield seen
    finally:
        handle.remove()


def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(*args, **kwargs)
