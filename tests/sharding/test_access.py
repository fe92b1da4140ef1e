"""Reading and editing whole parameters from outside the step, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import ShardingError, zero
from tests.ranks import RankPools
from tests.sharding.harness import (
    STAGES,
    At,
    adamw,
    built,
    config,
    copied,
    mean_square,
    norm_of,
    same,
    same_state,
    start,
)
from tests.sharding.models import Stack


def read(stage: str) -> None:
    model = built(Stack)
    expected = copied(model)
    engine = start(model, stage)
    names = dict(model.named_parameters())
    releases = stage in ("3", "3s") and dist.is_initialized()
    try:
        chosen: list[Any] = [
            model.blocks[0].up.weight,
            [names["first.weight"], names["last.bias"]],
            model.blocks,
            list(model.named_parameters()),
            model.parameters(),
            [],
        ]
        for params in chosen:
            with zero.GatheredParameters(params):
                picked = {id(p) for p in (params.parameters() if isinstance(params, nn.Module) else names.values())}
                if isinstance(params, nn.Parameter):
                    picked = {id(params)}
                elif params == chosen[1]:
                    picked = {id(p) for p in params}
                elif params == []:
                    picked = set()
                for name, param in names.items():
                    if id(param) in picked:
                        assert torch.equal(param.data, expected[name]), name
        with zero.GatheredParameters(model.parameters()):
            with zero.GatheredParameters(model.blocks[0].parameters()):
                pass
            with zero.GatheredParameters(model.last.weight, modifier_rank=None), torch.no_grad():
                # The engine runs in between; nothing that is pinned is released by it.
                same(mean_square(engine, At(0, 0, 0)).item(), mean_square(built(Stack), At(0, 0, 0)).item(), "loss")
            for name, param in names.items():
                assert torch.equal(param.data, expected[name]), name
        if releases:
            assert names["blocks.0.up.weight"].isnan().all(), "released at the end"
        with zero.GatheredParameters(model.first.weight, enabled=False):
            assert not releases or model.first.weight.isnan().all()
        with pytest.raises(KeyError), zero.GatheredParameters(model.first.weight):
            raise KeyError("the user's own")
        if releases:
            assert names["first.weight"].isnan().all(), "released after an exception"
        plain = nn.Parameter(torch.ones(2))
        with zero.GatheredParameters([plain]), torch.no_grad():
            plain.zero_()  # no engine's: left alone
        for wrong in (torch.ones(2), [torch.ones(2)], 3, "first.weight", [3]):
            with pytest.raises(ShardingError, match="expects parameters, got"):
                zero.GatheredParameters(wrong)  # type: ignore[arg-type]
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 2])
def test_reading(ranks: RankPools, size: int, stage: str) -> None:
    ranks(size).run(read, stage)


def edit(stage: str, low: bool) -> None:
    """Rank 1's edit counts, between steps; training goes on from there, as in plain torch."""
    model, plain = built(Stack), built(Stack)
    optimizer = adamw(plain.parameters())
    keys: dict[str, Any] = {"bf16": {"enabled": True}} if low else {}
    engine = start(model, stage, **keys)
    rank, size = dist.get_rank(), dist.get_world_size()
    exact = 0.30000000000000004 if not low else 0.3
    try:
        for step in range(3):
            for module in (model, plain):
                params = [module.first.weight, module.blocks[1].down.bias, module.last.bias]
                with (
                    zero.GatheredParameters(params if module is model else [], modifier_rank=size - 1),
                    torch.no_grad(),
                ):
                    for i, param in enumerate(params):
                        param[..., 0] = exact * (i + step + 1) if rank == size - 1 or module is plain else 99.0
            if low:
                state = engine.module_state_dict()
                for i, name in enumerate(("first.weight", "blocks.1.down.bias", "last.bias")):
                    wanted = torch.tensor(0.3 * (i + step + 1), dtype=torch.bfloat16)
                    assert (state[name][..., 0] == wanted).all(), name
                # The master follows: a step with no gradient to speak of keeps the edit instead of undoing it.
                loss = (engine(At(step, 0, rank).x.bfloat16()) * 1e-6).sum()
                engine.optimizer.param_groups[0]["lr"] = 0.0
                engine.backward(loss)
                engine.step()
                after = engine.module_state_dict()
                for name in state:
                    assert torch.equal(after[name], state[name]), name
                continue
            losses = [mean_square(plain, At(step, 0, r)) for r in range(size)]
            loss = mean_square(engine, At(step, 0, rank))
            same(loss.item(), losses[rank].item(), "loss")
            torch.stack(losses).mean().backward()
            engine.backward(loss)
            engine.step()
            same(engine.get_global_grad_norm() or 0.0, norm_of(plain), "norm")
            optimizer.step()
            optimizer.zero_grad()
            same_state(engine.module_state_dict(), copied(plain))
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("low", [False, True])
def test_an_edit_is_seen_by_all_and_trained_on(ranks: RankPools, size: int, stage: str, low: bool) -> None:
    ranks(size).run(edit, stage, low)


def edit_unnamed(stage: str) -> None:
    model = built(Stack)
    engine = start(model, stage)
    rank = dist.get_rank()
    before = engine.module_state_dict()
    try:
        for editor in (0, 1, None):
            # One element, on one rank or on all, anywhere: it may be in another rank's slice.
            for name, index in (("first.weight", 0), ("blocks.1.up.weight", -1), ("last.bias", 2)):
                param = model.get_parameter(name)
                with (
                    pytest.raises(ShardingError, match="without `modifier_rank`") as caught,
                    zero.GatheredParameters([param, model.blocks[2].norm.bias]),
                    torch.no_grad(),
                ):
                    if editor in (rank, None):
                        param.view(-1)[index] += 1e-9
                assert name.rsplit(".", 1)[0] in str(caught.value) or ".." in str(caught.value)
                if stage == "3":
                    after = engine.module_state_dict()
                    assert all(torch.equal(after[n], before[n]) for n in before)
        with (
            pytest.raises(ShardingError, match="modifier_rank=7 is not one of the 2 ranks"),
            zero.GatheredParameters(model.first.weight, modifier_rank=7),
        ):
            pass
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_that_would_be_lost_raises_on_all_ranks(ranks: RankPools, stage: str) -> None:
    ranks(2).run(edit_unnamed, stage)


def edit_nested() -> None:
    model = built(Stack)
    engine = start(model, "3")
    inner, outer = model.first.weight, model.last.weight
    try:
        with zero.GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
            with zero.GatheredParameters(inner, modifier_rank=1):
                if dist.get_rank() == 1:
                    inner.fill_(5.0)
            assert (inner == 5.0).all()
            if dist.get_rank() == 0:
                outer.fill_(6.0)
        state = engine.module_state_dict()
        assert (state["first.weight"] == 5.0).all() and (state["last.weight"] == 6.0).all()
    finally:
        engine.destroy()


def test_nested_edits(ranks: RankPools) -> None:
    ranks(2).run(edit_nested)


def edit_and_fail(stage: str) -> None:
    """After an exception in the block nothing is kept, and the engine goes on."""
    model = built(Stack)
    engine = start(model, stage)
    before = engine.module_state_dict()
    try:
        with pytest.raises(KeyError), zero.GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
            raise KeyError
        after = engine.module_state_dict()
        assert all(torch.equal(after[n], before[n]) for n in before)
        engine.backward(mean_square(engine, At(0, 0, 0)))
        engine.step()
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_in_the_block(ranks: RankPools, stage: str) -> None:
    ranks(2).run(edit_and_fail, stage)


def second_engine(stage: str) -> None:
    model = built(Stack)
    engine = start(model, stage)
    with pytest.raises(ShardingError, match=r"first\.weight is already managed by a shardwise engine.*destroy"):
        shardwise.initialize(model=model, config=config(stage))
    engine.backward(mean_square(engine, At(0, 0, dist.get_rank())))
    engine.step()
    engine.destroy()
    engine.destroy()  # again does nothing
    start(model, stage).destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_engine_is_refused_until_destroy(ranks: RankPools, stage: str) -> None:
    ranks(2).run(second_engine, stage)
