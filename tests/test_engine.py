"""The engine's methods and attributes, as a training loop uses them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import ConfigError, Engine, ShardingError
from tests.ranks import RankPools
from tests.sharding.harness import (
    SAMPLES,
    STAGES,
    WIDTH,
    At,
    adamw,
    built,
    config,
    copied,
    mean_square,
    rank_and_size,
    same,
    same_state,
    start,
)
from tests.sharding.models import Stack

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}}


class WithLoss(nn.Module):
    """Returns its loss, as Hugging Face's models do."""

    def __init__(self, returns: str = "loss") -> None:
        super().__init__()
        self.net = Stack()
        self.returns = returns

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = (self.net(x) - y).square().mean()
        kinds: dict[str, Any] = {"loss": loss, "dict": {"loss": loss, "x": x}, "tuple": (loss, x), "nothing": "text"}
        return kinds[self.returns]


def from_config(model: nn.Module, stage: str, **keys: Any) -> tuple[Any, ...]:
    return shardwise.initialize(model=model, config=config(stage, optimizer=ADAMW, **keys))


def attributes(stage: str) -> None:
    rank, size = rank_and_size()
    model = built(Stack)
    engine, optimizer, loader, schedule = from_config(model, stage, gas=3, scheduler=WARMUP)
    try:
        assert engine.module is model and engine.optimizer is optimizer and engine.lr_scheduler is schedule
        assert loader is None and engine.training_dataloader is None
        assert (engine.global_rank, engine.world_size, engine.dp_world_size) == (rank, size, size)
        assert (engine.local_rank, engine.mp_world_size) == (rank, 1)
        assert engine.device == torch.device("cpu")
        assert engine.get_batch_info() == (SAMPLES * 3 * size, SAMPLES, 3)
        assert engine.train_batch_size() == SAMPLES * 3 * size
        assert engine.train_micro_batch_size_per_gpu() == SAMPLES
        assert engine.gradient_accumulation_steps() == 3
        assert engine.zero_optimization_stage() == int(stage[0])
        assert engine.gradient_clipping() == 0.0
        assert engine.get_type() == ["AdamW"] and engine.get_mom() == [(0.9, 0.999)]
        assert engine.get_global_grad_norm() is None and engine.was_step_applied() is False
        assert engine.order == model.order, "other attributes are the model's"
        with pytest.raises(AttributeError, match="nonsense"):
            engine.nonsense  # noqa: B018
        assert engine.train() is engine and model.training
        assert engine.eval() is engine and not model.training
        engine.train()
        for i in range(7):
            assert engine.is_gradient_accumulation_boundary() == (i % 3 == 2)
            loss = mean_square(engine, At(i, 0, rank))
            same(engine.backward(loss).item(), loss.item() / 3, "what backward returns")
            engine.step()
        assert (engine.micro_steps, engine.global_steps) == (7, 2)
        assert engine.global_samples == 2 * engine.train_batch_size()
        assert engine.was_step_applied() is True and engine.skipped_steps == 0
        # Upstream's warm-up starts from 0: after two steps it is one quarter up.
        assert engine.get_lr() == [pytest.approx(1e-2 / 4)] == [g["lr"] for g in optimizer.param_groups]
        engine.set_train_batch_size(SAMPLES * size * 2)
        assert engine.gradient_accumulation_steps() == 2
        with pytest.raises(ConfigError, match="train_batch_size: 3 is not a positive multiple"):
            engine.set_train_batch_size(3)
        engine.empty_partition_cache()
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 2])
def test_attributes(ranks: RankPools, size: int, stage: str) -> None:
    ranks(size).run(attributes, stage)


def clip(stage: str) -> None:
    engine = start(built(Stack), stage, gradient_clipping=0.05)
    try:
        engine.backward(mean_square(engine, At(0, 0, rank_and_size()[0])))
        engine.step()
        assert engine.grad_norm_before_clip == engine.get_global_grad_norm() > 0.1
        assert engine.grad_norm_after_clip == pytest.approx(0.05, rel=1e-4)
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_norms_before_and_after_clipping(ranks: RankPools, stage: str) -> None:
    ranks(2).run(clip, stage)


def whole_windows(stage: str, returns: str) -> None:
    """`train_batch` with an iterator, a window at a time; losses are means over the window and the ranks."""
    rank, size = rank_and_size()
    engine, *_ = from_config(built(lambda: WithLoss(returns)), stage, gas=2)
    plain = built(WithLoss)
    optimizer = adamw(plain.parameters())

    def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = At(step, micro, rank)
        return at.x, at.draw(SAMPLES, 3, salt=1)

    def mine() -> Any:
        for i in range(6):
            x, y = batch(i // 2, i % 2, rank)
            yield {"x": x, "y": y} if i % 3 == 0 else [x, y]

    batches = mine()
    try:
        for step in range(3):
            losses = [plain(*batch(step, micro, r)) for micro in range(2) for r in range(size)]
            mean = torch.stack(losses).mean()
            mean.backward()
            optimizer.step()
            optimizer.zero_grad()
            # The reported mean is float32; the training itself is compared below in float64.
            assert engine.train_batch(batches).item() == pytest.approx(mean.item(), rel=1e-6)
            same_state(engine.module_state_dict(), copied(plain))
        with pytest.raises(StopIteration):
            engine.train_batch(batches)
        assert engine.global_steps == 3
    finally:
        engine.destroy()


@pytest.mark.parametrize(
    ("stage", "returns"), [("0", "loss"), ("1", "dict"), ("2", "tuple"), ("3", "dict"), ("3s", "loss")]
)
def test_train_batch(ranks: RankPools, stage: str, returns: str) -> None:
    ranks(2).run(whole_windows, stage, returns)


class Numbers(torch.utils.data.Dataset[Any]):
    """Sample i is recognised by its input."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Any:
        return torch.full((WIDTH,), float(i), dtype=torch.float64), torch.zeros(3, dtype=torch.float64)


def own_loader() -> list[list[float]]:
    model = built(WithLoss)
    engine, _, loader, _ = shardwise.initialize(
        model=model, training_data=Numbers(), config=config("2", optimizer=ADAMW, seed=3)
    )
    try:
        assert loader is engine.training_dataloader and loader.batch_size == SAMPLES
        seen = [x[:, 0].tolist() for x, _ in loader]
        for _ in range(7):  # more than an epoch
            engine.train_batch()
        assert engine.global_steps == 7
        return seen
    finally:
        engine.destroy()


def test_training_data(ranks: RankPools) -> None:
    first, second = ranks(2).run(own_loader)
    numbers = [x for batch in first + second for x in batch]
    assert set(numbers) == set(range(10)), "between them the ranks see every sample"
    assert len(first) == len(second) == 3
    assert numbers != sorted(numbers), "shuffled"


def refusals() -> None:
    engine = start(built(Stack), "2")
    no_optimizer, *_ = shardwise.initialize(model=built(Stack), config=config("2"))
    wrong, *_ = from_config(built(lambda: WithLoss("nothing")), "2")
    at = At(0, 0, 0)
    try:
        with pytest.raises(ShardingError, match=r"expects a scalar loss, got \(2, 3\); reduce it"):
            engine.backward(engine(at.x))
        with pytest.raises(ShardingError, match="expects a scalar loss, got float"):
            engine.backward(1.0)  # type: ignore[arg-type]
        with pytest.raises(ShardingError, match="a loss without a graph"):
            engine.backward(mean_square(engine, at).detach())
        with torch.no_grad(), pytest.raises(ShardingError, match="a loss without a graph"):
            engine.backward(mean_square(engine, at))
        with pytest.raises(ConfigError, match="train_batch\\(\\) without data_iter needs `training_data`"):
            engine.train_batch()
        with pytest.raises(ShardingError, match="a model that returns its loss"):
            wrong.train_batch(iter([(at.x, at.draw(2, 3))]))
        no_optimizer.backward(mean_square(no_optimizer, at))
        with pytest.raises(ConfigError, match="optimizer: absent"):
            no_optimizer.step()
        with pytest.raises(ShardingError, match="cannot be added after"):
            engine.optimizer.add_param_group({"params": []})
        with pytest.raises(ConfigError, match=r"model: shardwise\.initialize needs the model"):
            shardwise.initialize(config=config("2"))
        with pytest.raises(ConfigError, match="config: none given"):
            shardwise.initialize(model=nn.Linear(2, 2))
        with pytest.raises(ConfigError, match="given as config and as config_params"):
            shardwise.initialize(model=nn.Linear(2, 2), config=config("2"), config_params=config("2"))
        stranger = adamw([nn.Parameter(torch.ones(2))])
        with pytest.raises(ShardingError, match=r"group 0 of the optimizer holds a parameter of shape \(2,\)"):
            shardwise.initialize(model=nn.Linear(2, 2), optimizer=stranger, config=config("2"))
        with pytest.raises(ShardingError, match="belongs to another engine"):
            shardwise.initialize(model=nn.Linear(2, 2), optimizer=engine.optimizer, config=config("2"))
        plain = nn.Linear(2, 2)
        with pytest.raises(ConfigError, match=r"not a torch\.optim\.Optimizer"):
            shardwise.initialize(model=plain, optimizer=lambda params: None, config=config("3"))  # type: ignore
        assert not any("hooks" in k and v for k, v in plain.__dict__.items()), "a refused model is left as it was"
        assert plain.weight.numel() == 4 and not plain.weight.isnan().any()
        plain.half()
    finally:
        for each in (engine, no_optimizer, wrong):
            each.destroy()


def test_refusals(ranks: RankPools) -> None:
    ranks(2).run(refusals)


def second_optimizer(stage: str) -> None:
    model = built(Stack)
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = start(model, stage)
    own = engine.module_state_dict()
    unrelated = nn.Linear(2, 2)
    free = torch.optim.SGD(unrelated.parameters(), lr=1.0)
    try:
        engine.backward(mean_square(engine, At(0, 0, 0)))
        with pytest.raises(ShardingError, match=r"SGD holds first\.weight \(and 21 more\), which a shardwise engine"):
            other.step()
        unrelated(torch.ones(1, 2)).sum().backward()
        free.step()
        after = engine.module_state_dict()
        assert all(torch.equal(after[n], own[n]) for n in own)
        engine.step()
    finally:
        engine.destroy()
    mean_square(model, At(0, 0, 0)).backward()
    other.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_optimizer_over_the_parameters_raises(ranks: RankPools, stage: str) -> None:
    ranks(2).run(second_optimizer, stage)


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def not_finite(stage: str, value: float) -> None:
    """A gradient that is not finite on one rank skips the step on all, changes nothing, and is told once."""
    rank = dist.get_rank()
    logger, listener = logging.getLogger("shardwise"), Listener()
    logger.addHandler(listener)
    engine, *_ = from_config(built(Stack), stage, gas=2, scheduler=WARMUP)

    def window(step: int, bad: bool) -> None:
        for micro in range(2):
            loss = mean_square(engine, At(step, micro, rank))
            engine.backward(loss * value if bad and rank == 1 and micro == 0 else loss)
            engine.step()

    try:
        window(0, False)
        window(1, False)
        before, state, lr = engine.module_state_dict(), engine.optimizer.state_dict(), engine.get_lr()
        moments = [{k: torch.as_tensor(v).clone() for k, v in s.items()} for s in state["state"].values()]
        window(2, True)
        assert engine.was_step_applied() is False and engine.skipped_steps == 1 and engine.optimizer.overflow
        assert engine.global_steps == 3 and engine.get_lr() == lr, "the schedule waits as well"
        assert not torch.tensor(engine.get_global_grad_norm()).isfinite()
        after = engine.module_state_dict()
        assert all(torch.equal(after[n], before[n]) for n in before), "bit for bit"
        now = [{k: torch.as_tensor(v) for k, v in s.items()} for s in engine.optimizer.state_dict()["state"].values()]
        assert all(torch.equal(a[k], b[k]) for a, b in zip(now, moments, strict=True) for k in a)
        said = [line for line in listener.lines if "skipped" in line]
        assert len(said) == (rank == 0)
        if rank == 0:
            assert "step 3 skipped on all ranks: the gradient is not finite" in said[0]
            assert "1 skipped so far" in said[0] and "weight" in said[0], "names where"
        window(3, False)
        assert engine.was_step_applied() is True and engine.skipped_steps == 1 and not engine.optimizer.overflow
        changed = engine.module_state_dict()
        assert all(v.isfinite().all() for v in changed.values())
        assert not torch.equal(changed["first.weight"], before["first.weight"])
    finally:
        logger.removeHandler(listener)
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite(ranks: RankPools, value: float, stage: str) -> None:
    ranks(2).run(not_finite, stage, value)


def by_tokens(stage: str) -> None:
    """Ragged batches: the window's gradient is the mean over all its tokens."""
    rank, size = rank_and_size()
    engine = start(built(Stack), stage, gas=2, gradient_normalization="tokens")
    plain = built(Stack)
    optimizer = adamw(plain.parameters())

    def rows(step: int, micro: int, rank: int) -> torch.Tensor:
        return At(step, micro, rank).draw(1 + (step + 2 * micro + 3 * rank) % 5, WIDTH)

    try:
        with pytest.raises(ConfigError, match="needs the number of target tokens"):
            engine.backward(mean_square(engine, At(0, 0, 0)))
        for step in range(3):
            for micro in range(2):
                x = rows(step, micro, rank)
                engine.backward(engine(x).square().sum(1).mean(), tokens=len(x))
                engine.step()
            everything = torch.cat([rows(step, micro, r) for micro in range(2) for r in range(size)])
            plain(everything).square().sum(1).mean().backward()
            norm = torch.stack([p.grad.square().sum() for p in plain.parameters()]).sum().sqrt()
            same(engine.get_global_grad_norm() or 0.0, norm.item(), "norm")
            optimizer.step()
            optimizer.zero_grad()
            same_state(engine.module_state_dict(), copied(plain))
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_normalized_by_tokens(ranks: RankPools, stage: str) -> None:
    ranks(2).run(by_tokens, stage)


def measure(stage: str) -> dict[str, int]:
    engine: Engine = start(built(lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])), stage, gas=2)
    x = torch.ones(2, 64, dtype=torch.float64)
    for _ in range(2):
        engine.backward(engine(x).square().mean())
        engine.step()
    report = engine.memory_report()
    engine.destroy()
    return report


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_memory_is_what_the_formula_says(ranks: RankPools, stage: str) -> None:
    for report in ranks(2).run(measure, stage):
        assert report["total"] == report["parameters"] + report["gradients"] + report["optimizer"]
        assert report["total"] <= report["formula"] * 1.02, report
        assert report["total"] >= report["formula"] * 0.5, report
