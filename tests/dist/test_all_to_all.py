"""The exchange of parts of unequal sizes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise.dist import Mesh


def exchange(dtype: torch.dtype) -> tuple[list[float], int]:
    """Rank r sends r + 2 * i elements of value 10 * r + i to rank i; nothing to the rank after it where r is 0."""
    mesh = Mesh.build(timeout=timedelta(seconds=20))
    axis, me = mesh.world, dist.get_rank()

    def size(source: int, to: int) -> int:
        return 0 if (source, to) == (0, 1) else source + 2 * to

    sent = [size(me, to) for to in range(axis.size)]
    received = [size(source, me) for source in range(axis.size)]
    outbox = torch.cat([torch.full((n,), 10.0 * me + to, dtype=dtype) for to, n in enumerate(sent)])
    inbox = torch.full((sum(received),), -1.0, dtype=dtype)
    axis.all_to_all(outbox, sent, inbox, received, "parts", 3).wait()
    expected = torch.cat([torch.full((n,), 10.0 * source + me, dtype=dtype) for source, n in enumerate(received)])
    assert torch.equal(inbox, expected)
    assert axis.traffic["all_to_all"].bytes_sent == (sum(sent) - sent[me]) * dtype.itemsize
    mesh.close()
    return inbox.tolist(), len(received)


def test_each_rank_gets_its_parts_in_the_order_of_the_ranks(ranks: Any) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        ranks(3).run(exchange, dtype)


def test_one_rank_copies() -> None:
    axis = Mesh.build(timeout=timedelta(seconds=20)).world
    inbox = torch.zeros(3)
    axis.all_to_all(torch.ones(3), [3], inbox, [3], "parts", 0).wait()
    assert inbox.tolist() == [1.0] * 3
