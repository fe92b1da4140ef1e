"""Batches from one rank to each of the others, as bytes: each gets its own, and only that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.data.rounds import Round
from shardwise.dist import Axis
from shardwise.dist.values import pack, unpack
from shardwise.dist.words import broadcast_text
from shardwise.errors import ShardwiseError

# Each of these exchanges is waited for before the next begins, so one tag serves all. Not that of `dist.objects`.
TAG = 2
ALIGNED = 16  # no number is larger, so that tensors can be looked at where they arrived
DATA, NOTHING, PROBLEM = 0, 1, 2
KEY = "dispatched batch"


class DispatchError(ShardwiseError, RuntimeError):
    """The rank that reads for all could not."""


class Parcels:
    """The rank at position 0 of an axis sends, all receive. All ranks must call the same method.

    Args:
        axis: the ranks.
        device: on which they talk, and where tensors arrive; the CPU where they talk over gloo.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis = axis
        self.number = 0  # of the round, from 1
        # The direct exchange of gloo is one of memory of the CPU.
        gloo = axis.group is not None and dist.get_backend(axis.group) == "gloo"
        self.device = torch.device("cpu") if gloo else device

    def send(self, turn: Round | None) -> Round | None:
        """Give each rank its part of a round, or tell all that there is none. Returns this rank's own part.

        Raises:
            ValueKindError: a batch has something that cannot be sent. Nothing was sent then.
        """
        if turn is None:
            self._head([NOTHING])
            return None
        boxes = [_boxed(batches) if batches else [] for batches in turn.parts[1:]]
        sizes = [sum(_room(piece) for piece in box) for box in boxes]
        self.number += 1
        self._head([DATA, turn.remainder, int(turn.last), self.number, turn.rows, *sizes])
        outbox = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
        at = 0
        for piece in (piece for box in boxes for piece in box):
            outbox[at : at + piece.numel()].copy_(piece)
            at += _room(piece)
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        received = [0] * self.axis.size
        self.axis.all_to_all(outbox, [0, *sizes], nothing, received, KEY, TAG).wait()
        return Round([turn.parts[0]], turn.last, turn.remainder, turn.rows)

    def fail(self, error: Exception) -> None:
        """Tell the other ranks why there is no batch."""
        self._head([PROBLEM])
        broadcast_text(self.axis, f"{type(error).__name__}: {error}", 0, self.device, KEY)

    def receive(self) -> Round | None:
        """This rank's part of a round, or None if there is none.

        Raises:
            DispatchError: the rank that reads could not.
        """
        status, remainder, last, number, rows, *sizes = self._head(None)
        if status == NOTHING:
            return None
        if status == PROBLEM:
            problem = broadcast_text(self.axis, "", 0, self.device, KEY)
            raise DispatchError(f"rank {self.axis.ranks[0]}, which reads for all, could not give a batch: {problem}")
        mine = sizes[self.axis.position - 1]
        inbox = torch.empty(mine, dtype=torch.uint8, device=self.device)
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        none = [0] * self.axis.size
        self.axis.all_to_all(nothing, none, inbox, [mine, *none[1:]], KEY, TAG).wait()
        self.number += 1
        if number != self.number:
            me = self.axis.ranks[self.axis.position]
            raise DispatchError(
                f"rank {self.axis.ranks[0]} reads for all and is at round {number} of the epoch, rank {me} at round "
                f"{self.number}: they did not begin or leave the loop together. A loop over dispatched batches must "
                "be left on all ranks in the same step; or use dispatch_batches=False."
            )
        return Round([_unboxed(inbox) if mine else []], bool(last), remainder, rows)

    def _head(self, values: list[int] | None) -> list[int]:
        head = torch.zeros(5 + self.axis.size - 1, dtype=torch.int64)
        if values is not None:
            head[: len(values)] = torch.tensor(values)
        head = head.to(self.device)
        self.axis.broadcast(head, 0, KEY)
        found: list[int] = head.tolist()
        return found


def _boxed(batches: Sequence[Any]) -> list[torch.Tensor]:
    """Two lengths, the text, and the tensors, as vectors of bytes."""
    text, tensors = pack(list(batches))
    heads = pack([(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in tensors])[0]
    words = [part.encode("utf-8", "surrogatepass") for part in (text, heads)]
    lengths = torch.tensor([len(word) for word in words], dtype=torch.int64).view(torch.uint8)
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    return [lengths, torch.frombuffer(bytearray(b"".join(words)), dtype=torch.uint8), *raw]


def _unboxed(raw: torch.Tensor) -> list[Any]:
    first, second = raw[:ALIGNED].cpu().view(torch.int64).tolist()
    words = raw[ALIGNED : ALIGNED + first + second].cpu().numpy().tobytes()
    at = ALIGNED + -(-(first + second) // ALIGNED) * ALIGNED
    tensors = []
    for dtype, shape in unpack(words[first:].decode(), []):
        kind = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        tensors.append(raw[at : at + size].view(kind).reshape(shape))
        at += -(-size // ALIGNED) * ALIGNED
    batches: list[Any] = unpack(words[:first].decode("utf-8", "surrogatepass"), tensors)
    return batches


def _room(piece: torch.Tensor) -> int:
    return -(-piece.numel() // ALIGNED) * ALIGNED
