"""The gradients of one unit: collected in a flat buffer, reduced, accumulated on the shard."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.dist import Handle
from shardwise.dist.pool import BufferPool
from shardwise.errors import ShardingError
from shardwise.sharding.rows import sum_rows
from shardwise.sharding.unit import REDUCE, REPLICATE, Slot, Unit

LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Averaging:
    """Where gradients are divided: before the sum over the ranks, or with the factor of clipping.

    Attributes:
        before: what a gradient is multiplied with when it is collected.
        after: what the reduced gradient is still to be multiplied with.
    """

    before: float
    after: float = 1.0

    @classmethod
    def of(cls, ranks: int, wire: torch.dtype, *, prescale: bool, predivide: float, mean: bool) -> Averaging:
        """The division that a configuration asks for.

        Only a sum of fp16 numbers can leave the range; for other dtypes the mean costs nothing where it is taken
        during the copy into the buffer, so it is.

        Args:
            ranks: how many gradients are summed.
            wire: the dtype that they are summed in.
            prescale: ``prescale_gradients``: divide by the ranks before the sum.
            predivide: ``gradient_predivide_factor``: divide by this before, and by the rest after, without `prescale`.
            mean: ``gradient_allreduce_op`` is "mean"; else the sum is wanted.
        """
        wanted = 1.0 / ranks if mean else 1.0
        if wire != torch.float16 or (mean and prescale):
            return cls(wanted)
        return cls(1.0 / predivide, predivide * wanted)


@dataclass(frozen=True)
class GradientOptions:
    """How gradients are collected and reduced.

    Attributes:
        scale: what each gradient is multiplied with when it is collected (:class:`Averaging`).
        accumulates: whether a window has several micro-steps.
        sum_dtype: in which low-precision gradients of a window add up (``data_types.grad_accum_dtype``).
        wire_dtype: dtype of the reduction (``communication_data_type``), or None for the buffer's own.
        contiguous: copy each gradient into the flat buffer when it arrives (``contiguous_gradients``), or leave it
            in ``param.grad`` until the unit is reduced.
        scatter: reduce-scatter (``reduce_scatter``), or all-reduce and keep a slice.
    """

    scale: float
    accumulates: bool
    sum_dtype: torch.dtype = torch.float32
    wire_dtype: torch.dtype | None = None
    contiguous: bool = True
    scatter: bool = True


class UnitGradient:
    """Collects, reduces and accumulates the gradients of one unit.

    Attributes:
        total: the reduced gradient of the window so far, averaged over the ranks: the shard's slice, or the whole
            buffer at stage 0; None when nothing was reduced yet.
        repeated: whether a parameter got several gradients in this backward (re-entrant checkpoints that share it).
        used: by slot, whether the parameter got a gradient on this rank in this window.
    """

    def __init__(self, unit: Unit, options: GradientOptions, pool: BufferPool) -> None:
        self.unit = unit
        self.options = options
        self._pool = pool
        self._index = {id(s.param): i for i, s in enumerate(unit.slots)}
        low = unit.dtype in LOW_PRECISION and options.accumulates
        self._raw_dtype = options.sum_dtype if low and not unit.policy.reduce_each_micro_step else unit.dtype
        self._total_dtype = options.sum_dtype if low else unit.dtype
        self._raw: torch.Tensor | None = None
        self._kept: torch.Tensor | None = None  # the buffer that `total` is a view of (stages 0 and 1)
        self._wire: torch.Tensor | None = None
        self._summed = False  # over all ranks, as rows
        self._written = [False] * len(unit.slots)
        self.total: torch.Tensor | None = None
        self.used = [False] * len(unit.slots)
        self._fired: set[int] = set()
        self._expected = 0
        self.repeated = False

    def accumulate_wide(self) -> None:
        """From now on windows have several micro-steps: low-precision gradients add up in the wider dtype."""
        if self.unit.dtype in LOW_PRECISION:
            self._total_dtype = self.options.sum_dtype
            if not self.unit.policy.reduce_each_micro_step and self._raw is None:
                self._raw_dtype = self.options.sum_dtype

    def begin_backward(self) -> None:
        """Forget which gradients arrived in the last backward."""
        self._fired.clear()
        self.repeated = False
        self._expected = sum(s.param.requires_grad for s in self.unit.slots)

    @property
    def trained(self) -> bool:
        """Whether any parameter of the unit wants a gradient now."""
        return self._expected > 0

    @property
    def complete(self) -> bool:
        """Whether every parameter has got its gradient in this backward."""
        return len(self._fired) >= self._expected

    @property
    def pending(self) -> bool:
        """Whether gradients were collected that are not reduced yet."""
        return any(self._written)

    @property
    def in_flight(self) -> bool:
        """Whether a reduction was started and not finished; its buffer must not be written."""
        return self._wire is not None

    def collect(self, param: torch.Tensor) -> None:
        """Take ``param.grad``, which autograd has just completed."""
        i = self._index[id(param)]
        slot = self.unit.slots[i]
        self.repeated = self.repeated or i in self._fired
        self._fired.add(i)
        self.used[i] = True
        if self.options.contiguous:
            self._copy_in(i, slot)
        else:
            self._written[i] = True

    def start_reduction(self) -> Handle:
        """Begin to reduce what was collected; parameters without a gradient count as zeros."""
        unit = self.unit
        raw = self._take_raw()
        for i, slot in enumerate(unit.slots):
            if not self.options.contiguous and self._written[i]:
                self._written[i] = False
                self._copy_in(i, slot)
            if not self._written[i]:
                raw[slot.offset : slot.end].zero_()
        self._written = [False] * len(unit.slots)
        dtype = self.options.wire_dtype or raw.dtype
        wire = raw if dtype == raw.dtype else self._pool.take(raw.numel(), dtype, raw.device).copy_(raw)
        self._wire = wire
        self._summed = unit.by_rows and unit.mesh.world.size > 1 and sum_rows(unit, wire)
        if self._summed:
            return unit.mesh.world.nothing()
        if not unit.policy.shard_optimizer:
            return unit.mesh.world.all_reduce(wire, unit.name, unit.tag(REDUCE))
        if self.options.scatter:
            return unit.axis.reduce_scatter(wire, unit.name, unit.tag(REDUCE))
        return unit.axis.all_reduce(wire, unit.name, unit.tag(REDUCE))

    def finish_reduction(self, handle: Handle) -> None:
        """Wait for the reduction and add its result to ``total``."""
        handle.wait()
        unit, wire, raw = self.unit, self._wire, self._raw
        if wire is None or raw is None:
            raise ShardingError(f"unit {unit.name} has no reduction in flight")
        if unit.policy.shard_optimizer and unit.mesh.replicate.size > 1 and not self._summed:
            unit.mesh.replicate.all_reduce(unit.own(wire), unit.name, unit.tag(REPLICATE)).wait()
        mine = unit.own(wire)
        self._wire = self._raw = None
        if self.total is not None:
            self.total.add_(mine)
        elif unit.policy.shard_grads:
            self.total = mine.to(self._total_dtype, copy=True)
        else:
            # Stages 0 and 1 keep the whole buffer anyway: the result stays where it is.
            self.total, self._kept = unit.own(raw), raw
            if wire is not raw:
                self.total.copy_(mine)
        if wire is not raw:
            self._pool.give(wire)
        if self._kept is not raw:
            self._pool.give(raw)

    def discard(self) -> None:
        """Drop all gradients of the window."""
        # A whole gradient buffer (`_kept`) goes back to the allocator and not to the pool: between the step and the
        # next backward its memory is the activations'.
        if self._raw is not None:
            self._pool.give(self._raw)
        if self._wire is not None and self._wire is not self._raw:
            self._pool.give(self._wire)
        self._raw = self._kept = self._wire = self.total = None
        self._written = [False] * len(self.unit.slots)
        self.used = [False] * len(self.unit.slots)
        if not self.options.contiguous:
            for slot in self.unit.slots:
                slot.param.grad = None

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients held between backward and step."""
        held = self._kept if self._kept is not None else self.total
        return sum(b.numel() * b.element_size() for b in (held, self._raw) if b is not None)

    def _copy_in(self, i: int, slot: Slot) -> None:
        grad = slot.param.grad
        if grad is None:
            return
        if grad.layout is not torch.strided:
            grad = grad.to_dense()  # of an embedding with sparse=True
        raw = self._take_raw()
        into = raw[slot.offset : slot.end].view(slot.shape)
        if self._written[i]:
            into.add_(grad, alpha=self.options.scale)
        elif self.options.scale == 1.0:
            into.copy_(grad)
        else:
            # One pass: scaled while it is copied.
            torch.mul(grad, self.options.scale, out=into)
        self._written[i] = True
        slot.param.grad = None

    def _take_raw(self) -> torch.Tensor:
        if self._raw is None:
            unit = self.unit
            self._raw = self._pool.take(unit.numel, self._raw_dtype, unit.device)
            # The gaps between parameters travel with the rest and enter the norm: they must be zero.
            for slot, after in zip(unit.slots, [*unit.slots[1:], None], strict=True):
                gap_end = unit.numel if after is None else after.offset
                if slot.end < gap_end:
                    self._raw[slot.end : gap_end].zero_()
        return self._raw
