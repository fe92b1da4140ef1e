"""Moving, casting, copying and pickling a sharded model: right, or refused with a sentence."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from shardwise import ShardingError
from tests.ranks import RankPools
from tests.sharding.harness import STAGES, At, built, copied, mean_square, same, start
from tests.sharding.models import Stack, Tokens, token_loss


def move(stage: str) -> None:
    model = built(Stack)
    engine = start(model, stage)
    try:
        for what in (model, engine, model.blocks[1], model.last):
            assert what.to(torch.float64) is what
            assert what.double() is what
            assert what.to("cpu") is what and what.cpu() is what
            for cast in (
                lambda m: m.to(torch.float32),
                lambda m: m.half(),
                lambda m: m.bfloat16(),
                lambda m: m.float(),
                lambda m: m.to("meta"),
                lambda m: m.to_empty(device="meta"),
            ):
                with pytest.raises(ShardingError, match="sharded by shardwise"):
                    cast(what)
        same(mean_square(engine, At(0, 0, 0)).item(), mean_square(built(Stack), At(0, 0, 0)).item(), "loss")
    finally:
        engine.destroy()
    assert model.half() is model and model.last.weight.dtype is torch.float16


@pytest.mark.parametrize("stage", STAGES)
def test_moving_and_casting(ranks: RankPools, stage: str) -> None:
    ranks(2).run(move, stage)


def copy_it(stage: str) -> None:
    model = built(Stack)
    engine = start(model, stage)
    try:
        for what in (model, engine, model.blocks, model.blocks[1], model.last):
            for act in (copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
                with pytest.raises(ShardingError, match="cannot be copied or pickled"):
                    act(what)
        same(mean_square(engine, At(0, 0, 0)).item(), mean_square(built(Stack), At(0, 0, 0)).item(), "loss")
    finally:
        engine.destroy()
    assert torch.equal(copy.deepcopy(model).last.weight, model.last.weight)
    pickle.dumps(model)


@pytest.mark.parametrize("stage", STAGES)
def test_copying_and_pickling(ranks: RankPools, stage: str) -> None:
    ranks(2).run(copy_it, stage)


def traces(model: nn.Module) -> dict[str, Any]:
    """Everything that sharding might leave on a model."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = {
            key: len(value) if "hooks" in key else sorted(value) if isinstance(value, dict) else type(value)
            for key, value in module.__dict__.items()
        }
        found[name]["class"] = type(module)
    for name, param in model.named_parameters(remove_duplicate=False):
        hooks = (param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None))
        found[f"param {name}"] = (
            type(param),
            sorted(param.__dict__),
            [len(h or ()) for h in hooks],
            param.shape,
            param.stride(),
            param.dtype,
            param.requires_grad,
            param.untyped_storage().nbytes(),
            id(param),
        )
    return found


def destroy(stage: str) -> None:
    model = built(lambda: Tokens("module"))
    before, hooks = traces(model), len(_global_optimizer_pre_hooks)
    groups = len(dist.distributed_c10d._world.pg_map)
    engine = start(model, stage)
    rank = dist.get_rank()
    for step in range(2):
        engine.backward(token_loss(engine, At(step, 0, rank)))
        engine.step()
    loss = token_loss(engine, At(2, 0, 0)).item()
    engine.eval()
    engine.train()
    state = engine.module_state_dict()
    engine.destroy()
    assert traces(model) == before
    assert len(_global_optimizer_pre_hooks) == hooks
    assert len(dist.distributed_c10d._world.pg_map) == groups
    now = copied(model)
    assert all(torch.equal(now[n], v) for n, v in state.items())
    assert model.tok.weight is model.head.weight
    same(token_loss(model, At(2, 0, 0)).item(), loss, "loss of the plain model")
    # It trains on as a plain model, on each rank alone.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    token_loss(model, At(rank, 0, 0)).backward()
    optimizer.step()
    assert not torch.equal(model.tok.weight, state["tok.weight"])


@pytest.mark.parametrize("stage", STAGES)
def test_destroy_gives_a_plain_model_back(ranks: RankPools, stage: str) -> None:
    ranks(2).run(destroy, stage)


def train_again(stage: str) -> None:
    """Stopped, destroyed and initialised again in the middle, with the optimizer's state kept by SGD without any."""
    results = []
    for restart in (False, True):
        model = built(Stack)
        engine = start(model, stage, lambda ps: torch.optim.SGD(ps, lr=0.05))
        losses = []
        for step in range(4):
            if step == 2 and restart:
                engine.destroy()
                engine = start(model, stage, lambda ps: torch.optim.SGD(ps, lr=0.05))
            loss = mean_square(engine, At(step, 0, dist.get_rank()))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        engine.destroy()
        results.append((losses, copied(model)))
    (first, values), (second, again) = results
    assert first == second
    assert all(torch.equal(values[n], again[n]) for n in values)


@pytest.mark.parametrize("stage", STAGES)
def test_initialised_again_it_trains_on(ranks: RankPools, stage: str) -> None:
    ranks(2).run(train_again, stage)


def many_times(stage: str) -> None:
    import gc

    import psutil

    def once() -> None:
        model = built(lambda: nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 400)))  # 2.5 MB
        engine = start(model, stage)
        loss = engine(torch.ones(2, 400, dtype=torch.float64)).square().mean()
        engine.backward(loss)
        engine.step()
        engine.destroy()

    def counted() -> tuple[int, int]:
        gc.collect()
        return len(dist.distributed_c10d._world.pg_map), len(_global_optimizer_pre_hooks)

    for _ in range(15):  # until the allocator has what it needs
        once()
    before, rss = counted(), psutil.Process().memory_info().rss
    for _ in range(20):
        once()
    assert counted() == before
    grown = (psutil.Process().memory_info().rss - rss) / 2**20
    # An engine that stays would keep 2.5 MB of parameters, as much of gradients and 5 MB of Adam state: 200 MB in all.
    assert grown < 100, f"{grown:.0f} MB more after 20 engines"


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_engines_leave_nothing_behind(ranks: RankPools, stage: str) -> None:
    ranks(2).run(many_times, stage)


def dropped_without_destroy() -> None:
    """An engine that is only forgotten must not watch optimizers any more."""
    import gc

    model = built(Stack)
    hooks = len(_global_optimizer_pre_hooks)
    engine = start(model, "0")
    assert len(_global_optimizer_pre_hooks) == hooks + 1
    engine.mesh.close()
    del engine, model
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == hooks


def test_a_forgotten_engine_is_freed(ranks: RankPools) -> None:
    ranks(2).run(dropped_without_destroy)
