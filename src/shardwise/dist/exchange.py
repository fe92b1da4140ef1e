"""Direct exchange on gloo: each pair of ranks sends and receives the slices it owes, into place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class Exchange:
    """Posts sends and receives between the ranks of one group.

    Every exchange carries a tag of its own, so that several may be in flight between the same two ranks, and ranks
    that diverged wait for a message that never comes (and say so) instead of reading another buffer's bytes.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...], position: int) -> None:
        self._group = group
        self._ranks = ranks
        self._position = position

    def all_gather(self, flat: torch.Tensor, tag: int) -> list[tuple[Any, int]]:
        """Send this rank's slice of ``flat`` to all others and receive theirs in place."""
        size, me = len(self._ranks), self._position
        k = flat.numel() // size
        if k == 0:
            return []
        raw = _bytes(flat)
        k = raw.numel() // size
        own = raw[me * k : (me + 1) * k]
        works: list[tuple[Any, int]] = []
        for step in range(1, size):
            source, target = (me - step) % size, (me + step) % size
            works.append(self._receive(raw[source * k : (source + 1) * k], source, tag))
            works.append(self._send(own, target, tag))
        return works

    def scatter(self, flat: torch.Tensor, inbox: torch.Tensor, tag: int) -> list[tuple[Any, int]]:
        """Send slice i of ``flat`` to rank i; ``inbox`` receives the others' versions of this rank's slice.

        ``inbox`` is filled in the order of the ranks, this rank left out.
        """
        size, me = len(self._ranks), self._position
        if inbox.numel() == 0:
            return []
        raw, into = _bytes(flat), _bytes(inbox)
        k = raw.numel() // size
        works: list[tuple[Any, int]] = []
        for step in range(1, size):
            source, target = (me - step) % size, (me + step) % size
            row = source if source < me else source - 1
            works.append(self._receive(into[row * k : (row + 1) * k], source, tag))
            works.append(self._send(raw[target * k : (target + 1) * k], target, tag))
        return works

    def all_to_all(
        self, outbox: torch.Tensor, sent: Sequence[int], inbox: torch.Tensor, received: Sequence[int], tag: int
    ) -> list[tuple[Any, int]]:
        """Send consecutive parts of ``outbox`` to the ranks in turn; ``inbox`` receives theirs in the same order."""
        size, me = len(self._ranks), self._position
        outgoing, incoming = torch.split(outbox, list(sent)), torch.split(inbox, list(received))
        works: list[tuple[Any, int]] = []
        for step in range(1, size):
            source, target = (me - step) % size, (me + step) % size
            if received[source]:
                works.append(self._receive(_bytes(incoming[source]), source, tag))
            if sent[target]:
                works.append(self._send(_bytes(outgoing[target]), target, tag))
        if sent[me]:
            incoming[me].copy_(outgoing[me])
        return works

    def _send(self, part: torch.Tensor, target: int, tag: int) -> tuple[Any, int]:
        return dist.isend(part, self._ranks[target], group=self._group, tag=tag), self._ranks[target]

    def _receive(self, part: torch.Tensor, source: int, tag: int) -> tuple[Any, int]:
        return dist.irecv(part, self._ranks[source], group=self._group, tag=tag), self._ranks[source]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # gloo moves bytes; as bytes every dtype goes through, bfloat16 and float8 included.
    return tensor.view(torch.uint8)
