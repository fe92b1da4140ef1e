"""`activation_checkpointing` from the configuration alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import shardwise
from shardwise import ConfigError
from shardwise.checkpointing.blocks import CheckpointedForward, spread
from tests.checkpointing.models import (
    BLOCKS,
    LENGTH,
    ROWS,
    WIDTH,
    Block,
    Kept,
    Lines,
    Model,
    NeverCalled,
    batch,
    counted,
    made,
    start,
    train,
)
from tests.ranks import RankPools

ON = {"activation_checkpointing": {"enabled": True}}


def checkpointed(model: nn.Module) -> list[int]:
    return [i for i, m in enumerate(model.layers) if isinstance(m.__dict__.get("forward"), CheckpointedForward)]


# ---------------------------------------------------------------- the same numbers, in less memory

SECTIONS = {
    "all": {"enabled": True},
    "two": {"number_checkpoints": 2},
    "host": {"cpu_checkpointing": True},
    "everything": {
        "enabled": True,
        "partition_activations": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": 3,
        "synchronize_checkpoint_boundary": True,
        "profile": True,
    },
}


def compare_all_stages() -> None:
    """fp32 and dropout, yet bit for bit: both runs do the same sums in the same order, the second twice."""
    for stage in (0, 1, 2, 3):
        plain = made()
        engine = start(plain, stage)
        expected = train(engine, 2)
        state = engine.module_state_dict()
        engine.destroy()
        assert len(set(expected)) == len(expected)
        for name, section in SECTIONS.items():
            if stage in (1, 2) and name != "everything":
                continue
            model = counted(made())
            engine = start(model, stage, activation_checkpointing=section)
            assert train(engine, 2) == expected, (stage, name)
            found = engine.module_state_dict()
            assert all(torch.equal(found[key], value) for key, value in state.items()), (stage, name)
            again = len(checkpointed(model))
            assert again == {"two": 2, "everything": 3}.get(name, BLOCKS)
            assert sum(model.runs) == 2 * (BLOCKS + again)
            engine.destroy()
            assert checkpointed(model) == [] and all("forward" not in m.__dict__ for m in model.modules())


def test_losses_and_norms_are_those_without_it_bit_for_bit(ranks: RankPools) -> None:
    ranks(2).run(compare_all_stages)


@pytest.mark.parametrize(("number", "kept"), [(None, 4), (4, 4), (9, 4), (2, 2), (1, 1)])
def test_a_checkpointed_block_keeps_its_input_only(number: int | None, kept: int) -> None:
    def count(**keys: Any) -> int:
        engine = start(made(), **keys)
        with Kept(engine.module) as seen:
            engine(batch(0))
        engine.destroy()
        return seen.nbytes

    none = count()
    some = count(activation_checkpointing={"enabled": True, "number_checkpoints": number})
    tokens = ROWS * LENGTH
    # In fp32, of each block: the input of `up`, the output of tanh and the input of `down`. (Then the norm's mean and
    # deviation and dropout's mask, whose bytes are torch's business.)
    saved = tokens * (WIDTH + 4 * WIDTH + 4 * WIDTH) * 4
    assert none - some >= kept * saved
    if kept == BLOCKS:
        # What is left: the input of each block and of the first and last layer, the losses, tables and masks.
        assert some <= (BLOCKS + 3) * tokens * WIDTH * 4 + 1000 < none / 3


def test_the_blocks_are_evenly_spread() -> None:
    blocks = {f"b{i}": nn.Identity() for i in range(12)}
    assert list(spread(blocks, 4)) == ["b0", "b3", "b6", "b9"]
    assert list(spread(blocks, 5)) == ["b0", "b2", "b4", "b7", "b9"]
    assert list(spread(blocks, 1)) == ["b0"] and list(spread(blocks, 12)) == list(spread(blocks, None)) == list(blocks)


# ---------------------------------------------------------------- what it does not touch


def test_evaluation_and_no_grad_are_plain_calls() -> None:
    model = counted(made())
    engine = start(model, **ON)
    with torch.no_grad():
        engine(batch(0))
    engine.eval()
    engine(batch(0)).backward()
    assert model.runs == [2] * BLOCKS
    engine.train()
    engine.backward(engine(batch(0)))
    assert model.runs == [4] * BLOCKS
    engine.destroy()


class Fails(Block):
    fail = False

    def forward(self, x: torch.Tensor, tables: Any, *, mask: Any = None) -> tuple[Any, ...]:
        if self.fail:
            raise ValueError("the block's own")
        return super().forward(x, tables, mask=mask)


class MayFail(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Fails() for _ in range(BLOCKS))


def raise_inside(stage: int) -> None:
    expected = start(made(MayFail), stage)
    wanted = train(expected)
    expected.destroy()
    model = made(MayFail)
    engine = start(model, stage, activation_checkpointing={"cpu_checkpointing": True})
    model.layers[2].fail = True
    with pytest.raises(ValueError, match="the block's own"):
        engine(batch(0))
    model.layers[2].fail = False
    loss = engine(batch(0))
    model.layers[1].fail = True  # now in the recomputation
    with pytest.raises(ValueError, match="the block's own"):
        engine.backward(loss)
    model.layers[1].fail = False
    assert train(engine) == wanted
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_after_an_exception_inside_a_block_training_goes_on(ranks: RankPools, stage: int) -> None:
    ranks(2).run(raise_inside, stage)


def two_engines(stage: int) -> None:
    """In turn, their forwards before both backwards."""
    alone = []
    for seed in (0, 1):
        engine = start(made(Model, BLOCKS - seed), stage)
        alone.append(train(engine))
        engine.destroy()
    engines = [start(made(Model, BLOCKS - seed), stage, **ON) for seed in (0, 1)]
    for step in range(3):
        losses = []
        for engine in engines:
            torch.manual_seed(1000 * step + engine.global_rank)
            losses.append(engine(batch(step, engine.global_rank)))
        for i in (0, 1):
            engines[i].backward(losses[i])
            engines[i].step()
            assert (losses[i].item(), engines[i].get_global_grad_norm()) == alone[i][step]
    engines[0].destroy()
    assert checkpointed(engines[1].module)
    engines[1].destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_two_engines(ranks: RankPools, stage: int) -> None:
    ranks(2).run(two_engines, stage)


# ---------------------------------------------------------------- checkpoints of the model's own


class ByHand(Model):
    """Checkpoints itself: each block from outside, or the inside of each block."""

    def __init__(self, how: str, run: Any) -> None:
        super().__init__()
        self.how, self.run = how, run
        if how == "inside":
            for layer in self.layers:
                layer.forward = functools.partial(run, layer.forward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "inside":
            return super().forward(x)
        tables = (torch.ones(WIDTH) * 0.1, {"scale": torch.full((), 1.5)})
        x = self.first(x)
        for layer in self.layers:
            x = self.run(self.only, layer, x, tables)
        return self.last(x).square().mean()

    @staticmethod
    def only(layer: nn.Module, x: torch.Tensor, tables: Any) -> torch.Tensor:
        return layer(x, tables)[0]


RUNS = {
    "torch": functools.partial(torch_checkpoint, use_reentrant=False),
    "torch, re-entrant": functools.partial(torch_checkpoint, use_reentrant=True),
    "shardwise": shardwise.checkpointing.checkpoint,
}


def by_hand(how: str, name: str, stage: int) -> None:
    engine = start(made(ByHand, how, lambda function, *args, **kwargs: function(*args, **kwargs)), stage)
    expected = train(engine)
    engine.destroy()
    model = counted(made(ByHand, how, RUNS[name]))
    engine = start(model, stage, **ON)
    assert train(engine) == expected
    assert model.runs == [3 * 2] * BLOCKS
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("how", "name"),
    [("outside", "torch"), ("outside", "torch, re-entrant"), ("outside", "shardwise"), ("inside", "torch"),
     ("inside", "shardwise")],
)  # fmt: skip
def test_what_the_model_checkpoints_itself_is_not_done_twice(ranks: RankPools, how: str, name: str, stage: int) -> None:
    ranks(2).run(by_hand, how, name, stage)


# ---------------------------------------------------------------- what it says


def test_it_says_which_blocks(log: Lines) -> None:
    start(made(), **ON).destroy()
    assert "activation checkpointing: 4 of 4 blocks: layers.0 .. layers.3" in str(log)
    start(made(), activation_checkpointing={"number_checkpoints": 2}).destroy()
    assert "activation checkpointing: 2 of 4 blocks: layers.0, layers.2" in str(log)


def test_profile_is_in_the_log_line(log: Lines) -> None:
    engine = start(made(), activation_checkpointing={"enabled": True, "profile": True}, steps_per_print=3)
    train(engine)
    engine.destroy()
    line = next(line for line in log.lines if line.startswith("step 3 |"))
    assert "checkpointed forward " in line and "| recompute " in line and line.count(" ms") >= 3


def test_a_checkpoint_around_a_block_is_said_once(log: Lines) -> None:
    engine = start(made(ByHand, "outside", RUNS["torch"]), **ON)
    train(engine)
    engine.destroy()
    assert str(log).count("layers.0 lies in a checkpoint of the model's own") == 1
    assert "layers.1 lies" not in str(log)


def test_blocks_that_are_not_called_are_said(log: Lines) -> None:
    engine = start(made(NeverCalled), **ON)
    engine.backward(engine(batch(0)))
    assert "has no effect: the model's forward called none of its blocks (layers.0, ...)" in str(log)
    engine.destroy()


@pytest.mark.parametrize("model", [nn.Linear(WIDTH, 2), nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 2))])
def test_a_model_without_blocks_is_refused_before_it_is_changed(model: nn.Module) -> None:
    with pytest.raises(
        ConfigError, match=r"^activation_checkpointing.enabled: \w+ has no list of blocks .*checkpointing\.checkpoint"
    ):
        start(model, **ON)
    start(model).destroy()


def test_off() -> None:
    for section in ({}, {"enabled": False, "cpu_checkpointing": True}, {"contiguous_memory_optimization": True}):
        model = made()
        engine = start(model, activation_checkpointing=section)
        assert checkpointed(model) == []
        engine.destroy()


# ---------------------------------------------------------------- what the user has compiled


def test_a_model_compiled_as_a_whole(log: Lines) -> None:
    expected = start(made())
    wanted = train(expected)
    expected.destroy()
    model = counted(made())
    engine = start(torch.compile(model, backend="eager"), **ON)
    assert train(engine) == wanted and model.runs == [6] * BLOCKS
    engine.destroy()
    assert "the model was compiled as a whole" in str(log)


def test_blocks_compiled_by_the_user() -> None:
    expected = start(made())
    wanted = train(expected)
    expected.destroy()
    model = made()
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend="eager")
    before = [layer.forward for layer in model.layers]
    engine = start(model, **ON)
    assert checkpointed(model) == list(range(BLOCKS))
    engine.compile("eager")
    assert train(engine) == wanted
    engine.destroy()
    assert [layer.forward for layer in model.layers] == before
