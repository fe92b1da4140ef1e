"""Replicas: the gradients that `DistributedDataParallel` would show, in a model that is not wrapped."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import ShardingError
from shardwise.dist import Axis
from shardwise.sharding.replicas import Replicas
from tests.ranks import RankPools


class Net(nn.Module):
    """A trunk used twice, and two heads of which a rank may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.trunk = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))
        self.tied = nn.Linear(8, 11, bias=False)
        self.tied.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, head: int) -> torch.Tensor:
        x = self.trunk(torch.tanh(self.trunk(self.embed(ids))))
        return self.heads[head](x).sum(1) + self.tied(x).mean(1)


def everyone(timeout: float = 20.0) -> Axis:
    size, rank = dist.get_world_size(), dist.get_rank()
    return Axis("world", tuple(range(size)), rank, dist.group.WORLD, timedelta(seconds=timeout))


def prepared(model: nn.Module, bucket_numel: int = 60, **more: Any) -> Replicas:
    return Replicas(model, everyone(), first_tag=100, bucket_numel=bucket_numel, **more)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(100 * step + rank))


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def trains(heads: list[list[int]], accumulate: int, sync_each: bool) -> list[list[torch.Tensor | None]]:
    """Gradients before each step; head ``heads[step][rank]`` is used."""
    rank, torch_seed = dist.get_rank(), 3 + dist.get_rank()
    torch.manual_seed(torch_seed)  # ranks start from different values, and take over the first's
    model = Net().double()
    replicas = prepared(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen = []
    for step, row in enumerate(heads):
        for micro in range(accumulate):
            with replicas.averaging(sync_each or micro == accumulate - 1):
                model(batch(rank, step * accumulate + micro), row[rank]).square().sum().backward()
        seen.append(grads(model))
        optimizer.step()
        optimizer.zero_grad()
    replicas.close()
    return seen


def expected(heads: list[list[int]], accumulate: int, ranks: int) -> list[list[torch.Tensor | None]]:
    torch.manual_seed(3)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen = []
    for step, row in enumerate(heads):
        for micro in range(accumulate):
            for rank in range(ranks):
                loss = model(batch(rank, step * accumulate + micro), row[rank]).square().sum() / ranks
                loss.backward()
        seen.append(grads(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("sync_each", [False, True])
def test_gradients_are_those_of_one_process(ranks: RankPools, size: int, accumulate: int, sync_each: bool) -> None:
    # In the second step the ranks use different heads, in the third nobody uses the last one.
    heads = [[0] * size, [0, *[1] * (size - 1)], [1] * size, [2] * size]
    wanted = expected(heads, accumulate, size)
    for seen in ranks(size).run(trains, heads, accumulate, sync_each):
        for got, want in zip(seen, wanted, strict=True):
            for a, b in zip(got, want, strict=True):
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    # float64; only the order of the sum over micro-steps and ranks differs.
                    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def uses_the_forward_flag() -> list[bool]:
    model = nn.Linear(3, 1, bias=False)
    replicas = prepared(model)
    x = torch.full((1, 3), float(dist.get_rank() + 1))
    alike = []

    def note() -> None:
        assert model.weight.grad is not None
        mine = model.weight.grad.sum().reshape(1).double()
        ends = torch.cat([mine, -mine])
        everyone().max_small(ends, "test")
        alike.append(bool(ends[0] == -ends[1]))

    with replicas.averaging(False):
        first, second = model(x).sum(), model(x).sum()
    first.backward()  # outside, but its forward was inside
    note()
    with replicas.averaging_in_backward():
        second.backward()
    note()
    model.weight.grad = None
    model(x).sum().backward()
    note()
    replicas.close()
    return alike


def test_the_flag_counts_when_the_forward_runs(ranks: RankPools) -> None:
    assert ranks(2).run(uses_the_forward_flag) == [[False, True, True]] * 2


def edits_and_zeroes() -> list[float]:
    model = nn.Linear(2, 1, bias=False)
    replicas = prepared(model)
    rank = float(dist.get_rank())
    with torch.no_grad():
        model.weight.fill_(1.0)
    out = []
    model(torch.full((1, 2), rank)).sum().backward()
    out.append(float(model.weight.grad[0, 0]))  # 0.5
    model.weight.grad.mul_(4)  # an edit that the next backward adds to
    model(torch.full((1, 2), rank)).sum().backward()
    out.append(float(model.weight.grad[0, 0]))  # 2.5
    model.zero_grad(set_to_none=False)
    model(torch.full((1, 2), rank)).sum().backward()
    out.append(float(model.weight.grad[0, 0]))  # 0.5
    model.weight.grad = torch.full((1, 2), 10.0)  # replaced by the script
    model(torch.full((1, 2), rank)).sum().backward()
    out.append(float(model.weight.grad[0, 0]))  # 10.5
    copied = copy.deepcopy(model)
    copied(torch.ones(1, 2)).sum().backward()  # a copy is nobody's
    replicas.close()
    out.append(float(model.weight.grad[0, 0]))
    return out


def test_gradients_are_the_scripts_to_edit(ranks: RankPools) -> None:
    assert ranks(2).run(edits_and_zeroes) == [[0.5, 2.5, 0.5, 10.5, 10.5]] * 2


def keeps_buffers(broadcast: bool) -> list[float]:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    replicas = prepared(model, broadcast_buffers=broadcast)
    for _ in range(2):
        model(torch.randn(8, 2) + 10 * dist.get_rank()).sum().backward()
    model.eval()
    replicas.close()
    return [round(float(v), 3) for v in model[0].running_mean]


def test_buffers_are_the_first_ranks(ranks: RankPools) -> None:
    first, second = ranks(2).run(keeps_buffers, True)
    assert abs(first[0]) < 0.5 < second[0] < 1.5  # one update of its own (momentum 0.1) since the last exchange
    first, second = ranks(2).run(keeps_buffers, False)
    assert second[0] > 1.5


def fails_and_goes_on() -> list[float]:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("in the middle")

    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    replicas = prepared(model, bucket_numel=2)
    x = torch.ones(1, 2)
    with pytest.raises(ValueError, match="middle"):
        model[1](Breaks.apply(model[0](x))).sum().backward()
    with pytest.warns(UserWarning, match="did not end"):
        model(x).sum().backward()
    values = [float(p.grad.sum()) for p in model.parameters()]
    replicas.close()
    return values


def test_a_backward_that_fails_drops_its_gradients(ranks: RankPools) -> None:
    first, second = ranks(2).run(fails_and_goes_on)
    assert first == pytest.approx(second)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.other(x)
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x.sum()


def checkpoints(steps: int) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    model = Shared().double()
    replicas = prepared(model, bucket_numel=8)
    for step in range(steps):
        model.zero_grad()
        x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).backward()
    replicas.close()
    return grads(model)


def test_reentrant_checkpoints_that_share_a_block(ranks: RankPools) -> None:
    torch.manual_seed(0)
    model = Shared().double()
    for rank in range(2):
        x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(20 + rank))
        (model(x) / 2).backward()
    for got in ranks(2).run(checkpoints, 3):
        torch.testing.assert_close(got, grads(model), rtol=1e-12, atol=1e-12)


def refuses_new_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    replicas = prepared(model)
    model.append(nn.Linear(2, 2))
    try:
        model(torch.ones(1, 2))
    finally:
        replicas.close()


def test_parameters_added_later_are_refused(ranks: RankPools) -> None:
    errors = ranks(2).run_expecting(ShardingError, refuses_new_parameters, match="1.weight was added")
    assert len(errors) == 2


def unfreezes() -> list[float]:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    replicas = prepared(model)
    with torch.no_grad():
        model[0].weight.fill_(1), model[1].weight.fill_(1)
    model[0].requires_grad_(False)
    x = torch.full((1, 1), float(dist.get_rank()))
    model(x).sum().backward()
    frozen = model[0].weight.grad is None
    model[0].requires_grad_(True)
    model.zero_grad()
    model(x).sum().backward()
    replicas.close()
    return [float(frozen), float(model[0].weight.grad)]


def test_parameters_may_be_frozen_and_unfrozen(ranks: RankPools) -> None:
    assert ranks(2).run(unfreezes) == [[1.0, 0.5]] * 2
