"""A unit: parameters that travel together as one flat buffer, of which each rank owns one slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise import _torch
from shardwise.dist import Axis, Handle, Mesh
from shardwise.errors import ShardingError
from shardwise.sharding.policy import Policy

# Every parameter starts on a 64-byte boundary of its buffer: what CPU and GPU matrix kernels want to load.
ALIGN_BYTES = 64

# Each unit has this many tags, one for each kind of collective that may be in flight for it.
TAGS_PER_UNIT = 4
GATHER, REDUCE, REPLICATE, SECONDARY = range(TAGS_PER_UNIT)


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its unit's buffer, in elements."""

    name: str
    param: nn.Parameter
    shape: torch.Size
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return self.shape.numel()

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.offset + self.numel


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in this rank's shard, in elements."""

    slot: Slot
    start: int  # in the shard
    param_start: int  # in the flattened parameter
    numel: int

    @property
    def whole(self) -> bool:
        """Whether the shard holds the entire parameter."""
        return self.numel == self.slot.numel

    def view(self, shard: torch.Tensor) -> torch.Tensor:
        """This piece of a flat shard-sized tensor; in the parameter's shape when all of it is there."""
        part = shard[self.start : self.start + self.numel]
        return part.view(self.slot.shape) if self.whole else part


class Unit:
    """Parameters in one flat buffer, and this rank's shard of it.

    Args:
        index: number of the unit in the model, equal on every rank; collectives are tagged by it.
        name: what errors call it.
        params: its parameters by name.
        dtype: element type of the buffer.
        policy: the row of the ZeRO table that applies to this unit.
        mesh: the ranks.
        device: where the buffer lives.
        provisional: made by ``zero.Init``, before the engine cuts the model into its own units.
        by_rows: one embedding weight, of whose gradient only the rows travel that are not zero.

    Attributes:
        master: this rank's slice in fp32 where the buffer's dtype is lower and the unit is trained, else None.
        flat: the buffer (n elements). Its storage is empty while the unit is released.
        shard: this rank's slice, or the whole buffer where the policy does not cut it (stage 0).
        live: whether the buffer holds the parameters now.
    """

    def __init__(
        self,
        index: int,
        name: str,
        params: Sequence[tuple[str, nn.Parameter]],
        dtype: torch.dtype,
        policy: Policy,
        mesh: Mesh,
        device: torch.device,
        *,
        provisional: bool = False,
        by_rows: bool = False,
    ) -> None:
        self.index = index
        self.by_rows = by_rows
        self.provisional = provisional
        self.on_take_over: Callable[[], None] = lambda: None
        self.device = device
        self.name = name
        self.policy = policy
        self.mesh = mesh
        self.axis: Axis = mesh.shard
        self.releases = policy.release_params and self.axis.size > 1
        self.live = True
        self.pins = 0
        self.dtype = dtype
        self.slots = _lay_out(params, dtype)
        # A multiple for all ranks, not only for the shard group: the slices are cut again for replicas and hpZ.
        step = ALIGN_BYTES // dtype.itemsize * mesh.world.size
        used = self.slots[-1].end if self.slots else 0
        self.numel = -(-used // step) * step
        self.secondary: torch.Tensor | None = None
        self._secondary_fresh = False
        self._gathering: Handle | None = None

    def fill(self, *, with_master: bool) -> None:
        """Copy the parameters into the buffer, make them views of it, and cut out this rank's shard.

        Args:
            with_master: also keep this rank's slice in fp32, taken from the values before they are cast.
        """
        with torch.no_grad():
            self.flat = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
            self._views = [self.flat[s.offset : s.end].view(s.shape) for s in self.slots]
            # One NaN that claims to have the parameter's shape: `numel()` is right, reading gives NaN, writing raises.
            nothing = float("nan") if self.dtype.is_floating_point else 0
            self._nan = torch.full((), nothing, dtype=self.dtype, device=self.device)
            self._released = [self._nan.expand(s.shape) for s in self.slots]
            self._versions = [0] * len(self.slots)
            self.master: torch.Tensor | None = None
            if with_master:
                self.master = self._new_master()
            for slot, view in zip(self.slots, self._views, strict=True):
                view.copy_(slot.param.data)
                slot.param.data = view
            if self.releases:
                self.shard = self.axis.slice_of(self.flat).clone()
                if self.mesh.secondary is not None:
                    self.secondary = torch.empty_like(self.mesh.secondary.slice_of(self.flat))
            else:
                self.shard = self.axis.slice_of(self.flat) if self.policy.shard_optimizer else self.flat

    @property
    def shard_numel(self) -> int:
        """Elements that this rank owns."""
        return self.numel // self.axis.size if self.policy.shard_optimizer else self.numel

    def pieces(self) -> list[Piece]:
        """The parts of the parameters that this rank owns, in order; a parameter of another rank's is left out."""
        k = self.shard_numel
        first = self.axis.position * k if self.policy.shard_optimizer else 0
        found = []
        for slot in self.slots:
            start, end = max(slot.offset, first), min(slot.end, first + k)
            if start < end:
                found.append(Piece(slot, start - first, start - slot.offset, end - start))
        return found

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """The part of a buffer-sized tensor that this rank owns."""
        return self.axis.slice_of(flat) if self.policy.shard_optimizer else flat

    def start_gather(self) -> None:
        """Begin to fetch the parameters, without waiting. Does nothing if they are here or on their way."""
        if self.live or self._gathering is not None:
            return
        self.flat.untyped_storage().resize_(self.numel * self.dtype.itemsize)
        with torch.no_grad(), _torch.preserve_version(self.flat):
            if self.secondary is not None and self._secondary_fresh and self.mesh.secondary is not None:
                axis, shard, tag = self.mesh.secondary, self.secondary, self.tag(SECONDARY)
            else:
                axis, shard, tag = self.axis, self.shard, self.tag(GATHER)
            self._gathering = axis.all_gather(self.flat, shard, self.name, tag)

    def finish_gather(self) -> None:
        """Wait until the parameters are here and make them readable."""
        if self.live:
            return
        self.start_gather()
        if self._gathering is not None:
            handle, self._gathering = self._gathering, None
            handle.wait()
        self._refuse_lost_writes()
        for slot, view in zip(self.slots, self._views, strict=True):
            slot.param.data = view
        self.live = True
        self._keep_secondary()

    def release(self) -> None:
        """Give the buffer's memory back; the parameters become NaN in their shape. Only units of stage 3."""
        if not self.releases or self.pins:
            return
        if self._gathering is not None:
            self.finish_gather()
        if not self.live:
            return
        for i, (slot, nan) in enumerate(zip(self.slots, self._released, strict=True)):
            slot.param.data = nan
            self._versions[i] = slot.param._version
        self.flat.untyped_storage().resize_(0)
        self.live = False

    def publish(self, *, by_broadcast: bool = False) -> Handle | None:
        """After the shard has changed: bring every rank's whole copy up to date, if it keeps one at rest.

        Args:
            by_broadcast: one broadcast from each owner instead of one all-gather (``allgather_partitions: false``).
        """
        self._secondary_fresh = False
        if self.releases:
            if self.live:  # it was whole and is out of date
                self.release()
            return None
        if not self.policy.shard_optimizer:
            return None
        if by_broadcast:
            for position, part in enumerate(self.flat.chunk(self.axis.size)):
                self.axis.broadcast(part, position, self.name)
            return None
        return self.axis.all_gather(self.flat, self.shard, self.name, self.tag(GATHER))

    def adopt(self) -> None:
        """Take this rank's shard from the whole buffer, after the whole has been written (loading, editing)."""
        if self.releases:
            self.shard.copy_(self.axis.slice_of(self.flat))
        self._secondary_fresh = False

    def make_master(self) -> None:
        """Add the fp32 master of a unit that was frozen until now."""
        if self.master is None:
            self.master = self.shard.to(torch.float32, copy=True)

    def refresh_master(self) -> None:
        """Set the fp32 master to the parameters' present values, after the shard was written from outside."""
        if self.master is not None:
            self.master.copy_(self.shard)

    def _new_master(self) -> torch.Tensor:
        master = torch.zeros(self.shard_numel, dtype=torch.float32, device=self.device)
        for piece in self.pieces():
            values = piece.slot.param.data.reshape(-1)
            master[piece.start : piece.start + piece.numel].copy_(
                values[piece.param_start : piece.param_start + piece.numel]
            )
        return master

    def tag(self, kind: int) -> int:
        """The tag of one kind of collective of this unit."""
        return self.index * TAGS_PER_UNIT + kind

    def dissolve(self) -> None:
        """Make the parameters ordinary tensors again: whole, and no longer views of one buffer."""
        self.finish_gather()
        for slot in self.slots:
            slot.param.data = slot.param.data.clone()

    @property
    def nbytes(self) -> int:
        """Bytes of parameters that rest on this rank: the buffer where it is whole, else shard and second copy."""
        if self.releases:
            kept = self.shard.numel() + (self.secondary.numel() if self.secondary is not None else 0)
            return kept * self.dtype.itemsize
        return self.numel * self.dtype.itemsize

    def _refuse_lost_writes(self) -> None:
        """Filling a released parameter does not raise in torch; the values would be lost."""
        written = [s.name for s, v in zip(self.slots, self._versions, strict=True) if s.param._version != v]
        # Writes through `.data` leave no other trace; on a GPU, looking would wait for the device.
        if not written and self.device.type == "cpu" and not _torch.is_fake(self._nan) and self.dtype.is_floating_point:
            written = [] if bool(torch.isnan(self._nan)) else [self.name]
        if written:
            self._nan.fill_(float("nan"))
            self._versions = [s.param._version for s in self.slots]
            raise ShardingError(
                f"{written[0]} was written while it was released: the values are lost. Write inside "
                "`shardwise.zero.GatheredParameters(params, modifier_rank=0)`."
            )

    def _keep_secondary(self) -> None:
        # hpZ: after a gather over all ranks each rank keeps 1/k of the whole, so that the gathers that follow, until
        # the next step, stay inside its group of k ranks.
        axis = self.mesh.secondary
        if axis is None or self.secondary is None or self._secondary_fresh:
            return
        mine = axis.slice_of(self.flat)
        self.secondary.copy_(mine)
        self._secondary_fresh = True

    def __repr__(self) -> str:
        return f"Unit({self.index}, {self.name}, {self.numel} x {self.dtype})"


def _lay_out(params: Sequence[tuple[str, nn.Parameter]], dtype: torch.dtype) -> list[Slot]:
    step = ALIGN_BYTES // dtype.itemsize
    slots, offset = [], 0
    for name, param in params:
        slots.append(Slot(name, param, param.shape, offset))
        offset += -(-param.numel() // step) * step
    return slots
