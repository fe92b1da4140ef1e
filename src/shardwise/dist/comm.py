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
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwise import _torch
from shardwise.dist.exchange import Exchange
from shardwise.dist.pool import BufferPool
from shardwise.dist.stuck import explain_failure
from shardwise.errors import CommError


@dataclass
class Traffic:
    """What one kind of collective has cost this rank so far: calls, bytes it sent, seconds it waited."""

    calls: int = 0
    bytes_sent: int = 0
    seconds_waiting: float = 0.0


class Observer(Protocol):
    """Told of the collectives of an axis, for those who want to know more than :class:`Traffic` says."""

    def issued(self, axis: Axis, op: str, key: str, sent: int) -> Any:
        """A collective is about to start, which sends so many bytes; what is returned comes back in the other calls."""

    def waiting(self, note: Any) -> None:
        """Its result is wanted now."""

    def done(self, note: Any) -> None:
        """Its result may be read on the current stream."""


@dataclass
class Call:
    """One collective: what it does, of what, the bytes that this rank sends, and the observer's note on it."""

    op: str
    key: str = ""
    sent: int = 0
    observer: Observer | None = None
    note: Any = None

    def __str__(self) -> str:
        return f"{self.op} {self.key}"


class Handle:
    """A collective in flight. ``wait()`` returns when the result may be read on the current stream."""

    def __init__(self, axis: Axis, call: Call, works: Sequence[tuple[Any, int]], finish: Any = None) -> None:
        self._axis = axis
        self._call = call
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
        axis, call = self._axis, self._call
        if call.observer is not None:
            call.observer.waiting(call.note)
        works, self._works = self._works, []
        if axis.failed and works:
            raise CommError(f"`{call}`: an earlier collective on axis `{axis.name}` failed, see its error.")
        for work, peer in works:
            try:
                # Only the direct exchange takes a deadline here; native collectives have the group's own.
                if peer >= 0:
                    work.wait(axis.timeout)
                else:
                    work.wait()
            except RuntimeError as error:
                raise explain_failure(axis, str(call), peer, error) from error
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        axis.traffic[call.op].seconds_waiting += time.perf_counter() - started
        if call.observer is not None:
            call.observer.done(call.note)


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
        observer: told of every collective, if there is one.
    """

    name: str
    ranks: tuple[int, ...]
    position: int
    group: dist.ProcessGroup | None
    timeout: timedelta
    traffic: dict[str, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    pool: BufferPool = field(default_factory=BufferPool)
    failed: bool = False
    observer: Observer | None = None
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
            return Handle(self, Call("all_gather"), ())  # the shard is the whole
        call = self._observe(self._count("all_gather", key, self._others * _bytes(shard)))
        return self._gather(flat, shard, tag, call)

    def reduce_scatter(self, flat: torch.Tensor, key: str, tag: int) -> Handle:
        """Sum ``flat`` over the ranks; after ``wait()`` this rank's slice of ``flat`` holds its part of the sum.

        The rest of ``flat`` is undefined afterwards.
        """
        if self.group is None:
            return Handle(self, Call("reduce_scatter"), ())
        sent = self._others * _bytes(self.slice_of(flat))
        return self._scatter(flat, tag, self._observe(self._count("reduce_scatter", key, sent)))

    def all_reduce(self, flat: torch.Tensor, key: str, tag: int) -> Handle:
        """Sum ``flat`` over the ranks in place; its length must be a multiple of the axis size."""
        if self.group is None:
            return Handle(self, Call("all_reduce"), ())
        sent = 2 * self._others * _bytes(flat) // self.size
        if self._exchange is None:
            call = self._observe(self._count("all_reduce", key, sent))
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            return Handle(self, call, [(work, -1)])
        # Counted as the two that it is made of, observed as one.
        call = self._observe(Call("all_reduce", key, sent))
        own = self.slice_of(flat)
        scattered = self._scatter(flat, tag, self._count("reduce_scatter", key, self._others * _bytes(own)))

        def gather() -> None:
            # Every rank holds the bits of the rank that summed, so replicated results are equal to the last bit.
            scattered.wait()
            self._gather(flat, own, tag, self._count("all_gather", key, self._others * _bytes(own))).wait()

        return Handle(self, call, (), gather)

    def all_to_all(
        self,
        outbox: torch.Tensor,
        sent: Sequence[int],
        inbox: torch.Tensor,
        received: Sequence[int],
        key: str,
        tag: int,
    ) -> Handle:
        """Send consecutive parts of ``outbox`` to the ranks of the axis in turn; ``inbox`` receives theirs likewise.

        All ranks must call this, also those that neither send nor receive anything.

        Args:
            outbox: flat, what is sent, in the order of the ranks; not written before ``wait()``.
            sent: elements for each rank; what a rank sends to itself is copied.
            inbox: flat, of the same dtype, written in place.
            received: elements from each rank.
            key: what is exchanged, for errors.
            tag: as in :meth:`all_gather`.
        """
        if self.group is None:
            inbox.copy_(outbox)
            return Handle(self, Call("all_to_all"), ())
        away = (sum(sent) - sent[self.position]) * outbox.element_size()
        call = self._observe(self._count("all_to_all", key, away))
        if self._exchange is not None:
            works = self._post(call, lambda x: x.all_to_all(outbox, sent, inbox, received, tag))
            return Handle(self, call, works)
        work = dist.all_to_all_single(inbox, outbox, list(received), list(sent), group=self.group, async_op=True)
        return Handle(self, call, [(work, -1)])

    def nothing(self) -> Handle:
        """The handle of a collective that is over."""
        return Handle(self, Call("nothing"), ())

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
        sent = _bytes(tensor) if position == self.position else 0
        call = self._observe(self._count("broadcast", key, sent))
        raw = tensor.reshape(-1).view(torch.uint8) if self._exchange is not None else tensor
        work = dist.broadcast(raw, self.ranks[position], group=self.group, async_op=True)
        Handle(self, call, [(work, -1)]).wait()

    def barrier(self, key: str) -> None:
        """Return when every rank has called this."""
        if self.group is not None:
            call = self._observe(self._count("barrier", key, 0))
            Handle(self, call, [(dist.barrier(self.group, async_op=True), -1)]).wait()

    def close(self) -> None:
        """Free the process group of this axis, if it has one of its own."""
        if self.group is not None and self.group is not dist.group.WORLD and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None
        self.pool = BufferPool()

    @property
    def _others(self) -> int:
        return self.size - 1

    def _gather(self, flat: torch.Tensor, shard: torch.Tensor, tag: int, call: Call) -> Handle:
        if self._exchange is not None:
            own = self.slice_of(flat)
            if own.data_ptr() != shard.data_ptr():
                own.copy_(shard)
            return Handle(self, call, self._post(call, lambda x: x.all_gather(flat, tag)))
        work = _torch.all_gather_single(flat, shard, group=self.group, async_op=True)
        return Handle(self, call, [(work, -1)])

    def _scatter(self, flat: torch.Tensor, tag: int, call: Call) -> Handle:
        own = self.slice_of(flat)
        if self._exchange is not None:
            inbox = self.pool.take(own.numel() * self._others, flat.dtype, flat.device)
            works = self._post(call, lambda x: x.scatter(flat, inbox, tag))
            return Handle(self, call, works, lambda: self._sum_inbox(own, inbox))
        work = _torch.reduce_scatter_single(own, flat, group=self.group, async_op=True)
        return Handle(self, call, [(work, -1)])

    def _post(self, call: Call, start: Callable[[Exchange], list[tuple[Any, int]]]) -> list[tuple[Any, int]]:
        if self._exchange is None:
            return []
        try:
            return start(self._exchange)
        except RuntimeError as error:  # the connection is gone already
            raise explain_failure(self, str(call), -1, error) from error

    def _small(self, values: torch.Tensor, key: str, op: Any) -> None:
        if self.group is None:
            return
        call = self._observe(self._count("small", key, 2 * self._others * _bytes(values) // self.size))
        Handle(self, call, [(dist.all_reduce(values, op, group=self.group, async_op=True), -1)]).wait()

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

    def _count(self, op: str, key: str, sent: int) -> Call:
        traffic = self.traffic[op]
        traffic.calls += 1
        traffic.bytes_sent += sent
        return Call(op, key, sent)

    def _observe(self, call: Call) -> Call:
        if self.observer is not None:
            call.observer, call.note = self.observer, self.observer.issued(self, call.op, call.key, call.sent)
        return call

    def __repr__(self) -> str:
        return f"Axis({self.name}, {self.position} of {self.size})"


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


__all__ = ["Axis", "CommError", "Handle", "Observer", "Traffic"]
