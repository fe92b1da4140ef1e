"""The model that every layout trains, and its batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

# Samples of a step over all ranks: cut evenly by 1 to 4 ranks and 1, 2 or 4 micro-steps (four ranks: 1 or 2).
GLOBAL_BATCH = 24
LENGTH = 5
VOCABULARY = 37
WIDTH = 20
IGNORED = -100
# A row that is almost constant is divided by almost zero, and its rounding with it: seen once in 120 draws in float32,
# where a gradient norm moved by 6e-6 and not by 2e-7. With this the smallest divisor is 0.1.
NORM_EPS = 0.01


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
        self.norm1, self.attention = nn.LayerNorm(width, NORM_EPS), Attention(width)
        self.norm2 = nn.LayerNorm(width, NORM_EPS)
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
        self.norm = nn.LayerNorm(width, NORM_EPS)
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)) * self.temperature
        wide = logits.float() if logits.dtype.itemsize == 2 else logits
        total = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
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
