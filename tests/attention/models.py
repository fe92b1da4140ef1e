"""Small attention modules in the styles that people write, and models around them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, TOKENS = 16, 2, 12


@dataclass(frozen=True)
class Section:
    """``flashattention`` of a configuration."""

    enable: bool = True
    attention_dropout: bool | float | None = None
    cross_attention: bool = False


class NanoGPT(nn.Module):
    """Heads from one projection, a stored triangle, dropout as a module."""

    def __init__(self, dropout: float = 0.0, window: int | None = None) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.attn_dropout = nn.Dropout(dropout)
        self.n_head = HEADS
        triangle = torch.tril(torch.ones(32, 32))
        if window is not None:
            triangle = triangle.triu(1 - window)
        self.register_buffer("bias", triangle.view(1, 1, 32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Minimal(nn.Module):
    """Three linear layers, one head, no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        weights = torch.softmax(torch.matmul(q, k.transpose(1, 2)) / q.shape[-1] ** 0.5, dim=2)
        return torch.matmul(weights, v)


class Paired(NanoGPT):
    """Nobody guesses that it wants a dict."""

    def forward(self, pair):
        x, scale = pair["x"], pair["scale"]
        return torch.softmax(self.c_proj(x) @ x.transpose(-2, -1) * scale, -1) @ x


class Einsum(nn.Module):
    """The layout of heads in third place, an optional mask filled with a large number, einsum throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.keys, self.queries = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.fc_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor, keys: torch.Tensor, query: torch.Tensor, mask=None) -> torch.Tensor:
        N = query.shape[0]
        split = [t.reshape(N, t.shape[1], HEADS, WIDTH // HEADS) for t in (values, keys, query)]
        values, keys, queries = self.values(values), self.keys(keys), self.queries(query)
        values, keys, queries = (t.reshape(N, -1, HEADS, WIDTH // HEADS) for t in (values, keys, queries))
        energy = torch.einsum("nqhd,nkhd->nhqk", [queries, keys])
        if mask is not None:
            energy = energy.masked_fill(mask == 0, float("-1e20"))
        attention = torch.softmax(energy / (WIDTH ** (1 / 2)), dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", [attention, values]).reshape(N, split[2].shape[1], WIDTH)
        return self.fc_out(out)


class Built(nn.Module):
    """A head of a tutorial: asserts, a triangle built in the forward, dropout as a function, branches on lengths."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *_, T, C = x.shape
        assert C == WIDTH, "wrong width"
        q, k, v = (x @ w[0] for w in self.qkv.chunk(3))
        scores = q @ k.transpose(-2, -1) * C**-0.5
        if T > 1:
            hidden = torch.triu(torch.ones(T, T, device=x.device), diagonal=1).bool()
            scores = scores.masked_fill(hidden, -torch.inf)
        weights = F.dropout(scores.softmax(-1, dtype=torch.float32).type_as(x), self.dropout, self.training)
        return weights @ v


class Scaled(nn.Module):
    """No parameters: q, k, v and a mask come from outside; a learned bias is added by the caller's mask."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(0.0)

    def forward(self, q, k, v, mask=None):
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores + mask
        return torch.bmm(self.dropout(self.softmax(scores)), v)


class Biased(nn.Module):
    """A learned bias on the scores, and a learned temperature for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.position = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))
        self.temperature = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = self.position[:, :n, :n] + (q @ k.mT) * self.temperature
        return (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, WIDTH)


class Native(nn.Module):
    """Calls the function itself."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return y.transpose(1, 2).reshape(b, t, WIDTH)


class SelfMHA(nn.Module):
    """``nn.MultiheadAttention`` on itself."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


class Three(nn.Module):
    """Calls a module that takes values, keys and queries with one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Einsum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x, x, x, torch.ones(x.shape[1], x.shape[1]).tril())


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = attention
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(F.gelu(self.attn(self.norm(x))))


class Model(nn.Module):
    """Two blocks and a loss; each block can be checkpointed."""

    def __init__(self, attention: Callable[[], nn.Module], checkpointed: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(attention()) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            x = x.clone().requires_grad_()  # re-entrant checkpoints want a graph to begin with
        for block in self.blocks:
            if self.checkpointed is None:
                x = block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.checkpointed)
        return self.head(x).square().mean()


KINDS: dict[str, Callable[[], nn.Module]] = {
    "native": Native,
    "mha": SelfMHA,
    "nanogpt": NanoGPT,
    "minimal": Minimal,
    "einsum": Three,
    "built": Built,
    "biased": Biased,
}


def built(kind: str, seed: int = 3, checkpointed: bool | None = None) -> Model:
    torch.manual_seed(seed)
    return Model(KINDS[kind], checkpointed).train()


def batch(seed: int = 5, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
