"""Windows, unused parameters and failed backward passes: what is reduced when, and what is dropped."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import CommError, Engine, ShardingError
from tests.ranks import RankError, RankPools
from tests.sharding.harness import (
    STAGES,
    WIDTH,
    At,
    Case,
    adamw,
    built,
    check,
    copied,
    mean_square,
    momentum,
    norm_of,
    rank_and_size,
    same,
    same_state,
    start,
)
from tests.sharding.models import Block, Stack

# ---------------------------------------------------------------- unused parameters


class Branching(nn.Module):
    """Parts that only some ranks, or nobody, uses."""

    def __init__(self, blocks: int = 2, never: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(BranchingBlock(never) for _ in range(blocks))
        self.some = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, inner: bool, outer: bool) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, inner)
        if outer:
            x = x + self.some(x)
        return self.last(x)


class BranchingBlock(Block):
    def __init__(self, never: bool = True) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)
        if never:
            self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, inner: bool = False) -> torch.Tensor:
        x = super().forward(x)
        return self.extra(x) if inner else x


def inner_on_rank_1(model: nn.Module, at: At) -> torch.Tensor:
    out: torch.Tensor = model(at.x, at.rank == 1, False)
    return out.square().mean()


def inner_in_turn(model: nn.Module, at: At) -> torch.Tensor:
    out: torch.Tensor = model(at.x, (at.step + at.micro) % 2 == at.rank, False)
    return out.square().mean()


def outer_on_rank_1(model: nn.Module, at: At) -> torch.Tensor:
    out: torch.Tensor = model(at.x, False, at.rank == 1)
    return out.square().mean()


def outer_in_turn(model: nn.Module, at: At) -> torch.Tensor:
    out: torch.Tensor = model(at.x, False, (at.step + at.micro) % 2 == at.rank)
    return out.square().mean()


def unused_on_odd_steps(model: nn.Module, at: At) -> torch.Tensor:
    used = at.step % 2 == 0
    out: torch.Tensor = model(at.x, used, used)
    return out.square().mean()


def detached_on_rank_0(model: nn.Module, at: At) -> torch.Tensor:
    """The module runs on both ranks, but its output does not reach the loss on rank 0."""
    out: torch.Tensor = model(at.x, True, False)
    extra = model.get_submodule("module.some" if isinstance(model, Engine) else "some")(at.x)
    return out.square().mean() + (extra.detach() if at.rank == 0 else extra).square().mean()


# A whole module that only one rank runs is not gathered when it rests whole.
RESTS = {"stage3_param_persistence_threshold": 100_000}
UNUSED = {
    "inside a block, rank 1": Case(Branching, inner_on_rank_1),
    "inside a block, in turn": Case(Branching, inner_in_turn, gas=2),
    "inside each of many blocks": Case(lambda: Branching(6, never=False), inner_in_turn),
    "inside each of many blocks, nothing fetched early": Case(
        lambda: Branching(6, never=False), inner_in_turn, zero={"stage3_prefetch_bucket_size": 0}
    ),
    "a module, rank 1": Case(Branching, outer_on_rank_1, zero=RESTS),
    "a module, in turn": Case(Branching, outer_in_turn, zero=RESTS, gas=2, optimizer=momentum),
    "on odd steps, AdamW": Case(Branching, unused_on_odd_steps, steps=5),
    "on odd steps, SGD": Case(Branching, unused_on_odd_steps, steps=5, optimizer=momentum),
    "not in the loss of rank 0": Case(Branching, detached_on_rank_0, zero=RESTS),
    "gradients left in place": Case(Branching, inner_in_turn, gas=2, zero={"contiguous_gradients": False}),
}


def train(name: str, stage: str) -> None:
    check(UNUSED[name], stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", UNUSED)
def test_unused_parameters(ranks: RankPools, name: str, stage: str) -> None:
    ranks(2).run(train, name, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_unused_parameters_on_three_ranks(ranks: RankPools, stage: str) -> None:
    ranks(3).run(train, "inside a block, in turn", stage)


# ---------------------------------------------------------------- windows made by hand


class Plain:
    """Plain torch with the engine's verbs: the mean over ranks is taken in ``backward``."""

    def __init__(self, optimizer: Any = adamw) -> None:
        self.model = built(Stack)
        self.optimizer = optimizer(self.model.parameters())
        self.rank, self.size = rank_and_size()
        self.norm = 0.0

    def losses(self, step: int, micro: int = 0) -> torch.Tensor:
        return torch.stack([mean_square(self.model, At(step, micro, rank)) for rank in range(self.size)])

    def backward(self, losses: torch.Tensor, weight: float = 1.0, retain_graph: bool = False) -> None:
        (losses.mean() * weight).backward(retain_graph=retain_graph)

    def step(self) -> None:
        self.norm = norm_of(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()


def pair(stage: str, **keys: Any) -> tuple[Engine, Plain]:
    return start(built(Stack), stage, **keys), Plain()


def loss_of(engine: Engine, step: int, micro: int = 0) -> torch.Tensor:
    return mean_square(engine, At(step, micro, rank_and_size()[0]))


def compare(engine: Engine, plain: Plain) -> None:
    same(engine.get_global_grad_norm() or 0.0, plain.norm, "gradient norm")
    same_state(engine.module_state_dict(), copied(plain.model))


def two_backwards(engine: Engine, plain: Plain, step: int) -> None:
    for micro in (0, 1):
        engine.backward(loss_of(engine, step, micro))
        plain.backward(plain.losses(step, micro))


def two_forwards_then_backwards(engine: Engine, plain: Plain, step: int) -> None:
    ours = [loss_of(engine, step, micro) for micro in (0, 1)]
    theirs = [plain.losses(step, micro) for micro in (0, 1)]
    for mine, other in zip(ours, theirs, strict=True):
        engine.backward(mine)
        plain.backward(other)


def same_graph_twice(engine: Engine, plain: Plain, step: int) -> None:
    mine, other = loss_of(engine, step), plain.losses(step)
    for retain in (True, False):
        engine.backward(mine, retain_graph=retain)
        plain.backward(other, retain_graph=retain)


def scaled_by_hand(engine: Engine, plain: Plain, step: int) -> None:
    engine.scale(loss_of(engine, step)).backward()
    plain.backward(plain.losses(step))


def forward_without_backward(engine: Engine, plain: Plain, step: int) -> None:
    loss_of(engine, step + 50)
    engine.backward(loss_of(engine, step))
    plain.backward(plain.losses(step))


def evaluated_between(engine: Engine, plain: Plain, step: int) -> None:
    engine.eval()
    for guard in (torch.no_grad(), torch.inference_mode()):
        with guard:
            same(loss_of(engine, step + 50).item(), plain.losses(step + 50)[plain.rank].item(), "loss in eval()")
    engine.train()
    mine = loss_of(engine, step)
    with torch.no_grad():  # also between a forward and its backward
        same(loss_of(engine, step + 60).item(), plain.losses(step + 60)[plain.rank].item(), "loss under no_grad")
    engine.backward(mine)
    plain.backward(plain.losses(step))


def dropped(engine: Engine, plain: Plain, step: int) -> None:
    engine.backward(loss_of(engine, step + 50))
    engine.zero_grad()
    engine.backward(loss_of(engine, step))
    plain.backward(plain.losses(step))


WINDOWS = {
    f.__name__: f
    for f in (
        two_backwards,
        two_forwards_then_backwards,
        same_graph_twice,
        scaled_by_hand,
        forward_without_backward,
        evaluated_between,
        dropped,
    )
}


def run_windows(name: str, stage: str) -> None:
    engine, plain = pair(stage)
    try:
        for step in range(3):
            WINDOWS[name](engine, plain, step)
            engine.step()
            plain.step()
            compare(engine, plain)
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(ranks: RankPools, name: str, stage: str) -> None:
    ranks(2).run(run_windows, name, stage)


def boundary_by_hand(stage: str) -> None:
    engine, plain = pair(stage)
    try:
        for window, after_backward in ((3, False), (1, False), (2, True), (2, False)):
            for micro in range(window):
                last = micro == window - 1
                engine.set_gradient_accumulation_boundary(last and not after_backward)
                engine.backward(loss_of(engine, window, micro))
                plain.backward(plain.losses(window, micro))
                engine.set_gradient_accumulation_boundary(last)
                before = engine.global_steps
                engine.step()
                assert engine.global_steps == before + last
            plain.step()
            compare(engine, plain)
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_boundary_by_hand(ranks: RankPools, stage: str) -> None:
    ranks(2).run(boundary_by_hand, stage)


def zero_grad_in_window(stage: str) -> None:
    engine, plain = pair(stage, gas=3)
    try:
        for step in range(2):
            for micro in range(3):
                engine.backward(loss_of(engine, step, micro))
                if micro == 1:
                    engine.zero_grad()
                engine.step()
            plain.backward(plain.losses(step, 2), 1 / 3)
            plain.step()
            compare(engine, plain)
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_in_the_window(ranks: RankPools, stage: str) -> None:
    ranks(2).run(zero_grad_in_window, stage)


def collect_only(stage: str) -> None:
    engine, plain = pair(stage, gas=2)
    try:
        if stage in ("2", "3", "3s"):
            with pytest.raises(ShardingError, match=f"no_sync: ZeRO stage {stage[0]}"), engine.no_sync():
                pass
            return
        for step in range(2):
            traffic = engine.mesh.shard.traffic
            sent = sum(t.bytes_sent for t in traffic.values())
            with engine.no_sync():
                engine.backward(loss_of(engine, step, 0))
                engine.step()
            assert sum(t.bytes_sent for t in traffic.values()) == sent
            engine.backward(loss_of(engine, step, 1))
            engine.step()
            for micro in range(2):
                plain.backward(plain.losses(step, micro), 0.5)
            plain.step()
            compare(engine, plain)
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_no_sync(ranks: RankPools, stage: str) -> None:
    ranks(2).run(collect_only, stage)


# ---------------------------------------------------------------- failed passes


class Planned(Exception):
    """Raised on purpose."""


def raise_planned(*_: Any) -> None:
    raise Planned


def failing(engine: Engine, where: str) -> None:
    """Run a forward and a backward that fail in the given place."""
    model = engine.module
    if where == "forward":
        hook = model.get_submodule("blocks.1.up").register_forward_hook(raise_planned)
    elif where == "output":
        hook = model.get_submodule("last").register_forward_hook(
            lambda m, a, out: out.register_hook(raise_planned) and None
        )
    else:
        hook = model.get_submodule(where).register_forward_hook(
            lambda m, a, out: out.register_hook(raise_planned) and None
        )
    try:
        with pytest.raises(Planned):
            engine.backward(loss_of(engine, 50))
    finally:
        hook.remove()


def recover(where: str, stage: str) -> None:
    engine, plain = pair(stage)
    try:
        for step in range(3):
            failing(engine, where)
            engine.backward(loss_of(engine, step))
            engine.step()
            plain.backward(plain.losses(step))
            plain.step()
            compare(engine, plain)
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("where", ["forward", "output", "blocks.1.up", "first"])
def test_an_exception_on_all_ranks_is_recovered_from(ranks: RankPools, where: str, stage: str) -> None:
    ranks(2).run(recover, where, stage)


def recover_by_hand(stage: str) -> None:
    engine, plain = pair(stage)
    hook = engine.module.blocks[1].up.register_forward_hook(lambda m, a, out: out.register_hook(raise_planned) and None)
    try:
        with pytest.raises(Planned):
            engine.scale(loss_of(engine, 50)).backward()
        hook.remove()
        for step in range(2):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                engine.scale(loss_of(engine, step)).backward()
            assert any("were dropped" in str(w.message) for w in said) == (step == 0)
            engine.step()
            plain.backward(plain.losses(step))
            plain.step()
            compare(engine, plain)
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_by_hand_that_failed_is_recovered_from(ranks: RankPools, stage: str) -> None:
    ranks(2).run(recover_by_hand, stage)


def fail_on_rank_1(where: str, stage: str) -> None:
    engine = start(built(Stack), stage, communication_timeout=2)
    for step in range(3):
        if step == 2 and dist.get_rank() == 1:
            failing(engine, where)
            raise Planned
        engine.backward(loss_of(engine, step))
        engine.step()


@pytest.mark.parametrize(("stage", "where"), [("0", "first"), ("2", "blocks.1.up"), ("3", "output"), ("3", "forward")])
def test_an_exception_on_one_rank_is_named_by_the_others(ranks: RankPools, stage: str, where: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(fail_on_rank_1, where, stage, fresh=True, timeout=30, grace=20)
    raised = caught.value.exceptions
    assert isinstance(raised[1], Planned), caught.value
    assert isinstance(raised[0], CommError), caught.value
    assert "rank 0 waited 2 s in" in str(raised[0]) and "ank 1" in str(raised[0])


def never_arrive(stage: str) -> float:
    import time

    engine = start(built(Stack), stage, communication_timeout=2)
    engine.backward(loss_of(engine, 0))
    engine.step()
    if dist.get_rank() == 1:
        time.sleep(6)
        raise Planned
    started = time.monotonic()
    try:
        engine.backward(loss_of(engine, 1))
        engine.step()
    finally:
        assert time.monotonic() - started < 5.9


@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_rank_that_never_arrives_is_named_with_the_unit(ranks: RankPools, stage: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(never_arrive, stage, fresh=True, timeout=30, grace=20)
    raised = caught.value.exceptions
    assert isinstance(raised[0], CommError), caught.value
    what = {"1": "reduce_scatter", "3": "all_gather"}[stage]
    assert f"rank 0 waited 2 s in `{what}" in str(raised[0]), raised[0]
    assert "weight" in str(raised[0]), "names the unit"
    assert "Did not arrive: rank 1" in str(raised[0])
