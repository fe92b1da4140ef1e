"""Twenty configurations as people write them, each loaded, explained and trained for two steps on two ranks."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.config import Config
from shardwise.config.explain import explain
from tests.config.configs import AUTO, FOLDER, NAMES, STYLE_NAMES, STYLES
from tests.ranks import RankPools

PATHS = [*(FOLDER / f"{n}.json" for n in NAMES), *(STYLES / f"{n}.json" for n in STYLE_NAMES)]
# What these configurations are warned of, each once.
EXPECTED = ("is the old name of", "is read as", "torch_adam", "has no betas", "overrides", "warmup", "no multiple of 8")


class Attention(nn.Module):
    """As in a hundred tutorials: a softmax written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ self.k(x).transpose(-2, -1) / math.sqrt(x.shape[-1])
        return self.drop(scores.softmax(dim=-1)) @ self.v(x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """A language model of width 16."""

    def __init__(self, vocabulary: int = 40, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.roll(-1, 1).flatten())


def test_there_are_twenty() -> None:
    assert len(PATHS) == 20


def _ready(path: str, world_size: int) -> dict[str, Any]:
    """The configuration with "auto" filled and, so that two steps are quick, its batch cut down."""
    config = Config.load(path, world_size=world_size, auto=AUTO)
    ready = config.as_dict()
    ready["train_micro_batch_size_per_gpu"] = 1
    ready["gradient_accumulation_steps"] = gas = min(config.gradient_accumulation_steps, 2)
    ready["train_batch_size"] = gas * world_size
    return ready


@contextmanager
def inside(folder: str) -> Iterator[None]:
    """Some of them name folders beside the script."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def train(path: str, folder: str) -> dict[str, Any]:
    with inside(folder), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        config = _ready(path, 2)
        torch.manual_seed(0)
        optimizer = None if config["optimizer"] else (lambda params: torch.optim.AdamW(params, lr=1e-3))
        engine, *_ = shardwise.initialize(model=Model(), config=config, optimizer=optimizer)
        try:
            losses = []
            for step in range(2):
                for micro in range(engine.gradient_accumulation_steps()):
                    g = torch.Generator().manual_seed(10 * step + micro + 100 * engine.global_rank)
                    loss = engine(torch.randint(40, (1, 8), generator=g))
                    by_tokens = engine.config.gradient_normalization == "tokens"
                    engine.backward(loss, tokens=8 if by_tokens else None)
                    engine.step()
                    losses.append(loss.item())
            return {
                "losses": losses,
                "steps": engine.global_steps,
                "skipped": engine.skipped_steps,
                "norm": engine.get_global_grad_norm(),
                "stage": engine.zero_optimization_stage(),
                "fp16": engine.config.fp16.enabled,
                "warnings": [str(w.message) for w in caught if f"{os.sep}torch{os.sep}" not in w.filename],
            }
        finally:
            engine.destroy()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:zero_optimization:UserWarning", "ignore:.*is the old name of:UserWarning")
def test_a_real_config_loads_is_explained_and_trains(path: Path, ranks: RankPools, tmp_path: Path) -> None:
    config = Config.load(path, world_size=2, auto=AUTO)
    rows = {row.key: row for row in explain(config)}
    for key in config.written:
        key = key.split("[")[0]
        if key in rows:  # not the inside of a section that takes anything while it is off
            assert rows[key].state in ("honoured", "no effect") and rows[key].line, key
    for run in ranks(2).run(train, str(path), str(tmp_path)):
        assert run["steps"] == 2
        assert all(math.isfinite(loss) and loss < 2 * math.log(40) for loss in run["losses"])
        # The first steps of a dynamic scale may overflow; nothing else may.
        assert run["fp16"] or (run["skipped"] == 0 and run["norm"] > 0)
        assert all(any(text in told for text in EXPECTED) for told in run["warnings"]), run["warnings"]
