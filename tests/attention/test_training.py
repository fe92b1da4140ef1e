"""Training with switched attention on two ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise
from shardwise.attention import switch_attention
from shardwise.attention.switch import PLAIN
from tests.attention.models import KINDS, NanoGPT, Paired, Section, batch, built
from tests.attention.tools import LIMIT, replaced

RANKS = 2


def train(kinds: list[str], stages: list[int], ways: list[bool | None]) -> None:
    """Three steps with two ranks against plain torch without the switch on the whole batch."""
    rank = torch.distributed.get_rank()
    for kind in kinds:
        reference = built(kind).double()
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            loss = sum(reference(batch(10 * step + r).double()) for r in range(RANKS)) / RANKS
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[2] != losses[0]
        for stage in stages:
            for way in ways:
                check_training(built(kind, checkpointed=way).double(), stage, rank, losses, reference, kind)


def check_training(model, stage, rank, losses, reference, kind):
    switched = switch_attention(model, Section(), main=False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "communication_timeout": 60,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=config)
    try:
        limit = LIMIT.get(kind, 1e-10)
        for step, wanted in enumerate(losses):
            loss = engine(batch(10 * step + rank).double())
            engine.backward(loss)
            engine.step()
            both = loss.detach().clone()
            torch.distributed.all_reduce(both)
            assert float(both) / RANKS == pytest.approx(wanted, rel=limit), (kind, stage)
        for name, value in engine.module_state_dict().items():
            torch.testing.assert_close(value, reference.state_dict()[name], rtol=limit, atol=limit)
    finally:
        engine.destroy()
        switched.undo()
    assert not replaced(model)


def test_training_on_ranks_is_that_of_the_original(ranks):
    ranks(RANKS).run(train, list(KINDS), [0, 3], [None])


def test_training_with_activation_checkpointing(ranks):
    ranks(RANKS).run(train, ["native", "mha", "nanogpt", "built"], [0, 3], [True, False])


def first_forward_on_ranks() -> None:
    """A module that is checked in the first forward, its projection gathered for it alone; and a model under Init."""
    torch.manual_seed(3)
    with shardwise.zero.Init():
        model = nn.ModuleDict({"pair": Paired(), "plain": NanoGPT()})
    switched = switch_attention(model, Section(), main=False)
    assert len(switched.modules[PLAIN]) == 2 and any("1 modules give what" in line for line in switched.lines)
    torch.manual_seed(3)
    same_model = nn.ModuleDict({"pair": Paired(), "plain": NanoGPT()})

    class Both(nn.Module):
        def __init__(self, parts: nn.ModuleDict) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x):
            return self.parts["plain"](self.parts["pair"]({"x": x, "scale": 0.5})).square().mean()

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = shardwise.initialize(model=Both(model), config=config)
    try:
        for _ in range(2):
            loss = engine(batch())
            wanted = Both(same_model)(batch())
            assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
            same_model.zero_grad()
            wanted.backward()
            with torch.no_grad():
                for p in same_model.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
            engine.backward(loss)
            engine.step()
    finally:
        engine.destroy()
        switched.undo()


def test_a_sharded_model_is_checked_too(ranks):
    ranks(RANKS).run(first_forward_on_ranks)
