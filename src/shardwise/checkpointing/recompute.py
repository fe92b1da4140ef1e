"""A call whose activations are not kept: only its arguments are, and the backward pass makes it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as _torch_checkpoint

from shardwise import _torch
from shardwise.checkpointing.host import HostCopies, Parked
from shardwise.checkpointing.module_state import ModuleState
from shardwise.checkpointing.rng import RngTracker

if TYPE_CHECKING:
    from shardwise.meter import Stopwatch


class Times(Protocol):
    """Where ``profile`` reports to; the engine's :class:`~shardwise.meter.Meter` is one."""

    watch: Stopwatch

    def add(self, name: str, seconds: float) -> None:
        """Time that a part took."""


class Checkpointer:
    """Makes calls by ``torch.utils.checkpoint`` (not re-entrant), with what ``activation_checkpointing`` adds to it.

    Tensors in nested tuples, lists and dicts of the arguments are kept until the backward pass, as is the state of
    torch's random generators; both calls draw the same numbers. (Those of ``random`` and numpy are not kept.)

    Args:
        cpu: keep the arguments that carry gradients in host memory (see :class:`HostCopies`).
        synchronize: wait for the device at the beginning and the end of each call and of each recomputation.
        times: gets the seconds of calls and of recomputations, as ``checkpointed forward`` and ``recompute``.
        rng: states of named generators, put back for the recomputation.
        host: for tests: what keeps arguments in host memory.
    """

    def __init__(
        self,
        *,
        cpu: bool = False,
        synchronize: bool = False,
        times: Times | None = None,
        rng: RngTracker | None = None,
        host: HostCopies | None = None,
    ) -> None:
        self.host = host if host is not None else (HostCopies() if cpu else None)
        self.synchronize = synchronize
        self.times = times
        self.rng = rng

    @staticmethod
    def is_plain() -> bool:
        """Whether a call made now is an ordinary one: nothing is recorded, or a checkpoint is at work around it."""
        return not torch.is_grad_enabled() or _torch.in_backward_pass() or _torch.inside_checkpoint()

    def __call__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        module: nn.Module | None = None,
    ) -> Any:
        """``function(*args, **kwargs)``, to be made again in the backward pass.

        Args:
            function: called twice.
            args, kwargs: its arguments.
            module: the second call finds its training flags as the first did, and leaves its buffers alone.

        Raises:
            ShardingError: with ``cpu``: the function writes into an argument that was to be moved.
        """
        kwargs = dict(kwargs or {})
        if self.is_plain():
            return function(*args, **kwargs)
        call = _Call(self, function, args, kwargs, ModuleState(module))
        out = _torch_checkpoint(call, *call.tensors, use_reentrant=False)
        call.ends()
        return out

    def run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function, timed and with the device waited for as the options say."""
        if self.synchronize:
            _wait()
        start = self.times.watch.mark() if self.times is not None else None
        try:
            return function(*args, **kwargs)
        finally:  # a recomputation ends by an exception, as soon as it has what is needed
            if self.times is not None and start is not None:
                times = self.times
                times.watch.measure(start, times.watch.mark(), lambda seconds: times.add(name, seconds))
            if self.synchronize:
                _wait()


class _Call:
    """One checkpointed call: the first time with the arguments as they came, later with those that were kept."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: ModuleState,
    ) -> None:
        self._checkpointer = checkpointer
        self._state = state
        self._function = function
        # The containers themselves, for the first call: a function may append to a list that it is given.
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._rng = checkpointer.rng.get_states() if checkpointer.rng is not None else {}
        self._parked: list[Parked] = []
        self.tensors: list[torch.Tensor] = []
        self._kept = self._keep((args, kwargs))
        inside = _torch.tensors_in((args, kwargs))
        if inside:
            # torch keeps the random state of the devices of the tensors that it is given: this one says which.
            self.tensors.append(inside[0].detach().new_empty(0))

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            return self._checkpointer.run("checkpointed forward", self._function, args, kwargs)
        args, kwargs = self._restore(self._kept, tensors)
        with _States(self._checkpointer.rng, self._rng), self._state.recomputing():
            return self._checkpointer.run("recompute", self._function, args, kwargs)

    def ends(self) -> None:
        """The first call is over, without an error."""
        self._state.first_call_ended()
        for parked in self._parked:
            parked.settle()

    def _keep(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            host = self._checkpointer.host
            if host is not None and host.moves(value):
                parked = host.park(value)
                self._parked.append(parked)
                return parked
            self.tensors.append(value)
            return _Slot(len(self.tensors) - 1)
        if type(value) is dict:
            return {key: self._keep(item) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._keep(item) for item in value)
        return value

    def _restore(self, kept: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
        if isinstance(kept, _Slot):
            return tensors[kept.index]
        if isinstance(kept, Parked):
            return kept.fetch()
        if type(kept) is dict:
            return {key: self._restore(item, tensors) for key, item in kept.items()}
        if type(kept) in (tuple, list):
            return type(kept)(self._restore(item, tensors) for item in kept)
        return kept


class _Slot:
    """Stands for a tensor that torch keeps."""

    def __init__(self, index: int) -> None:
        self.index = index


class _States:
    """Named generators as they were at the first call, and afterwards as they are now."""

    def __init__(self, rng: RngTracker | None, states: dict[str, torch.Tensor]) -> None:
        self._rng, self._then = rng, states
        self._now: dict[str, torch.Tensor] = {}

    def __enter__(self) -> None:
        if self._rng is not None:
            self._now = self._rng.get_states()
            self._rng.set_states(dict(self._then))

    def __exit__(self, *_error: object) -> None:
        if self._rng is not None:
            self._rng.set_states(self._now)


def _wait() -> None:
    if torch.accelerator.is_available():  # a CPU has done its work when a call returns
        torch.accelerator.synchronize()
