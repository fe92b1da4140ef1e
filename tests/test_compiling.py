"""`compile`: the blocks run compiled, with the same numbers, at every stage, beside everything else that wraps them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import ConfigError
from shardwise.compiling import CompiledForward
from shardwise.sharding.access import register_external_parameter
from tests.checkpointing.models import BLOCKS, WIDTH, Lines, Model, NeverCalled, batch, made, said, start, train
from tests.compilers import COUNTED, Counting, counting_backend
from tests.ranks import RankPools
from tests.sharding.harness import Case, check
from tests.sharding.models import Block, Stack, Tokens, token_loss

EAGER = {"compile": {"enabled": True, "backend": "eager"}}
# Float64 on both sides: AOT autograd sums a gradient's terms in an order of its own, a few units in the 16th digit.
AOT = {"compile": {"enabled": True, "backend": "aot_eager", "kwargs": {"fullgraph": True}}}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def counting() -> Iterator[Counting]:
    with counting_backend() as found:
        yield found


@pytest.fixture
def log() -> Iterator[Lines]:
    with said() as lines:
        yield lines


def compiled(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m.__dict__.get("forward"), CompiledForward)]


# ---------------------------------------------------------------- the same numbers

# With the stages that a case is about.
CASES = {
    "blocks": (Case(Stack, steps=2, config=AOT), ["0", "1", "2", "3"]),
    "checkpointed, accumulated": (
        Case(Stack, steps=2, gas=2, config={**AOT, "activation_checkpointing": {"number_checkpoints": 2}}),
        ["2", "3s"],
    ),
    "a weight read elsewhere": (
        Case(
            lambda: Tokens("functional"),
            token_loss,
            steps=3,
            config={"compile": {**AOT["compile"], "deepcompile": True}},
        ),
        ["3"],
    ),
}


def train_compiled(name: str) -> None:
    torch._dynamo.reset()
    case, stages = CASES[name]
    for stage in stages:
        check(case, stage)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_norms_are_those_of_one_process(ranks: RankPools, name: str) -> None:
    ranks(2).run(train_compiled, name, timeout=110)


def dropout_and_checkpoints(stage: int) -> None:
    """Python's back-end runs the same kernels: bit for bit the same, also the dropout that is drawn again."""
    engine = start(made(), stage)
    expected = train(engine)
    engine.destroy()
    for section in ({}, {"enabled": True}, {"cpu_checkpointing": True, "number_checkpoints": 2}):
        model = made()
        engine = start(model, stage, activation_checkpointing=section, **EAGER)
        assert train(engine) == expected
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_dropout_is_that_of_the_uncompiled_model(ranks: RankPools, stage: int) -> None:
    ranks(2).run(dropout_and_checkpoints, stage)


def test_generated_code() -> None:
    """Inductor fuses and reorders float32 sums of 8 to 40 terms: 1e-6 each, three steps of AdamW pass it on. It is told
    to draw dropout as the uncompiled model does; left alone it draws other numbers."""
    engine = start(made(Model, 2))
    expected = train(engine)
    engine.destroy()
    section = {"enabled": True, "kwargs": {"options": {"fallback_random": True}}}
    engine = start(made(Model, 2), compile=section, activation_checkpointing={"enabled": True})
    for found, wanted in zip(train(engine), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)
    engine.destroy()


# ---------------------------------------------------------------- what is compiled


@pytest.mark.parametrize("again", [False, True], ids=["", "checkpointed"])
def test_blocks_of_one_class_share_their_code(counting: Counting, again: bool) -> None:
    engine = start(made(Stack12), compile=COUNTED, activation_checkpointing={"enabled": again})
    assert engine.is_compiled and len(compiled(engine.module)) == (0 if again else 12)
    for number in range(2):
        engine.backward(engine(batch(number)).square().mean())
        engine.step()
    engine.destroy()
    assert counting.graphs == 1 and counting.runs == 2 * 12 * (1 + again)


class Stack12(Stack):
    def __init__(self) -> None:
        super().__init__(12)


def test_by_hand_and_undone() -> None:
    model = made()
    engine = start(model, activation_checkpointing={"number_checkpoints": 2})
    assert not engine.is_compiled and compiled(model) == []
    engine.compile("eager", {"dynamic": False})
    assert engine.is_compiled
    assert compiled(model) == ["layers.1", "layers.3"], "the others lie in a checkpoint"
    assert all(isinstance(model.layers[i].forward.inner, CompiledForward) for i in (0, 2))
    engine.compile("aot_eager")
    assert train(engine) == train_plain()
    engine.destroy()
    assert all("forward" not in m.__dict__ for m in model.modules())
    model(batch(0)).backward()


def train_plain() -> list[Any]:
    engine = start(made())
    try:
        return train(engine)
    finally:
        engine.destroy()


def test_a_model_without_blocks_is_compiled_as_a_whole_below_stage_3() -> None:
    for stage in (0, 1, 2):
        model = made(Block)
        engine = start(model, stage, **EAGER)
        assert compiled(model) == [""]
        engine.backward(engine(batch(0)).square().mean())
        engine.step()
        engine.destroy()
        assert "forward" not in model.__dict__
    with pytest.raises(ConfigError, match=r"^compile: Block has no list of blocks .*stage 3 the model as a whole"):
        start(made(Block), 3, **EAGER)


class Borrows(nn.Module):
    """A block with a module inside that reads the model's weight, and says so."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        register_external_parameter(self.inner, weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()


class Lends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(Borrows(self.scale) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def gathers_inside() -> None:
    model = made(Lends)
    engine = start(model, 3, **EAGER)
    assert compiled(model) == []
    engine.backward(engine(batch(0)))
    engine.step()
    engine.destroy()


def test_a_block_with_gathers_inside_stays_as_it_is(ranks: RankPools) -> None:
    ranks(2).run(gathers_inside)


# ---------------------------------------------------------------- how often torch compiles


class Scaled(nn.Module):
    """Reads a number, which torch compiles into the code: each number is a variant."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x: torch.Tensor, *, more: float = 0.5) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale * more


class Numbered(nn.Module):
    def __init__(self, *scales: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled(scale) for scale in scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def step(engine: Any, number: int = 0) -> None:
    engine.backward(engine(batch(number)))
    engine.step()


def test_engines_do_not_use_up_each_others_variants(counting: Counting, log: Lines) -> None:
    for scale in range(torch._dynamo.config.recompile_limit + 2):
        counting.runs = 0
        engine = start(made(Numbered, scale, scale), compile=COUNTED)
        step(engine)
        assert counting.runs == 2
        engine.destroy()
    assert "uncompiled" not in str(log)


def test_evaluation_does_not_use_up_those_of_training(counting: Counting, log: Lines) -> None:
    engine = start(made(Numbered, 1, 1), compile=COUNTED)
    engine.eval()
    for scale in range(torch._dynamo.config.recompile_limit + 2):
        for layer in engine.module.layers:
            layer.scale = scale
        with torch.no_grad():
            engine(batch(0))
    assert counting.runs > 2, "evaluation is compiled, too"
    engine.train()
    counting.runs = 0
    step(engine)
    assert counting.runs == 2 and "uncompiled" not in str(log)
    engine.destroy()


@pytest.mark.parametrize("again", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("stage", [0, 3])
def test_blocks_beyond_the_limit_are_said_once(counting: Counting, log: Lines, again: bool, stage: int) -> None:
    more = {"activation_checkpointing": {"enabled": again}}
    engine = start(made(Numbered, *range(10)), stage, compile=COUNTED, **more)
    for number in range(3):
        step(engine, number)
    engine.destroy()
    said = "compile: 2 of 10 blocks ran uncompiled in the first training forward (layers.8, layers.9)"
    assert str(log).count(said) == 1 and counting.graphs == 8


def test_nothing_is_said_where_all_are_compiled(counting: Counting, log: Lines) -> None:
    for stage, model in ((0, made(Numbered, 1, 2)), (3, made(Numbered, 1, 2)), (0, made(Block))):
        engine = start(model, stage, compile=COUNTED)
        for number in range(2):
            engine.backward(engine(batch(number)).square().mean())
            engine.step()
        engine.destroy()
    assert counting.runs > 0 and "uncompiled" not in str(log) and "no effect: the model's" not in str(log)


def test_blocks_that_are_not_called_are_said(log: Lines) -> None:
    engine = start(made(NeverCalled), **EAGER)
    step(engine)
    step(engine)
    assert str(log).count("compile has no effect: the model's forward called none of its blocks (layers.0, ...)") == 1
    engine.destroy()


# ---------------------------------------------------------------- what is refused


def test_what_upstream_passes_to_its_own_compiler_is_refused() -> None:
    engine = start(made(Model, BLOCKS))
    with pytest.raises(ConfigError, match="schedule is a list of upstream's"):
        engine.compile(schedule=[(0, [])])
    with pytest.raises(ConfigError, match="compiled_autograd_enabled"):
        engine.compile(compiled_autograd_enabled=True)
    engine.destroy()
