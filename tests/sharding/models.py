"""Small models with the shapes that break sharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tests.sharding.harness import WIDTH


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between two layers; ``order`` says which block runs when."""

    def __init__(self, blocks: int = 3, order: Sequence[int] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 3)
        self.order = list(order if order is not None else range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for i in self.order:
            x = self.blocks[i](x)
        return self.last(x)


class Tokens(nn.Module):
    """A language model in small: embedding, blocks, a head that may share the embedding's weight."""

    def __init__(self, tied: str = "no", vocabulary: int = 11) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocabulary, WIDTH)
        self.pos = nn.Parameter(torch.randn(6, WIDTH) * 0.1)  # owned by the root itself
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.tied = tied
        if tied != "functional":
            self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied == "module":
            self.head.weight = self.tok.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids) + self.pos[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        if self.tied == "functional":
            return nn.functional.linear(x, self.tok.weight)
        out: torch.Tensor = self.head(x)
        return out

    def generate(self, ids: torch.Tensor, length: int) -> torch.Tensor:
        """Append the likeliest token until there are ``length``."""
        with torch.no_grad():
            while ids.shape[1] < length:
                ids = torch.cat([ids, self(ids[:, -6:])[:, -1:].argmax(-1)], dim=1)
        return ids


def token_loss(model: Any, at: Any) -> torch.Tensor:
    """Cross-entropy of the next token on made-up text."""
    ids = (at.draw(2, 7).abs() * 10).long() % 11
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
