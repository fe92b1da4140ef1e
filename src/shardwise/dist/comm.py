"""Every collective of shardwise. Nothing else in the library calls ``torch.distributed``'s collectives.

An :class:`Axis` is a set of ranks. One rank alone needs no process group: its collectives do nothing. On gloo the big
ones are exchanged directly (``isend``/``irecv`` into place, summed locally), because gloo's own reduce-scatter is an
all-reduce of the whole buffer. On every other backend torch's native call is used.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise import _torch
from shardwise.errors import CommError
from shardwise.dist.exchange import Exchange
from shardwise.dist.pool import BufferPool
from shardwise.dist.stuck import explain_failure


@dataclass
class Traffic:
    """What one kind of collective has cost this rank so far: calls, bytes it sent, seconds it waited."""

    calls: int = 0
    bytes_sent: int = 0
    seconds_waiting: float = 0.0


class Handle:
    """A collective in flight. ``wait()`` returns when the result may be read on the current stream."""

    def __init__(self, axis: Axis, what: str, works: Sequence[tuple[Any, int]], finish: Any = None) -> None:
        self._axis = axis
        self._what = what
        self._works = list(works)
        self._finish = finish

    def wait(self) -> None:
        """Wait for the result.

        Raises:
            CommError: a rank died or did not arrive within the axis's timeout; the message names it.
        """
        if not self._works and self._finish is None:
            return
        started = time.perf_counter()
        axis = self._axis
        works, self._works = self._works, []
        if axis.failed and works:
            raise CommError(f"`{self._what}`: an earlier collective on axis `{axis.name}` failed, see its error.")
        for work, peer in works:
            try:
                # Only the direct exchange takes a deadline here; native collectives have the group's own.
                if peer >= 0:
                    work.wait(axis.timeout)
                else:
                    work.wait()
            except RuntimeError as error:
                raise explain_failure(axis, self._what, peer, error) from error
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        axis.traffic[self._what.split(" ", 1)[0]].seconds_waiting += time.perf_counter() - started


@dataclass
class Axis:
    """Some ranks that talk to each other, and what they have said.

    Args:
        name: what errors and counters call it, e.g. ``"shard"``.
        ranks: the global ranks, in the order of their position on the axis.
        position: this process's place in ``ranks``.
        group: the process group, or None for an axis of one rank.
        timeout: how long a rank is waited for.

    Attributes:
        failed: a collective did not complete; the group is of no use any more.
    """

    name: str
    ranks: tuple[int, ...]
    position: int
    group: dist.ProcessGroup | None
    timeout: timedelta
    traffic: dict[str, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    pool: BufferPool = field(default_factory=BufferPool)
    failed: bool = False
    _exchange: Exchange | None = None

    def __post_init__(self) -> None:
        if self.group is not None and dist.get_backend(self.group) == "gloo":
            self._exchange = Exchange(self.group, self.ranks, self.position)

    @property
    def size(self) -> int:
        """How many ranks the axis has."""
        return len(self.ranks)

    def slice_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a flat buffer whose length is a multiple of the axis size."""
        k = flat.numel() // self.size
        return flat[self.position * k : (self.position + 1) * k]

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, key: str, tag: int) -> Handle:
        """Fill ``flat`` (n elements) from every rank's ``shard`` (n / size elements, may be its slice of ``flat``).

        Args:
            flat: the whole buffer, written in place.
            shard: this rank's part.
            key: what is gathered, for errors.
            tag: a number that no other collective of this axis uses while this one is in flight; the same on
                every rank for the same buffer, so that two ranks that gather different things never mix them up.
        """
        if self.group is None:
            return Handle(self, "all_gather", ())  # the shard is the whole
        what = self._count("all_gather", key, (self.size - 1) * shard.numel() * shard.element_size())
        if self._exchange is not None:
            own = self.slice_of(flat)
            if own.data_ptr() != shard.data_ptr():
                own.copy_(shard)
            return Handle(self, what, self._post(what, lambda x: x.all_gather(flat, tag)))
        work = _torch.all_gather_single(flat, shard, group=self.group, async_op=True)
        return Handle(self, what, [(work, -1)])

    def reduce_scatter(self, flat: torch.Tensor, key: str, tag: int) -> Handle:
        """Sum ``flat`` over the ranks; after ``wait()`` this rank's slice of ``flat`` holds its part of the sum.

        The rest of ``flat`` is undefined afterwards.
        """
        if self.group is None:
            return Handle(self, "reduce_scatter", ())
        own = self.slice_of(flat)
        what = self._count("reduce_scatter", key, (self.size - 1) * own.numel() * flat.element_size())
        if self._exchange is not None:
            inbox = self.pool.take(own.numel() * (self.size - 1), flat.dtype, flat.device)
            works = self._post(what, lambda x: x.scatter(flat, inbox, tag))
            return Handle(self, what, works, lambda: self._sum_inbox(own, inbox))
        work = _torch.reduce_scatter_single(own, flat, group=self.group, async_op=True)
        return Handle(self, what, [(work, -1)])

    def all_reduce(self, flat: torch.Tensor, key: str, tag: int) -> Handle:
        """Sum ``flat`` over the ranks in place; its length must be a multiple of the axis size."""
        if self.group is None:
            return Handle(self, "all_reduce", ())
        if self._exchange is None:
            self._count("all_reduce", key, 2 * (self.size - 1) * flat.numel() * flat.element_size() // self.size)
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            return Handle(self, f"all_reduce {key}", [(work, -1)])
        scattered = self.reduce_scatter(flat, key, tag)

        def gather() -> None:
            # Every rank holds the bits of the rank that summed, so replicated results are equal to the last bit.
            scattered.wait()
            self.all_gather(flat, self.slice_of(flat), key, tag).wait()

        return Handle(self, f"all_reduce {key}", (), gather)

    def sum_small(self, values: torch.Tensor, key: str) -> None:
        """Sum a small tensor (norms, flags, counts) over the ranks in place, now."""
        self._small(values, key, dist.ReduceOp.SUM)

    def max_small(self, values: torch.Tensor, key: str) -> None:
        """The largest of each entry of a small tensor over the ranks, in place, now."""
        self._small(values, key, dist.ReduceOp.MAX)

    def broadcast(self, tensor: torch.Tensor, position: int, key: str) -> None:
        """Copy a contiguous ``tensor`` from the rank at ``position`` of the axis to all, in place, now."""
        if self.group is None or tensor.numel() == 0:
            return
        sent = tensor.numel() * tensor.element_size() if position == self.position else 0
        what = self._count("broadcast", key, sent)
        raw = tensor.reshape(-1).view(torch.uint8) if self._exchange is not None else tensor
        work = dist.broadcast(raw, self.ranks[position], group=self.group, async_op=True)
        Handle(self, what, [(work, -1)]).wait()

    def barrier(self, key: str) -> None:
        """Return when every rank has called this."""
        if self.group is not None:
            Handle(self, self._count("barrier", key, 0), [(dist.barrier(self.group, async_op=True), -1)]).wait()

    def close(self) -> None:
        """Free the process group of this axis, if it has one of its own."""
        if self.group is not None and self.group is not dist.group.WORLD and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None
        self.pool = BufferPool()

    def _post(self, what: str, start: Callable[[Exchange], list[tuple[Any, int]]]) -> list[tuple[Any, int]]:
        if self._exchange is None:
            return []
        try:
            return start(self._exchange)
        except RuntimeError as error:  # the connection is gone already
            raise explain_failure(self, what, -1, error) from error

    def _small(self, values: torch.Tensor, key: str, op: Any) -> None:
        if self.group is None:
            return
        what = self._count("small", key, 2 * (self.size - 1) * values.numel() * values.element_size() // self.size)
        Handle(self, what, [(dist.all_reduce(values, op, group=self.group, async_op=True), -1)]).wait()

    def _sum_inbox(self, own: torch.Tensor, inbox: torch.Tensor) -> None:
        k = own.numel()
        parts = [inbox[i * k : (i + 1) * k] for i in range(self.size - 1)]
        # In the order of the ranks on every rank, so that the sum does not depend on who computes it.
        parts.insert(self.position, own)
        if own.dtype in (torch.float16, torch.bfloat16) and self.size > 2:
            total = parts[0].float()
            for part in parts[1:]:
                total.add_(part)
            own.copy_(total)
        else:
            torch.add(parts[0], parts[1], out=own) if self.size == 2 else own.copy_(sum(parts[1:], parts[0]))
        self.pool.give(inbox)

    def _count(self, op: str, key: str, sent: int) -> str:
        traffic = self.traffic[op]
        traffic.calls += 1
        traffic.bytes_sent += sent
        return f"{op} {key}"

    def __repr__(self) -> str:
        return f"Axis({self.name}, {self.position} of {self.size})"


__all__ = ["Axis", "CommError", "Handle", "Traffic"]
