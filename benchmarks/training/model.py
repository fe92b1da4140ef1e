"""The model and the data that every contender trains on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .spec import Workload


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [batch, time, width] to the same."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A plain GPT that returns its loss."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(w.vocab, w.width), nn.Embedding(w.length, w.width)
        self.blocks = nn.ModuleList(Block(w.width, w.heads) for _ in range(w.layers))
        self.norm = nn.LayerNorm(w.width)
        self.head = nn.Linear(w.width, w.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Tokens and targets [batch, time] to the mean cross-entropy."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Data:
    """Random tokens, new in every step, that the model learns to repeat: its loss falls from the first step on.

    So a contender that steps late, twice or not at all is seen in the losses.
    """

    def __init__(self, w: Workload, rank: int) -> None:
        self._w = w
        self._generator = torch.Generator().manual_seed(1000 + rank)

    def next(self) -> tuple[Tensor, Tensor]:
        """The rank's next batch."""
        tokens = torch.randint(0, self._w.vocab, (self._w.batch, self._w.length), generator=self._generator)
        return tokens, tokens
