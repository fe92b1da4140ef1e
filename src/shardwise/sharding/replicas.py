"""A model that each rank holds whole, with its gradients in ``param.grad``: ZeRO stage 0 for a loop of one's own.

The engine takes gradients away as they arrive and steps by itself. A loop that steps its own optimizers, clips, looks
at or edits ``param.grad`` needs them where torch puts them. Here each parameter's ``grad`` becomes a view of a flat
bucket, which the engine's own :class:`~shardwise.sharding.reducer.Reducer` averages over the ranks while the backward
goes on. What a loop sees is what ``DistributedDataParallel`` shows it, but nothing is wrapped: the model stays the
object that it was, and parameters that some ranks did not use need no option.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shardwise import _torch
from shardwise.dist import Axis, Mesh
from shardwise.errors import ShardingError
from shardwise.sharding.bucket import BucketGradient, cut
from shardwise.sharding.policy import POLICIES
from shardwise.sharding.reducer import Reducer, warn_discarded
from shardwise.sharding.turns import Turns


class _Hook:
    """A hook of a model that does nothing in its copies and pickles: they are no replica of any rank's."""

    def __init__(self, call: Callable[..., None] | None = None, replicas: Replicas | None = None) -> None:
        self._call = call
        self.replicas = replicas

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


class Replicas:
    """Keeps the ranks' copies of a model alike: equal values at the start, averaged gradients after each backward.

    Args:
        model: on this rank's device already; its parameters and buffers take over the first rank's values.
        axis: the ranks.
        first_tag: the first of a range of tags that nothing else on the axis uses.
        bucket_numel: elements of a bucket, at the most.
        wire_dtype: in which gradients travel, or None for their own.
        broadcast_buffers: the first rank's buffers are taken over before each forward that trains.
        owner: who makes it; None: nobody.
        turns: those of the models that one backward may go through together.

    Attributes:
        tags: how many tags are used.
        sync: whether a backward averages. It counts when the forward is run, as in ``DistributedDataParallel``.
        owner: who made it, weakly held; see :func:`replicas_of`.
        announce: called before the ranks talk: with 0 before they share buffers, with 1 before they average.
    """

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        *,
        first_tag: int,
        bucket_numel: int,
        wire_dtype: torch.dtype | None = None,
        broadcast_buffers: bool = True,
        owner: object = None,
        turns: Turns | None = None,
    ) -> None:
        self.model = model
        self.axis = axis
        self.sync = True
        self.owner = None if owner is None else weakref.ref(owner)
        self.announce: Callable[[int], None] | None = None
        self._broadcast_buffers = broadcast_buffers
        self._take_over()
        buckets = cut(model, axis.size, first_tag, bucket_numel)
        self.tags = len(buckets)
        self._managed = {id(slot.param) for b in buckets for slot in b.slots}
        self._grads = [BucketGradient(b, axis, wire_dtype) for b in buckets]
        self._frozen = [(i, s) for i, b in enumerate(buckets) for s in b.slots if not s.param.requires_grad]
        self.reducer = Reducer(self._grads, POLICIES[0], Mesh.over(axis), overlap=True, by_scope=False)
        self.reducer.on_first_reduction = self._on_first_reduction
        self._turns = turns
        if turns is not None:
            turns.add(self.reducer)
        self._hooks = [
            model.register_forward_pre_hook(_Hook(lambda m, a: self._before_forward(), self), prepend=True),
            model.register_forward_hook(_Hook(lambda m, a, out: self._after_forward(out))),
        ]

    def close(self) -> None:
        """Stop averaging; values and gradients stay as they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.reducer.unwatch()
        for grad in self._grads:
            grad.give_back()

    def abort(self) -> None:
        """After an exception in a backward: drop the gradients, of which some may be averaged and others not."""
        if self.reducer.active:
            warn_discarded()
            if self._turns is not None:
                self._turns.forget()
            self.reducer.abort()

    @contextlib.contextmanager
    def averaging(self, sync: bool) -> Iterator[None]:
        """Whether backwards whose forward runs in here average."""
        before, self.sync = self.sync, sync
        try:
            yield
        finally:
            self.sync = before

    @contextlib.contextmanager
    def averaging_in_backward(self) -> Iterator[None]:
        """The backward that runs in here averages, wherever its forward ran."""
        before, self.reducer.boundary = self.reducer.boundary, True
        try:
            yield
        finally:
            self.reducer.boundary = before

    def reduce_nothing(self) -> None:
        """Take part in the averaging of a backward that this rank does not have, with zeros."""
        self.reducer.discard()
        self.reducer.boundary = True
        self.reducer.begin(ends_itself=False)
        self.reducer.end()

    def share_buffers(self) -> None:
        """Take over the first rank's buffers, all of one dtype at once. All ranks must call this."""
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for buffer in self.model.buffers():
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for (dtype, _), buffers in kinds.items():
            flat = torch.cat([b.detach().reshape(-1) for b in buffers])
            self.axis.broadcast(flat, 0, f"buffers of {dtype}")
            if self.axis.position:
                parts = torch.split(flat, [b.numel() for b in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.detach().copy_(part.view(buffer.shape))

    def copy_from(self, position: int) -> None:
        """Take over the parameters and buffers of the rank at ``position``. All ranks must call this."""
        self._take_over(position)

    def _take_over(self, position: int = 0) -> None:
        for name, value in itertools.chain(self.model.named_parameters(), self.model.named_buffers()):
            if value.is_meta:
                raise ShardingError(
                    f"{name} is on the meta device and has no values; give the model its weights before it is prepared."
                )
            self._share(name, value.data, position)

    def _share(self, name: str, value: torch.Tensor, position: int) -> None:
        whole = value.contiguous()
        self.axis.broadcast(whole, position, name)
        if whole.data_ptr() != value.data_ptr():
            value.copy_(whole)

    def _before_forward(self) -> None:
        if _torch.in_backward_pass():
            return  # a recomputation
        self.abort()
        if not torch.is_grad_enabled():
            return
        for name, param in self.model.named_parameters():
            if id(param) not in self._managed:
                raise ShardingError(
                    f"parameter {name} was added or replaced after the model was prepared; its gradient would differ "
                    "between the ranks. Change the model first, then prepare it."
                )
        for index, slot in self._frozen:
            if slot.param.requires_grad:
                self.reducer.watch_param(index, slot.param)
        self._frozen = [(i, s) for i, s in self._frozen if not s.param.requires_grad]
        self.reducer.boundary = self.sync
        if self._broadcast_buffers and self.sync and self.model.training:
            if self.announce is not None:
                self.announce(0)
            self.share_buffers()

    def _on_first_reduction(self) -> None:
        if self.announce is not None:
            self.announce(1)

    def _after_forward(self, out: Any) -> None:
        if not torch.is_grad_enabled():
            return
        # A backward that reaches the model's output has begun, before any gradient arrives.
        reducer = weakref.ref(self.reducer)

        def begin(_grads: Any) -> None:
            alive = reducer()
            if alive is not None:
                alive.begin()

        for node in {id(t.grad_fn): t.grad_fn for t in _torch.tensors_in(out) if t.grad_fn is not None}.values():
            node.register_prehook(begin)


def replicas_of(model: nn.Module) -> Replicas | None:
    """What averages the gradients of a model, if anything does."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, _Hook) and hook.replicas is not None:
            return hook.replicas
    return None
