"""`cpu_checkpointing`: what checkpointed calls keep lies in host memory until the backward pass wants it."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise import _torch
from shardwise.errors import ShardingError


class HostCopies:
    """Copies tensors to pinned host memory while a call computes, and back before it is made again.

    Moved are arguments that carry gradients (the hidden states); masks, positions and rotary tables are the same for
    all blocks, and there is one of each. A tensor that several calls get is copied once.

    On CUDA copies run in a stream of their own. A call's end waits for the copy of its arguments (in the stream, not
    on the host), so that they may be freed or written to from then on. When one call's arguments are fetched, those of
    the call before it start to travel. On a CPU tensors are in host memory already: nothing is copied.

    Args:
        always: for tests: copy within host memory too.
    """

    def __init__(self, *, always: bool = False) -> None:
        self._always = always
        self._known = WeakTensorKeyDictionary()
        self._last: weakref.ref[Parked] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def moves(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is one to be moved."""
        if not tensor.requires_grad or isinstance(tensor, nn.Parameter) or tensor.is_sparse or _torch.is_fake(tensor):
            return False
        return self._always or tensor.device.type != "cpu"

    def park(self, tensor: torch.Tensor) -> Parked:
        """Start to copy the tensor; the same tensor again gives the same copy, unless it was written to."""
        known: Parked | None = self._known.get(tensor)  # type: ignore[no-untyped-call]
        if known is not None and known.is_of(tensor):
            return known
        parked = Parked(tensor, self._stream(tensor.device), self._last)
        self._known[tensor] = parked
        self._last = weakref.ref(parked)
        return parked

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


class Parked:
    """One tensor in host memory.

    Args:
        tensor: what to copy.
        stream: in which to copy; None: at once.
        before: what was parked before it, and is wanted after it.
    """

    def __init__(
        self, tensor: torch.Tensor, stream: torch.cuda.Stream | None, before: weakref.ref[Parked] | None
    ) -> None:
        self._of = weakref.ref(tensor)
        self._version = tensor._version
        self._device = tensor.device
        self._stream = stream
        self._before = before
        self._left: torch.cuda.Event | None = None
        self._back: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        source = tensor.detach()
        self.host = torch.empty_like(source, device="cpu", pin_memory=stream is not None)
        if stream is None:
            self.host.copy_(source)
            return
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self.host.copy_(source, non_blocking=True)
            self._left = stream.record_event()
        source.record_stream(stream)  # should the call fail, the tensor may be freed before `settle`

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether this is a copy of the tensor as it is now."""
        return self._of() is tensor and tensor._version == self._version

    def settle(self) -> None:
        """The call is over: what the device does from now on comes after the copy.

        Raises:
            ShardingError: the call has written into the tensor.
        """
        if self._left is not None:
            torch.cuda.current_stream(self._device).wait_event(self._left)
            self._left = None
        tensor = self._of()
        if tensor is not None and tensor._version != self._version:
            raise ShardingError(
                "activation_checkpointing.cpu_checkpointing: a checkpointed block changes an input of its own in "
                "place, so that it cannot be computed again from it. Let the block write into a new tensor "
                "(x = x + y instead of x += y)."
            )

    def start(self) -> None:
        """Start to copy it back."""
        if self._back is not None:
            return
        tensor = torch.empty_like(self.host, device=self._device)
        if self._stream is None:
            tensor.copy_(self.host)
            self._back = tensor, None
            return
        # The memory is the current stream's, which may still be using it for what lay there before.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            tensor.copy_(self.host, non_blocking=True)
            event = self._stream.record_event()
        tensor.record_stream(self._stream)  # it may be dropped unused
        self._back = tensor, event

    def fetch(self) -> torch.Tensor:
        """The tensor on its device, a leaf that requires a gradient; starts to fetch the one that is wanted next."""
        self.start()
        (tensor, event), self._back = self._back, None  # type: ignore[misc]
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        before = self._before() if self._before is not None else None
        if before is not None:
            before.start()
        return tensor.requires_grad_()
