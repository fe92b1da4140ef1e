"""What users of DeepSpeed lost days to, each with the right behaviour: the issues on configuration, gradient
accumulation, clipping, norms and schedules that a small model on a CPU can show.

A name holds the number of the issue (DeepSpeed's own unless it says otherwise). Covered elsewhere: six ways to give the
batch (#17, config/test_batch.py), losses and norms at each accumulation (accelerate#1970, test_loss_matrix.py), eight
fixes in lr_schedules.py (PRs 8142 to 8205, optim/test_schedulers.py). The expert-parallel norm (#8475) has no meaning
before there is an expert axis.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import shardwise
from shardwise import Config, ConfigError
from tests.ranks import RankPools

STAGES = (0, 1, 2, 3)
ADAMW = {"type": "AdamW", "params": {"lr": 0.01}}


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def started(**keys: Any) -> Any:
    return shardwise.initialize(model=tiny(), config={"train_micro_batch_size_per_gpu": 1, **keys})[0]


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **keys}}


def x(step: int = 0, rank: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


# -- configuration --


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("gradient_cliping", '"gradient_clipping"'),
        ("optimiser", '"optimizer"'),
        ("zero_optimisation", '"zero_optimization"'),
        ("train_micro_batch_size_per_device", '"train_micro_batch_size_per_gpu"'),
    ],
)
def test_1809_a_misspelt_top_level_key_is_an_error(key: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"  {key}: unknown key; did you mean {hint}"):
        started(**{key: 1})


def count_ranks() -> tuple[int, int, int]:
    engine = shardwise.initialize(model=tiny(), config={"train_batch_size": 8, "optimizer": ADAMW})[0]
    try:
        return engine.get_batch_info()
    finally:
        engine.destroy()


def wrong_count() -> str:
    with pytest.raises(ConfigError) as caught:
        started(train_batch_size=8, gradient_accumulation_steps=1, train_micro_batch_size_per_gpu=2)
    return str(caught.value)


def test_6914_the_batch_identity_counts_the_ranks_that_run(ranks: RankPools) -> None:
    assert ranks(4).run(count_ranks) == [(8, 2, 1)] * 4
    said = ranks(2).run(wrong_count)[0]
    assert "train_batch_size" in said and "8" in said and "2" in said


def test_8260_a_bucket_of_nothing_is_an_error_before_the_backward() -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization\.reduce_bucket_size: 0 is out of range"):
        started(**zero(2, reduce_bucket_size=0))


def losses_with_buckets(sizes: list[int]) -> list[list[float]]:
    runs = []
    for size in sizes:
        engine = started(**zero(2, reduce_bucket_size=size, overlap_comm=True), bf16={"enabled": True}, optimizer=ADAMW)
        try:
            runs.append([])
            for step in range(4):
                loss = engine(x(step, dist.get_rank()).bfloat16()).float().square().mean()
                engine.backward(loss)
                engine.step()
                runs[-1].append(loss.item())
        finally:
            engine.destroy()
    return runs


def test_6351_the_size_of_a_bucket_does_not_change_the_loss(ranks: RankPools) -> None:
    first, *others = ranks(2).run(losses_with_buckets, [1, 16, 32, 10**9])[0]
    assert all(other == first for other in others), "the same sums in other pieces: not a bit of difference"


def bytes_of_a_step(config: dict[str, Any]) -> tuple[int, float]:
    engine = started(**zero(2, overlap_comm=True), optimizer=ADAMW, **config)
    try:
        loss = engine(x(0, dist.get_rank())).square().mean()
        engine.backward(loss)
        engine.step()
        return sum(t.bytes_sent for axis in engine.mesh.axes() for t in axis.traffic.values()), loss.item()
    finally:
        engine.destroy()


def test_2861_a_comms_logger_that_is_off_changes_nothing(ranks: RankPools) -> None:
    off = ranks(2).run(bytes_of_a_step, {"comms_logger": {"enabled": False, "verbose": True}})
    assert off == ranks(2).run(bytes_of_a_step, {})


def test_2005_the_start_can_be_silent(capfd: pytest.CaptureFixture[str]) -> None:
    engine = started(log_level="error", optimizer=ADAMW, zero_optimization={"stage": 0, "round_robin_gradients": True})
    engine.destroy()
    assert capfd.readouterr() == ("", "")


def test_8068_the_default_of_clipping_is_in_the_documents_and_does_not_move() -> None:
    assert Config.load({"train_batch_size": 1}).gradient_clipping == 1.0
    from shardwise.cli.advice import Machine, advise

    told = advise(Config.load({"train_batch_size": 1}), Machine())
    assert any(line.startswith("gradient_clipping: absent; gradients are clipped to a norm of 1") for line in told)


def test_flagembedding_1487_bf16_with_the_keys_of_fp16_says_why_they_are_wrong() -> None:
    fp16 = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
    with pytest.raises(ConfigError) as caught:
        started(bf16={"enabled": True, **fp16})
    assert str(caught.value).startswith("5 problems")
    for key in fp16:
        assert f"  bf16.{key}: unknown key; loss scaling is for fp16 only" in str(caught.value)


def test_examples_513_errors_speak_of_the_json_and_all_at_once(tmp_path: Path) -> None:
    path = tmp_path / "stale.json"
    path.write_text(json.dumps({"train_batch_size": 1, "zero_optimization": {"stge": 2, "overlap_comm": "yes"}}))
    with pytest.raises(ConfigError) as caught:
        Config.load(path)
    assert "stale.json" in str(caught.value) and "Section" not in str(caught.value)
    assert 'zero_optimization.stge: unknown key; did you mean "stage"?' in str(caught.value)
    assert 'zero_optimization.overlap_comm: "yes" is a string; expected true or false' in str(caught.value)


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_8126_no_warm_up_is_a_warm_up_of_zero_steps(kind: str) -> None:
    params: dict[str, Any] = {"warmup_num_steps": "auto"}
    if kind != "WarmupLR":
        params["total_num_steps"] = 10
    if kind == "WarmupDecayLR":
        params["warmup_max_lr"] = 0.01
    source = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": ADAMW,
        "scheduler": {"type": kind, "params": params},
    }
    config = Config.load(source, auto={"scheduler.params.warmup_num_steps": 0})
    engine = shardwise.initialize(model=tiny(), config=config)[0]
    try:
        assert engine.get_lr() == [pytest.approx(0.01)]
    finally:
        engine.destroy()


# -- accumulation, clipping, norms --


def accumulate_by_hand(stage: int) -> tuple[float, float]:
    """Three backwards and one step, with ``gradient_accumulation_steps: 1``; against one batch of all of it."""
    engine = started(**zero(stage), gradient_clipping=0, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    reference = tiny()
    try:
        ranks = range(dist.get_world_size())
        for step in range(3):
            engine.backward(engine(x(step, dist.get_rank())).square().mean())
        engine.step()
        total = sum(reference(x(step, rank)).square().mean() for step in range(3) for rank in ranks)
        (total / len(ranks)).backward()
        norm = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None]).norm()
        return engine.get_global_grad_norm(), norm.item()
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_open_instruct_1498_every_backward_before_a_step_counts(ranks: RankPools, stage: int) -> None:
    for found, expected in ranks(2).run(accumulate_by_hand, stage):
        assert found == pytest.approx(expected, rel=1e-5)  # float32, sums in another order


def clipped_step(stage: int, clip: float) -> tuple[float, float, float]:
    """Norm before, norm after, and how far the weights moved."""
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    engine = started(**zero(stage), gradient_clipping=clip, optimizer=sgd, steps_per_print=1)
    try:
        before = torch.cat([v.flatten() for v in engine.module_state_dict().values()])
        engine.backward((engine(x()) * 5).square().mean())
        engine.step()
        after = torch.cat([v.flatten() for v in engine.module_state_dict().values()])
        return engine.grad_norm_before_clip, engine.grad_norm_after_clip, (after - before).norm().item()
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_7220_and_mlcommons_723_clipping_works_and_says_which_norm_it_reports(
    stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="shardwise"):
        norm, clipped, moved = clipped_step(stage, 0.5)
    assert norm > 5 and clipped == pytest.approx(0.5, rel=1e-4) and moved == pytest.approx(0.5, rel=1e-3)
    (line,) = [r.getMessage() for r in caplog.records if "norm" in r.getMessage() and "loss" in r.getMessage()]
    assert f"norm {norm:.3f} (clipped to 0.5)" in line, line
    assert clipped_step(stage, 1e-9)[2] < 1e-6, "a limit of almost nothing leaves almost nothing"


def stage_0_norm() -> float:
    engine = started(optimizer=ADAMW)
    try:
        engine.backward(engine(x()).square().mean())
        engine.step()
        return engine.get_global_grad_norm()
    finally:
        engine.destroy()


def test_7255_there_is_a_norm_at_stage_0(ranks: RankPools) -> None:
    one = stage_0_norm()
    assert one > 0
    assert ranks(2).run(stage_0_norm)[0] == pytest.approx(one, rel=1e-5)  # both ranks have the same batch


# -- schedules --


def test_4344_a_schedule_made_by_the_script_drives_the_rates_that_are_stepped_with() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, **zero(3)}
    engine = shardwise.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]
    try:
        moves = []
        for step in range(3):
            before = engine.module_state_dict()
            engine.backward(engine(x(step)).mean())
            engine.step()
            norm = engine.get_global_grad_norm()
            after = engine.module_state_dict()
            moves.append(math.sqrt(sum((after[k] - before[k]).square().sum().item() for k in after)) / norm)
        assert moves == pytest.approx([1.0, 0.5, 0.25], rel=1e-4)
        assert engine.get_lr() == [0.125]
        # Resumed in a new run, the schedule goes on where it stood, in the groups that the new optimizer steps with.
        state = schedule.state_dict()
    finally:
        engine.destroy()
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    engine = shardwise.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]
    try:
        schedule.load_state_dict(state)
        engine.backward(engine(x()).mean())
        engine.step()
        assert engine.get_lr() == [0.0625]
    finally:
        engine.destroy()


DECAY = {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 2, "total_num_steps": 8}}


def rates(steps: int, state: Any = None, optimizer_state: Any = None) -> tuple[list[float], Any, Any]:
    engine = started(optimizer=ADAMW, scheduler=DECAY, **zero(2))
    try:
        if state is not None:
            engine.lr_scheduler.load_state_dict(state)
            engine.optimizer.load_state_dict(optimizer_state)
        seen = []
        for step in range(steps):
            seen += engine.get_lr()
            engine.backward(engine(x(step)).square().mean())
            engine.step()
        return seen, engine.lr_scheduler.state_dict(), engine.optimizer.state_dict()
    finally:
        engine.destroy()


def test_5788_the_rate_does_not_jump_on_resume() -> None:
    whole, *_ = rates(8)
    first, state, optimizer_state = rates(4)
    second, *_ = rates(4, state, optimizer_state)
    assert first + second == whole


def test_transformers_10330_rates_can_be_read_when_the_first_steps_were_skipped() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 40}
    engine = started(optimizer=ADAMW, scheduler=DECAY, fp16=fp16)
    try:
        first = engine.lr_scheduler.get_last_lr()
        engine.backward(engine(x().half()).float().square().mean())
        engine.step()
        assert engine.skipped_steps == 1
        assert engine.lr_scheduler.get_last_lr() == first == engine.get_lr(), (
            "a skipped step is no step of the schedule"
        )
    finally:
        engine.destroy()
