"""`state_dict()` and `load_state_dict()` of a sharded model speak whole tensors, at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import ShardingError
from tests.ranks import RankPools
from tests.sharding.harness import STAGES, At, adamw, built, copied, mean_square, same, same_state, start
from tests.sharding.models import Stack, Tokens, token_loss

LOW: dict[str, Any] = {"bf16": {"enabled": True}}


def tied() -> nn.Module:
    return Tokens("module")


def save(stage: str) -> None:
    model = built(tied)
    expected = copied(model)
    shared = model.state_dict()["tok.weight"].data_ptr() == model.state_dict()["head.weight"].data_ptr()
    engine = start(model, stage)
    try:
        for found in (engine.module_state_dict(), engine.module.state_dict(), engine.state_dict()):
            found = {name.removeprefix("module."): value for name, value in found.items()}
            same_state(found, expected)
        state = model.state_dict()
        assert shared and state["tok.weight"].data_ptr() == state["head.weight"].data_ptr(), "tied names stay tied"
        state = model.state_dict(prefix="net.")
        assert list(state) == ["net." + name for name in expected]
        part = model.blocks[1].state_dict()
        same_state(part, {n.removeprefix("blocks.1."): v for n, v in expected.items() if n.startswith("blocks.1.")})
        same_state(model.tok.state_dict(), {"weight": expected["tok.weight"]})
        same_state(model.blocks.state_dict(prefix="blocks."), {n: v for n, v in expected.items() if "blocks" in n})
        # It loads back into the plain model, and does not change when training goes on.
        state = engine.module_state_dict()
        engine.backward(token_loss(engine, At(0, 0, dist.get_rank())))
        engine.step()
        same_state(state, expected)
        fresh = Tokens("module").double()
        fresh.load_state_dict(engine.module_state_dict())
        with torch.no_grad():
            same(token_loss(fresh, At(1, 0, 0)).item(), token_loss(engine, At(1, 0, 0)).item(), "loss")
        if stage == "3":
            assert model.blocks[0].up.weight.isnan().all() and model.tok.weight.isnan().all(), "released again"
        assert set(engine.module_state_dict(exclude_frozen_parameters=True)) == set(expected)
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_state_dict(ranks: RankPools, stage: str) -> None:
    ranks(2).run(save, stage)


def load(stage: str) -> None:
    torch.manual_seed(99)
    other = Stack().double()
    values = copied(other)
    optimizer = adamw(other.parameters())
    engine = start(built(Stack), stage)
    rank = dist.get_rank()
    try:
        assert str(engine.module.load_state_dict(values)) == "<All keys matched successfully>"
        same_state(engine.module_state_dict(), values)
        for step in range(2):
            losses = [mean_square(other, At(step, 0, r)) for r in range(2)]
            loss = mean_square(engine, At(step, 0, rank))
            same(loss.item(), losses[rank].item(), "loss")
            torch.stack(losses).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(loss)
            engine.step()
        same_state(engine.module_state_dict(), copied(other))
        # A part, by its own names.
        engine.module.blocks[1].load_state_dict(
            {n.removeprefix("blocks.1."): v for n, v in values.items() if n.startswith("blocks.1.")}
        )
        engine.module.last.load_state_dict({"weight": values["last.weight"], "bias": values["last.bias"]})
        state = engine.module_state_dict()
        for name, value in copied(other).items():
            wanted = values[name] if name.startswith(("blocks.1.", "last.")) else value
            torch.testing.assert_close(state[name], wanted, rtol=1e-9, atol=1e-11)
        engine.load_module_state_dict(values)
        same_state(engine.module_state_dict(), values)
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_load_state_dict(ranks: RankPools, stage: str) -> None:
    ranks(2).run(load, stage)


def load_wrong(stage: str) -> None:
    model = built(Stack)
    engine = start(model, stage)
    before = engine.module_state_dict()
    try:
        missing = {n: v for n, v in before.items() if n != "blocks.1.up.weight"}
        with pytest.raises(RuntimeError, match=r"Missing key.*blocks\.1\.up\.weight"):
            model.load_state_dict(missing)
        with pytest.raises(RuntimeError, match=r"Unexpected key.*extra"):
            model.load_state_dict({**before, "extra": torch.ones(1)})
        with pytest.raises(RuntimeError, match=r"size mismatch for first\.weight"):
            model.load_state_dict({**before, "first.weight": torch.ones(2, 2)})
        with pytest.raises(ShardingError, match="assign=True"):
            model.load_state_dict(before, assign=True)
        found = model.load_state_dict(missing, strict=False)
        assert found.missing_keys == ["blocks.1.up.weight"] and found.unexpected_keys == []
        same_state(engine.module_state_dict(), before)
        if stage == "3":
            assert all(p.isnan().all() for p in model.parameters()), "released after errors"
        engine.backward(mean_square(engine, At(0, 0, 0)))
        engine.step()
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_wrong_state_is_refused_as_torch_does(ranks: RankPools, stage: str) -> None:
    ranks(2).run(load_wrong, stage)


def load_masters(stage: str) -> None:
    """bf16: the masters take the loaded values themselves, not what is left of them after the cast."""
    torch.manual_seed(5)
    values = copied(Stack().float())
    engine = start(built(Stack), stage, **LOW)
    try:
        engine.module.load_state_dict(values)
        state = engine.module_state_dict()
        for name, value in values.items():
            assert state[name].dtype is torch.bfloat16 and torch.equal(state[name], value.bfloat16()), name
        seen = 0
        for unit in engine._sharded.units:
            for piece in unit.pieces():
                whole = values[piece.slot.name].reshape(-1)
                part = whole[piece.param_start : piece.param_start + piece.numel]
                assert torch.equal(unit.master[piece.start : piece.start + piece.numel], part), piece.slot.name
                seen += piece.numel
        assert seen
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_masters_take_full_precision(ranks: RankPools, size: int, stage: str) -> None:
    ranks(size).run(load_masters, stage)


def train_low(stage: str) -> list[Any]:
    """bf16 with a part that is unfrozen later: it gets a master too, and follows the run of stage 0."""
    model = built(Stack)
    model.blocks[1].requires_grad_(False)
    engine = start(model, stage, **LOW)
    losses = []
    try:
        for step in range(5):
            model.blocks[1].requires_grad_(step >= 2)
            loss = engine(At(step, 0, dist.get_rank()).x.bfloat16()).float().square().mean()
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        masters = {n: (u.master is not None) for u in engine._sharded.units for n in (s.name for s in u.slots)}
        assert all(masters.values()), masters
        return [losses, {n: v.float() for n, v in engine.module_state_dict().items()}]
    finally:
        engine.destroy()


def test_unfrozen_later_in_bf16(ranks: RankPools) -> None:
    runs = {stage: ranks(2).run(train_low, stage) for stage in STAGES}
    start_state = copied(built(Stack))
    for stage in STAGES:
        for rank in range(2):
            losses, state = runs[stage][rank]
            # Gradients are summed over two ranks in bf16 in the same order at every stage: only the order in which a
            # norm's squares are added may differ, and nothing is clipped.
            assert losses == pytest.approx(runs["0"][rank][0], rel=1e-2), stage
            for name, value in state.items():
                torch.testing.assert_close(value, runs["0"][rank][1][name], rtol=2e-2, atol=2e-2)
    moved = (runs["3"][0][1]["blocks.1.up.weight"] - start_state["blocks.1.up.weight"]).abs().mean()
    assert moved > 5e-3, "trained after it was unfrozen"
