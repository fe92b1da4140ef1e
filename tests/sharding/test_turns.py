"""Models that one backward goes through together reduce in one order on all ranks, whatever each rank used."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from shardwise.dist import Axis
from shardwise.sharding.replicas import Replicas
from shardwise.sharding.turns import Turns
from tests.ranks import RankPools


class Pair(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.full((3,), value)), nn.Parameter(torch.full((3,), value))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return (x * self.used).sum() + ((x * self.unused).sum() if both else 0)


def of_two_models(native: bool) -> tuple[list[str], list[list[float]]]:
    """The collectives in their order, and the gradients. One rank leaves a parameter of the first model unused."""
    rank = dist.get_rank()
    axis = Axis("world", (0, 1), rank, dist.group.WORLD, timedelta(seconds=20))
    if native:
        axis._exchange = None  # as on NCCL: collectives are matched by their order alone
    order: list[str] = []

    class Watch:
        def issued(self, axis: Axis, op: str, key: str, sent: int) -> None:
            if op == "all_reduce":
                order.append(key)

        def waiting(self, note: None) -> None: ...

        def done(self, note: None) -> None: ...

    axis.observer = Watch()
    turns = Turns()
    models = [Pair(1.0), Pair(2.0)]
    replicas = []
    for number, model in enumerate(models):
        tag = 100 * (number + 1)
        replicas.append(Replicas(model, axis, first_tag=tag, bucket_numel=1, turns=turns))
    for _ in range(2):  # the second round has learnt its orders
        order.clear()
        for model in models:
            model.zero_grad()
        x = torch.full((3,), float(rank + 1))
        (models[1](x, True) * 10 + models[0](x, rank == 0)).backward()
    found = [[float(p.grad[0]) for p in m.parameters() if p.grad is not None] for m in models]
    for one in replicas:
        one.close()
    return order, found


def test_two_models_are_averaged_in_one_order(ranks: RankPools) -> None:
    for native in (False, True):
        (first, mine), (second, others) = ranks(2).run(of_two_models, native)
        assert first == second and len(first) == 4
        assert mine == others == [[1.5, 0.5], [15.0, 15.0]]
