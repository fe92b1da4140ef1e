"""A sharded model computes what the plain one does: structures that break sharding, at every stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise import ShardingError
from tests.ranks import RankPools
from tests.sharding.harness import STAGES, WIDTH, At, Case, built, check, config, copied, momentum, start
from tests.sharding.models import Block, Stack, Tokens, token_loss


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(torch.tanh(self.other(torch.tanh(self.lin(x))))) + self.lin(x * 2)


class TwoShareAWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class SharedModule(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.b = self.a

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.mid(self.a(x)))


class OddSizes(nn.Module):
    """Parameters with 0, 1 and 2 elements, 0-d, in the root and in modules, beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))
        self.nothing2d = nn.Parameter(torch.empty(3, 0))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.ones(1))
        self.two = nn.Parameter(torch.ones(2))
        self.lin = nn.Linear(WIDTH, 1)
        self.only = nn.Module()
        self.only.one = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x) * self.one + self.scalar * self.two.sum() + self.only_one(x)
        return y + self.nothing.sum() + self.nothing2d.sum()

    def only_one(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] * self.only.one


@dataclass
class Out:
    hidden: torch.Tensor
    extra: Any


class Returns(nn.Module):
    """Returns its output in the given kind of container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.lin(x))
        if self.kind == "none":
            self.kept = y
            return None
        kinds = {
            "tuple": (y, None, 3),
            "list": [x, [y]],
            "dict": {"y": y, "x": x},
            "dataclass": Out(y, {"x": x}),
        }
        return kinds[self.kind]


class OddOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for kind in ("tuple", "list", "dict", "dataclass", "none"):
            setattr(self, kind, Returns(kind))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tuple(x)[0]
        x = self.list(x)[1][0]
        x = self.dict(x)["y"]
        x = self.dataclass(x).hidden
        assert self.none(x) is None
        x = self.none.kept
        del self.none.kept
        return self.last(x)


class OddBlocks(nn.Module):
    """The same containers, returned by blocks: what is gathered around them is their whole subtree."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Returns(kind) for kind in ("tuple", "list", "dict", "dataclass"))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)[0]
        x = self.blocks[1](x)[1][0]
        x = self.blocks[2](x)["y"]
        x = self.blocks[3](x).hidden
        return self.last(x)


class PassesThrough(nn.Module):
    """Gives its input back beside its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, y + torch.tanh(self.lin(x))


class PassThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(PassesThrough() for _ in range(3))
        self.identity = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, y = self.first(x), torch.zeros_like(x)
        for layer in self.layers:
            x, y = layer(x, y)
        return self.identity(y) + x


class InPlace(nn.Module):
    """Modules whose output is written in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.a(x))
        y = self.b(x)
        y.add_(x)
        return y


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor, *, other: torch.Tensor, skip: bool = False) -> torch.Tensor:
        x = self.a(x) + self.b(input=other)
        for i, block in enumerate(self.blocks):
            if not (skip and i == 0):
                x = block(x)
        return x


def two_inputs(model: nn.Module, at: At) -> torch.Tensor:
    # On odd steps no rank runs the first block.
    out: torch.Tensor = model(at.x, other=at.draw(2, WIDTH, salt=1), skip=at.step % 2 == 1)
    return out.square().mean()


class Norms(nn.Module):
    """BatchNorm: its buffers are per rank, its parameters are not; here only its statistics of evaluation are used."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))
        self.register_buffer("hidden", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.lin(x)) * self.scale * self.hidden


def eval_norms(model: nn.Module, step: int) -> None:
    model.get_submodule("norm").eval()


class Complex(nn.Module):
    """Weights read through views, a list, and a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.randn(WIDTH, WIDTH) * 0.3 for _ in range(3)])
        self.named = nn.ParameterDict({"w": torch.randn(WIDTH, WIDTH) * 0.3})
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.lin(x))
        for w in self.parts:
            x = torch.tanh(x @ w.t())
        return x @ self.named["w"][:, :4]


class WeightNormed(nn.Module):
    """Parametrized weights are made of parameters that a child module owns."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


class NestedLists(nn.Module):
    """Lists in a list: neither runs itself, only their members do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            for block in layer:
                x = block(x)
        return x


class PartsOfBlocks(nn.Module):
    """The parts of a block are called, never the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block.down(torch.tanh(block.up(block.norm(x))))
        return x


class Attention(nn.Module):
    """torch's own modules use the weights of their children functionally."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(1, *x.shape)
        x = x + self.attention(x, x, x)[0]
        return self.rnn(self.encoder(x))[0]


def freeze_first(model: nn.Module) -> nn.Module:
    model.get_submodule("first").requires_grad_(False)
    model.get_submodule("blocks.0").requires_grad_(False)
    model.get_parameter("blocks.1.up.bias").requires_grad_(False)
    return model


def freeze_last(model: nn.Module) -> nn.Module:
    model.get_submodule("last").requires_grad_(False)
    model.get_submodule("blocks.2").requires_grad_(False)
    return model


def only_bias_trained(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    model.get_parameter("blocks.1.up.bias").requires_grad_(True)
    return model


def frozen_then_not(model: nn.Module, step: int) -> None:
    model.get_submodule("first").requires_grad_(step >= 2)
    model.get_submodule("blocks.1").requires_grad_(step >= 1)
    model.get_parameter("blocks.2.up.bias").requires_grad_(step >= 3)


def trained_then_frozen(model: nn.Module, step: int) -> None:
    model.get_submodule("first").requires_grad_(step < 2)
    model.get_submodule("blocks.1").requires_grad_(step < 1)
    model.get_parameter("blocks.2.up.bias").requires_grad_(step < 3)


def frozen_and_back(model: nn.Module, step: int) -> None:
    model.get_submodule("blocks.1").requires_grad_(step not in (1, 2))
    model.get_parameter("last.bias").requires_grad_(step != 1)


def mixed_dtypes(model: nn.Module, at: At) -> torch.Tensor:
    out: torch.Tensor = model(at.x)
    return out.square().mean()


class Integers(nn.Module):
    """A parameter that is no floating-point number, as quantised weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.arange(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.table


class NonContiguous(nn.Module):
    """A parameter whose memory is transposed, and one that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.randn(WIDTH, 4).t())
        self.lin = nn.Linear(4, 3)
        self.conv = nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(F.linear(x, self.t))
        return y.sum() + self.conv(x.view(2, 1, 2, 4).repeat(1, 1, 2, 1)).square()


CASES = {
    "plain": Case(Stack),
    "plain, gas 3": Case(Stack, gas=3),
    "plain, SGD": Case(Stack, optimizer=momentum, gas=2),
    "module called twice": Case(CalledTwice),
    "block called twice": Case(lambda: Stack(2, [0, 1, 0, 0])),
    "blocks in another order": Case(lambda: Stack(3, [2, 0, 1])),
    "tied embedding": Case(lambda: Tokens("module"), token_loss),
    "untied embedding": Case(lambda: Tokens("no"), token_loss, gas=2),
    "functional head": Case(lambda: Tokens("functional"), token_loss, gas=2),
    "tied linears": Case(TwoShareAWeight),
    "one module, two names": Case(SharedModule),
    "odd sizes": Case(OddSizes),
    "odd sizes, SGD": Case(OddSizes, optimizer=momentum),
    "odd outputs": Case(OddOutputs),
    "odd outputs of blocks": Case(OddBlocks),
    "output passes through": Case(PassThrough),
    "in place": Case(InPlace),
    "keywords, a block skipped": Case(Keywords, two_inputs),
    "buffers": Case(Norms, before=eval_norms),
    "parameter lists": Case(Complex),
    "parametrized": Case(WeightNormed),
    "attention": Case(Attention),
    "nested lists": Case(NestedLists),
    "parts of blocks": Case(PartsOfBlocks),
    "integers": Case(Integers),
    "memory formats": Case(NonContiguous),
    "Sequential": Case(lambda: nn.Sequential(Block(), nn.Tanh(), Block(), nn.Linear(WIDTH, 2))),
    "one Linear": Case(lambda: nn.Linear(WIDTH, 2)),
    "frozen start": Case(lambda: freeze_first(Stack())),
    "frozen end": Case(lambda: freeze_last(Stack())),
    "almost all frozen": Case(lambda: only_bias_trained(Stack()), gas=2),
    "unfrozen later": Case(Stack, before=frozen_then_not, steps=5),
    "frozen later": Case(Stack, before=trained_then_frozen, steps=5),
    "frozen for a while": Case(Stack, before=frozen_and_back, steps=5, gas=2),
    "bucket as large as a parameter": Case(Stack, zero={"reduce_bucket_size": 2 * WIDTH * WIDTH}),
    "bucket of one element": Case(Stack, zero={"reduce_bucket_size": 1, "allgather_bucket_size": 1}),
    "bucket larger than the model": Case(Stack, zero={"reduce_bucket_size": 10**12, "allgather_bucket_size": 10**12}),
    "sub-groups": Case(Stack, zero={"sub_group_size": 50}),
    "gradients left in place": Case(Stack, gas=2, zero={"contiguous_gradients": False}),
    "all-reduced gradients": Case(Stack, gas=2, zero={"reduce_scatter": False}),
    "broadcast parameters": Case(Stack, zero={"allgather_partitions": False}),
    "clipped": Case(Stack, gas=2, clip=0.05),
    "clipped, SGD": Case(Stack, optimizer=momentum, clip=0.05),
    "blocks as leaves": Case(Stack, zero={"leaf_module": {"classes": ["Stack"]}}),
}


def train(name: str, stage: str) -> None:
    check(CASES[name], stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_trains_as_plain_torch_does(ranks: RankPools, name: str, stage: str) -> None:
    ranks(2).run(train, name, stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["odd sizes", "tied embedding", "frozen for a while", "plain, gas 3"])
def test_three_ranks(ranks: RankPools, name: str, stage: str) -> None:
    ranks(3).run(train, name, stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["odd sizes", "functional head", "unfrozen later"])
def test_one_process(ranks: RankPools, name: str, stage: str) -> None:
    ranks(1).run(train, name, stage)


HYBRID = {
    "MiCS": Case(Stack, gas=2, zero={"mics_shard_size": 2}),
    "MiCS of one": Case(Stack, zero={"mics_shard_size": 1}),
    "hpZ": Case(Stack, gas=2, zero={"zero_hpz_partition_size": 2}),
    "hpZ, tied": Case(lambda: Tokens("module"), token_loss, zero={"zero_hpz_partition_size": 2}),
}


def train_hybrid(name: str, stage: str) -> None:
    check(HYBRID[name], stage)


@pytest.mark.parametrize(
    ("name", "stage"), [("MiCS", "3"), ("MiCS", "3s"), ("MiCS of one", "3"), ("hpZ", "3"), ("hpZ, tied", "3s")]
)
def test_hybrid_sharding_on_four_ranks(ranks: RankPools, name: str, stage: str) -> None:
    ranks(4).run(train_hybrid, name, stage)


def refuse_new_parameter(stage: str) -> None:
    model = built(Stack)
    engine = start(model, stage)
    try:
        model.get_submodule("blocks.1").register_parameter("lora", nn.Parameter(torch.zeros(2)))
        with pytest.raises(ShardingError, match=r"blocks\.1\.lora was added or replaced after"):
            engine(At(0, 0, 0).x)
        del model.blocks[1].lora  # type: ignore[union-attr]
        old = model.last.bias
        model.last.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))  # type: ignore[union-attr]
        with pytest.raises(ShardingError, match=r"last\.bias was added or replaced after"):
            engine(At(0, 0, 0).x)
        model.last.bias = old  # type: ignore[union-attr]
        engine(At(0, 0, 0).x)
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_added_later_are_named(ranks: RankPools, stage: str) -> None:
    ranks(2).run(refuse_new_parameter, stage)


def refuse_meta() -> None:
    with torch.device("meta"):
        model = Stack()
    with pytest.raises(ShardingError, match=r"first\.weight is on the meta device"):
        shardwise.initialize(model=model, config=config("3"))


def test_meta_parameters_are_refused(ranks: RankPools) -> None:
    ranks(2).run(refuse_meta)


def start_from_different_values(stage: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    model = Norms().double()
    model.get_buffer("scale").fill_(torch.distributed.get_rank())
    engine = start(model, stage)
    state = engine.module_state_dict()
    engine.destroy()
    return state


@pytest.mark.parametrize("stage", STAGES)
def test_every_rank_starts_from_rank_0(ranks: RankPools, stage: str) -> None:
    first, second = ranks(2).run(start_from_different_values, stage)
    torch.manual_seed(0)
    expected = copied(Norms().double())
    expected["scale"].fill_(0)
    for state in (first, second):
        assert all(torch.equal(state[name], value) for name, value in expected.items())
