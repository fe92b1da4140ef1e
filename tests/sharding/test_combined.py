"""Hard cases that only appear together, and calls in an order that nobody planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise
from tests.ranks import RankPools

STAGES = (0, 1, 2, 3)


def config(stage: int, **keys: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": zero | keys.pop("zero", {}),
        **keys,
    }


class Shared(nn.Module):
    """One module under two re-entrant checkpoints, and a parameter that one rank does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(6, 6), nn.Linear(6, 6)
        self.extra, self.last = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor, use_extra: bool) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.shared, x, use_reentrant=True)
        x = torch.tanh(x)
        x = checkpoint(self.shared, x, use_reentrant=True)
        if use_extra:
            x = x + self.extra(x)
        return self.last(x).square().mean()


def shared_and_unused(stage: int, bucket: int) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    model = Shared().double()
    engine, *_ = shardwise.initialize(model=model, config=config(stage, zero={"reduce_bucket_size": bucket}))
    seen = []
    for step in range(3):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        mine = x if engine.world_size == 1 else x[2 * engine.global_rank :][:2]
        if engine.world_size == 1:
            loss = (engine(mine[:2], True) + engine(mine[2:], False)) / 2
        else:
            loss = engine(mine, engine.global_rank == 0)
        engine.backward(loss)
        engine.step()
        seen.append((loss.item(), engine.grad_norm_before_clip or 0.0))
    engine.destroy()
    return seen


@pytest.mark.parametrize("bucket", [1, 10_000])
@pytest.mark.parametrize("stage", (0, 1, 2))
def test_a_shared_module_under_reentrant_checkpoints_and_an_unused_one(
    ranks: RankPools, stage: int, bucket: int
) -> None:
    [alone] = ranks(1).run(shared_and_unused, 0, 10_000)
    first, second = ranks(2).run(shared_and_unused, stage, bucket)
    for (loss, norm), (a, norm_a), (b, norm_b) in zip(alone, first, second, strict=True):
        assert (a + b) / 2 == pytest.approx(loss, rel=1e-12)
        assert norm_a == norm_b == pytest.approx(norm, rel=1e-12)


class Late(nn.Module):
    """Reads another module's weight functionally, from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.aux = nn.Linear(6, 6), nn.Linear(6, 6)
        self.functional = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.aux(self.body(x))
        if self.functional:
            x = F.linear(x, self.aux.weight * 1.0) + F.linear(x, self.body.weight)
        return x.square().mean()


def late_functional_use() -> list[bool]:
    torch.manual_seed(0)
    model = Late()
    engine, *_ = shardwise.initialize(model=model, config=config(3))
    applied = []
    for step in range(5):
        model.functional = step >= 2
        engine.backward(engine(torch.ones(2, 6)))
        engine.step()
        applied.append(engine.was_step_applied())
    engine.destroy()
    return applied


def test_a_weight_read_elsewhere_later_costs_one_skipped_step(ranks: RankPools) -> None:
    assert ranks(2).run(late_functional_use) == [[True, True, False, True, True]] * 2


def registered(use: bool) -> list[bool]:
    torch.manual_seed(0)
    model = Late()
    model.functional = True
    if use:
        shardwise.zero.register_external_parameter(model, model.body.weight)
    engine, *_ = shardwise.initialize(model=model, config=config(3))
    engine.module.body(torch.ones(2, 6))  # a part by itself first: it shows only that part
    engine.backward(engine(torch.ones(2, 6)))
    engine.step()
    applied = engine.was_step_applied()
    engine.destroy()
    return [applied]


@pytest.mark.parametrize("use", [True, False])
def test_external_parameters_registered_or_found(ranks: RankPools, use: bool) -> None:
    assert ranks(2).run(registered, use) == [[True]] * 2


def dropped_tokens() -> tuple[float, float]:
    norms = []
    for drops in (False, True):
        torch.manual_seed(0)
        engine, *_ = shardwise.initialize(model=nn.Linear(4, 1), config=config(2, gradient_normalization="tokens"))
        if drops:
            engine.backward(engine(torch.ones(2, 4)).mean(), tokens=100)
            engine.zero_grad()
        engine.backward(engine(torch.ones(2, 4)).mean(), tokens=10)
        engine.step()
        norms.append(engine.grad_norm_before_clip or 0.0)
        engine.destroy()
    return norms[0], norms[1]


def test_tokens_of_dropped_gradients_do_not_count(ranks: RankPools) -> None:
    for plain, dropped in ranks(2).run(dropped_tokens):
        assert plain == pytest.approx(dropped)


def longer_windows() -> list[int]:
    engine, *_ = shardwise.initialize(model=nn.Linear(4, 1), config=config(1, gradient_accumulation_steps=2))
    ends = []
    for micro_step in range(1, 11):
        engine.backward(engine(torch.ones(2, 4)).mean())
        before = engine.global_steps
        engine.step()
        if engine.global_steps > before:
            ends.append(micro_step)
        if micro_step == 2:
            engine.set_train_batch_size(2 * 4 * engine.world_size)
    engine.destroy()
    return ends


def test_a_window_that_grows_is_counted_from_its_start(ranks: RankPools) -> None:
    assert ranks(2).run(longer_windows) == [[2, 6, 10]] * 2


def forbidden_steps() -> list[str]:
    model = nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, optimizer, _, _ = shardwise.initialize(
        model=model, optimizer=inner, config={k: v for k, v in config(3).items() if k != "optimizer"}
    )
    engine.backward(engine(torch.ones(2, 4)).mean())
    said = []
    for step in (optimizer.step, inner.step):
        with pytest.raises(shardwise.ShardingError) as caught:
            step()
        said.append(str(caught.value))
    with pytest.raises(shardwise.ShardingError) as caught, shardwise.zero.GatheredParameters(model, modifier_rank=0):
        engine.step()
    said.append(str(caught.value))
    engine.destroy()
    return said


def test_steps_past_the_engine_are_refused(ranks: RankPools) -> None:
    for direct, inner, gathered in ranks(2).run(forbidden_steps):
        assert "engine.step()" in direct and "engine.step()" in inner
        assert "inside GatheredParameters" in gathered


def evaluated_first() -> float:
    torch.manual_seed(0)
    engine, *_ = shardwise.initialize(model=nn.Linear(4, 1), config=config(3, zero={"zero_hpz_partition_size": 2}))
    with torch.inference_mode():
        engine(torch.ones(2, 4))
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
    norm = engine.grad_norm_before_clip or 0.0
    engine.destroy()
    return norm


def test_hpz_after_an_evaluation_in_inference_mode(ranks: RankPools) -> None:
    norms = ranks(4).run(evaluated_first)
    assert norms[0] > 0 and len(set(norms)) == 1


def plain_group() -> str:
    dist.init_process_group()  # no backend named: torch calls it "undefined"
    engine, *_ = shardwise.initialize(model=nn.Linear(4, 1), config=config(2))
    engine.backward(engine(torch.ones(2, 4)).mean())
    engine.step()
    found = repr(sorted(engine.mesh.world.traffic))
    direct = engine.mesh.world._exchange is not None
    engine.destroy()
    dist.destroy_process_group()
    return f"{direct} {found}"


def test_a_group_without_a_named_backend_is_served_directly(ranks: RankPools) -> None:
    assert all(said.startswith("True") for said in ranks(2).run(plain_group, fresh=True, group=False))


def test_what_has_not_landed_says_so() -> None:
    engine, *_ = shardwise.initialize(model=nn.Linear(4, 1), config=config(0))
    try:
        for name in ("save_checkpoint", "load_checkpoint", "save_16bit_model", "offload_states"):
            with pytest.raises(shardwise.NotYetSupported, match=f"engine.{name}: has not landed yet"):
                getattr(engine, name)("somewhere")
    finally:
        engine.destroy()
