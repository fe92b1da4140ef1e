"""Parameters whose gradients travel together while they stay visible: ``param.grad`` is a view of the bucket."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardwise.dist import Axis, Handle
from shardwise.errors import ShardingError
from shardwise.sharding.unit import ALIGN_BYTES, Slot


@dataclass(frozen=True, eq=False)
class Bucket:
    """Where the gradients of some parameters of one dtype and device lie in a flat buffer.

    After the gradients there is one element a parameter, which says on how many ranks it has a gradient. It travels
    with the sum, so that nobody has to ask.

    Attributes:
        name: what errors call it.
        slots: the parameters and their offsets.
        flags: offset of the first flag.
        numel: elements in all, a multiple of the ranks.
        tag: of its collective.
    """

    name: str
    slots: tuple[Slot, ...]
    flags: int
    numel: int
    dtype: torch.dtype
    device: torch.device
    tag: int


def cut(model: nn.Module, ranks: int, first_tag: int, bucket_numel: int) -> list[Bucket]:
    """The model's parameters in buckets, in its order; tied ones once.

    Args:
        model: whose parameters have values.
        ranks: a bucket's length is a multiple of this.
        first_tag: tags are numbered from here.
        bucket_numel: no bucket is larger, except one parameter that is.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[list[tuple[str, nn.Parameter]]]] = {}
    for name, param in model.named_parameters():
        rows = groups.setdefault((param.dtype, param.device), [[]])
        if rows[-1] and sum(p.numel() for _, p in rows[-1]) + param.numel() > bucket_numel:
            rows.append([])
        rows[-1].append((name, param))
    found: list[Bucket] = []
    for (dtype, device), rows in groups.items():
        for row in rows:
            found.append(_bucket(row, dtype, device, ranks, first_tag + len(found)))
    return found


def _bucket(
    row: list[tuple[str, nn.Parameter]], dtype: torch.dtype, device: torch.device, ranks: int, tag: int
) -> Bucket:
    align = max(1, ALIGN_BYTES // dtype.itemsize)
    slots, at = [], 0
    for name, param in row:
        slots.append(Slot(name, param, param.shape, at))
        at += -(-param.numel() // align) * align
    step = align * ranks
    name = row[0][0] if len(row) == 1 else f"{row[0][0]}..{row[-1][0]}"
    return Bucket(name, tuple(slots), at, -(-(at + len(row)) // step) * step, dtype, device, tag)


class BucketGradient:
    """Averages the gradients of one bucket over the ranks, in place.

    What is averaged is all that ``param.grad`` holds: a part that an earlier backward has averaged is the same on all
    ranks, and so stays what it is.

    Args:
        bucket: the parameters.
        axis: the ranks.
        wire_dtype: in which the gradients travel, or None.

    Attributes:
        repeated: whether a parameter got several gradients in this backward.
    """

    def __init__(self, bucket: Bucket, axis: Axis, wire_dtype: torch.dtype | None) -> None:
        self.unit = bucket
        self.repeated = False
        self._axis = axis
        self._wire_dtype = wire_dtype
        self._index = {id(s.param): i for i, s in enumerate(bucket.slots)}
        self._views: list[torch.Tensor] = []
        self._flat: torch.Tensor | None = None
        self._wire: torch.Tensor | None = None
        self._fired: set[int] = set()
        self._started = False
        self._expected = 0

    def begin_backward(self) -> None:
        """Forget which gradients arrived in the last backward."""
        self._fired.clear()
        self.repeated = self._started = False
        self._expected = sum(s.param.requires_grad for s in self.unit.slots)

    @property
    def trained(self) -> bool:
        """Whether any parameter wants a gradient now."""
        return self._expected > 0

    @property
    def complete(self) -> bool:
        """Whether every parameter has got its gradient in this backward."""
        return len(self._fired) >= self._expected

    @property
    def pending(self) -> bool:
        """Whether gradients arrived after the reduction of this backward: never, that is an error."""
        return False

    @property
    def in_flight(self) -> bool:
        """Whether a reduction was started and not finished; the bucket must not be written."""
        return self._wire is not None

    def collect(self, param: torch.Tensor) -> None:
        """Take note of ``param.grad``, which autograd has just completed, and make it a view of the bucket."""
        i = self._index[id(param)]
        if self._started:  # autograd has written into the bucket while it travelled, or may have
            raise ShardingError(
                f"{self.unit.slots[i].name} got another gradient in a backward that had averaged it already, as it did "
                "not in the backwards before. Checkpoint activations with use_reentrant=False, or run such a backward "
                "under no_sync."
            )
        self.repeated = self.repeated or i in self._fired
        self._fired.add(i)
        self._take_in(i)

    def start_reduction(self) -> Handle:
        """Begin to average; parameters without a gradient count as zeros."""
        unit = self.unit
        if self._axis.size > 1 and self._axis.group is None:
            raise ShardingError(
                "the process group of the Accelerator that prepared this model is closed; prepare the model again."
            )
        self._started = True
        flat = self._buffer()
        flat[unit.flags :].zero_()
        for i, slot in enumerate(unit.slots):
            if slot.param.grad is None:
                self._views[i].zero_()
            else:
                self._take_in(i)
                flat[unit.flags + i] = 1
        flat[: unit.flags].mul_(1.0 / self._axis.size)
        self._wire = flat if self._wire_dtype is None else flat.to(self._wire_dtype)
        return self._axis.all_reduce(self._wire, unit.name, unit.tag)

    def finish_reduction(self, handle: Handle) -> None:
        """Wait for the average, and show it in ``param.grad`` also where only other ranks had a gradient."""
        handle.wait()
        flat, wire = self._buffer(), self._wire
        if wire is None:
            raise ShardingError(f"bucket {self.unit.name} has no reduction in flight")
        self._wire = None
        if wire is not flat:
            flat.copy_(wire)
        missing = [i for i, s in enumerate(self.unit.slots) if s.param.grad is None and s.param.requires_grad]
        if not missing:
            return
        # Read back, which waits for the device, only by a rank that lacks a gradient.
        counts = flat[self.unit.flags :].tolist()
        for i in missing:
            if counts[i]:
                self.unit.slots[i].param.grad = self._views[i]

    def discard(self) -> None:
        """Drop the gradients."""
        self._wire = None
        for slot in self.unit.slots:
            slot.param.grad = None

    def give_back(self) -> None:
        """Leave gradients as tensors of their own."""
        for slot in self.unit.slots:
            if slot.param.grad is not None:
                slot.param.grad = slot.param.grad.clone()
        self._flat, self._views = None, []

    def _buffer(self) -> torch.Tensor:
        if self._flat is None:
            self._flat = torch.zeros(self.unit.numel, dtype=self.unit.dtype, device=self.unit.device)
            self._views = [self._flat[s.offset : s.end].view(s.shape) for s in self.unit.slots]
        return self._flat

    def _take_in(self, i: int) -> None:
        param = self.unit.slots[i].param
        self._buffer()
        view, grad = self._views[i], param.grad
        if grad is None or grad is view:
            return
        view.copy_(grad.to_dense() if grad.layout is not torch.strided else grad)
        param.grad = view
