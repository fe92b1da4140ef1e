"""Stage 3 around a user's forward: checkpoints, evaluation, branches, compiled blocks, what a released parameter is."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import CommError, Engine
from tests.ranks import RankError, RankPools
from tests.sharding.harness import STAGES, WIDTH, At, Case, built, check, mean_square, plain, same, start
from tests.sharding.models import Block, Stack, Tokens, token_loss

STAGE_3 = ["3", "3s"]


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in the backward pass.

    Args:
        how: around each block from outside; as Hugging Face does it (``block.__call__``); around two blocks at once;
            inside each block; nested, around a module that is used twice.
        reentrant: which of torch's two implementations.
    """

    def __init__(self, how: str, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        kind = functools.partial(InnerCheckpoint, reentrant) if how in ("inside", "nested") else Block
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        self.shared = Block()
        self.last = nn.Linear(WIDTH, 2)
        self.how = how
        self.run = functools.partial(checkpoint, use_reentrant=reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.how == "pairs":
            for i in (0, 2):
                x = self.run(self.pair, x, i)
        elif self.how == "nested":
            for block in self.blocks:
                x = self.run(self.block_and_shared, block, x)
        else:
            for block in self.blocks:
                if self.how == "outside":
                    x = self.run(block, x)
                elif self.how == "transformers":
                    x = self.run(block.__call__, x)
                else:
                    x = block(x)
        return self.last(x)

    def pair(self, x: torch.Tensor, i: int) -> torch.Tensor:
        x = self.blocks[i + 1](self.blocks[i](x))
        return x

    def block_and_shared(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.shared(block(x))


class InnerCheckpoint(Block):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.run = functools.partial(checkpoint, use_reentrant=reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(super().forward, x)


HOW = ["outside", "transformers", "pairs", "inside", "nested"]
CHECKPOINTS = {
    f"{how}, {'re-entrant' if reentrant else 'not'}": Case(
        functools.partial(Checkpointed, how, reentrant), gas=2 if how == "nested" else 1, steps=3
    )
    for how in HOW
    for reentrant in (True, False)
}


def freeze_first(model: nn.Module, step: int) -> None:
    model.get_submodule("blocks.0").requires_grad_(False)


CHECKPOINTS["a frozen block, re-entrant"] = Case(
    functools.partial(Checkpointed, "outside", True), before=freeze_first, steps=3
)
CHECKPOINTS["a frozen block, not"] = Case(
    functools.partial(Checkpointed, "outside", False), before=freeze_first, steps=3
)


def train_checkpointed(name: str, stage: str) -> None:
    check(CHECKPOINTS[name], stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_activation_checkpointing(ranks: RankPools, name: str, stage: str) -> None:
    ranks(2).run(train_checkpointed, name, stage)


# ---------------------------------------------------------------- gradients of gradients


def penalty(model: nn.Module, at: At) -> torch.Tensor:
    x = at.x.requires_grad_()
    out = model(x).square().mean()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    return out + grad.square().sum()


class PenaltyInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return penalty_of(self.net, x)


def penalty_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    out = net(x).square().mean()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    return out + grad.square().sum()


def scalar_out(model: nn.Module, at: At) -> torch.Tensor:
    out: torch.Tensor = model(at.x)
    return out


PENALTIES = {"outside": Case(Stack, penalty, steps=3), "inside": Case(PenaltyInside, scalar_out, steps=3)}


def train_penalty(name: str, stage: str) -> None:
    check(PENALTIES[name], stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", PENALTIES)
def test_gradient_penalty(ranks: RankPools, name: str, stage: str) -> None:
    ranks(2).run(train_penalty, name, stage)


# ---------------------------------------------------------------- generation and branches


def generate(stage: str) -> None:
    case = Case(lambda: Tokens("module"), token_loss, steps=2)
    expected = plain(case, 2)
    reference = built(case.build)
    engine = start(built(case.build), stage)
    rank = dist.get_rank()
    try:
        for step in range(2):
            prompt = torch.tensor([[1, 2 + rank]])
            found = engine.generate(prompt, length=4 + 3 * rank)
            reference.load_state_dict(engine.module_state_dict())
            assert torch.equal(found, reference.generate(prompt, length=4 + 3 * rank))  # type: ignore[operator]
            if stage in STAGE_3:
                assert engine.module.blocks[0].up.weight.isnan().all(), "released again"
            loss = token_loss(engine, At(step, 0, rank))
            same(loss.item(), expected.losses[step][0][rank], "loss after generate")
            engine.backward(loss)
            engine.step()
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_generate_with_lengths_of_each_rank(ranks: RankPools, stage: str) -> None:
    ranks(2).run(generate, stage)


def generate_past_the_engine() -> None:
    engine = start(built(lambda: Tokens("module")), "3", communication_timeout=3)
    engine.module.generate(torch.tensor([[1]]), length=3 + 3 * dist.get_rank())
    engine.mesh.world.barrier("end")


def test_lengths_that_differ_past_the_engine_name_the_ranks(ranks: RankPools) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(generate_past_the_engine, fresh=True, timeout=30, grace=20)
    raised = caught.value.exceptions
    assert isinstance(raised[1], CommError), caught.value
    assert "rank 1 waited 3 s in `all_gather" in str(raised[1]) and "ank 0" in str(raised[1])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.last(self.b(x) if which else self.a(x))


def diverge() -> None:
    engine = start(built(Experts), "3", communication_timeout=3)
    for step in range(3):
        out = engine(At(step, 0, 0).x, dist.get_rank() if step == 2 else 0)
        engine.backward(out.square().mean())
        engine.step()


def test_different_branches_name_units_and_ranks(ranks: RankPools) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(diverge, fresh=True, timeout=30, grace=20)
    first, second = (caught.value.exceptions[rank] for rank in range(2))
    assert isinstance(first, CommError) and isinstance(second, CommError), caught.value
    # Rank 1 had started to fetch `a`, as in the steps before; what it waits for is `b`, which only it wants.
    assert "rank 1 waited 3 s in `all_gather b.weight" in str(second) and "Rank 0 waits in `" in str(second)
    # Rank 0 gives up at about the same moment: by its own timeout, or because rank 1 closed the connection first.
    assert "rank 0 wa" in str(first) and "ank 1" in str(first) and "`all_gather b.weight" in str(first)


def choose_by_rank(model: nn.Module, at: At) -> torch.Tensor:
    out: torch.Tensor = model(at.x, (at.rank + at.step) % 2)
    return out.square().mean()


BRANCHES = {
    "small parameters rest whole": Case(Experts, choose_by_rank, zero={"stage3_param_persistence_threshold": 100}),
    "a leaf module is one unit": Case(Experts, choose_by_rank, zero={"leaf_module": {"classes": ["Experts"]}}),
}


def train_branches(name: str) -> None:
    check(BRANCHES[name], "3")


@pytest.mark.parametrize("name", BRANCHES)
def test_what_makes_branches_right(ranks: RankPools, name: str) -> None:
    ranks(2).run(train_branches, name)


# ---------------------------------------------------------------- released parameters


def look_at_released(stage: str) -> None:
    model = built(Stack)
    shapes = {n: (p.shape, p.dtype, p.numel(), p.stride()) for n, p in model.named_parameters()}
    engine = start(model, stage)
    rests = 30 if stage == "3s" else -1
    try:
        for step in range(3):
            for name, param in model.named_parameters():
                assert (param.shape, param.dtype, param.numel()) == shapes[name][:3]
                assert param.is_leaf and param.requires_grad and param.grad is None
                if param.numel() <= rests:
                    assert not param.isnan().any()
                    continue
                assert param.isnan().all(), name
                with pytest.raises(RuntimeError), torch.no_grad():
                    param.mul_(2)
                with pytest.raises(RuntimeError), torch.no_grad():
                    param.copy_(torch.zeros_like(param))
            engine.backward(mean_square(engine, At(step, 0, 0)))
            engine.step()
        assert engine._sharded.gatherer.live_numel == 0
    finally:
        engine.destroy()


def fill_released() -> None:
    model = built(Stack)
    engine = start(model, "3")
    try:
        with pytest.raises(RuntimeError):
            nn.init.zeros_(model.first.weight)  # would be lost
            engine(At(0, 0, 0).x)
    finally:
        engine.destroy()


def test_filling_a_released_parameter_raises(ranks: RankPools) -> None:
    ranks(2).run(fill_released)


@pytest.mark.parametrize("stage", STAGE_3)
def test_a_released_parameter(ranks: RankPools, stage: str) -> None:
    ranks(2).run(look_at_released, stage)


# ---------------------------------------------------------------- compiled blocks


def compiled_stack() -> nn.Module:
    torch._dynamo.reset()
    model = Stack(2)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="aot_eager")
    return model


def train_compiled(stage: str) -> None:
    check(Case(compiled_stack, steps=3), stage)


@pytest.mark.parametrize("stage", ["1", "3"])
def test_compiled_blocks(ranks: RankPools, stage: str) -> None:
    ranks(2).run(train_compiled, stage, timeout=110)


# ---------------------------------------------------------------- two engines


class Alternating:
    """Two models trained in turn, one through the other, by engines or by plain torch."""

    def __init__(self, stage: str | None) -> None:
        self.models: list[Any] = [built(Stack), built(lambda: nn.Sequential(nn.Linear(3, WIDTH), Block(), Block()))]
        self.stage = stage
        self.engines: list[Engine] = []
        if stage is not None:
            self.engines = [start(m, stage) for m in self.models]
        self.runs = self.engines or self.models


def gan(stage: str) -> None:
    ours, theirs = Alternating(stage), Alternating(None)
    make, judge = ours.engines
    plain_make, plain_judge = theirs.models
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in theirs.models]
    rank = dist.get_rank()
    try:
        for step in range(3):
            # The judge on what was made, without a gradient for the maker.
            loss = judge(make(At(step, 0, rank).x).detach()).square().mean()
            judge.backward(loss)
            judge.step()
            losses = [plain_judge(plain_make(At(step, 0, r).x).detach()).square().mean() for r in (0, 1)]
            same(loss.item(), losses[rank].item(), "judge's loss")
            torch.stack(losses).mean().backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            # The maker through the judge, whose own gradients are dropped.
            loss = (judge(make(At(step, 1, rank).x)) - 1).square().mean()
            make.backward(loss)
            make.step()
            judge.zero_grad()
            losses = [(plain_judge(plain_make(At(step, 1, r).x)) - 1).square().mean() for r in (0, 1)]
            same(loss.item(), losses[rank].item(), "maker's loss")
            torch.stack(losses).mean().backward()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        for engine, model in zip(ours.engines, theirs.models, strict=True):
            found = engine.module_state_dict()
            for name, value in model.state_dict().items():
                torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)
    finally:
        for engine in ours.engines:
            engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_two_engines_one_through_the_other(ranks: RankPools, stage: str) -> None:
    ranks(2).run(gan, stage)
