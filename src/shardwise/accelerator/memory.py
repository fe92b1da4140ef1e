"""Memory: a batch size that fits, and giving back what is not used any more."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from shardwise.accelerator.process import Processes
from shardwise.dist.objects import gather_values
from shardwise.errors import CommError, ConfigError, ShardwiseError

_OUT_OF_MEMORY = (
    "out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


class NoBatchSizeFits(ShardwiseError, RuntimeError):
    """The function ran out of memory with every batch size."""


class BatchSizeGiven(ShardwiseError, TypeError):
    """A function that is given its batch size was called with one."""


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the memory that torch keeps for later back to the devices.

    Args:
        garbage_collection: first free the objects that only refer to each other; takes a while.
    """
    if garbage_collection:
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # which does nothing where the device was not used
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Free what only the caller still holds: ``model, optimizer = release_memory(model, optimizer)``.

    Returns:
        None for each object. The memory is free once the caller's names are bound to it.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether the exception says that memory ran out, on the CPU or a device."""
    if isinstance(exception, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(exception, RuntimeError) and any(text in str(exception) for text in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    processes: Processes | None = None,
) -> Any:
    """Decorate a function, so that it is called again with a smaller batch size when memory runs out.

    ``function(batch_size, ...)`` is called as ``function(...)``. Later calls begin with the size that worked last.

    By default each process decides for itself. A function that talks to other processes must then run out of memory
    on all of them or none: one that retries alone leaves the others waiting in a collective which it never enters, and
    no agreement can be had from those, since they do not come out of the function. Where every process does come out
    by itself (each tries its own memory, or a failed collective raises on all), give ``processes``: after each try they
    compare how it ended, and when memory ran out on one, all try again with the smallest of their next sizes.

    Args:
        function: takes the batch size first.
        starting_batch_size: the first to try.
        reduce_batch_size_fn: gives the next size, smaller than the last; by default nine tenths of it.
        processes: who try together; all of them must call the function.

    Raises:
        NoBatchSizeFits: no size above zero is left (a RuntimeError).
        BatchSizeGiven: the caller gave a batch size too (a TypeError).
        ConfigError: ``reduce_batch_size_fn`` did not give a smaller whole number.
        CommError: with ``processes``, another one's function failed for another reason.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            processes=processes,
        )
    search = _Search(function, starting_batch_size, reduce_batch_size_fn, processes)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return search.run(args, kwargs)

    return run


class _Search:
    """The batch size that is tried now."""

    def __init__(
        self,
        function: Callable[..., Any],
        size: int,
        reduce: Callable[[], int] | None,
        processes: Processes | None,
    ) -> None:
        self.function = function
        self.size = size
        self.reduce = reduce
        self.processes = processes if processes is not None and processes.use_distributed else None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._refuse_a_batch_size(args)
        clear_device_cache(garbage_collection=True)
        while True:
            if self.size <= 0:
                raise NoBatchSizeFits("No executable batch size found, reached zero.")
            result, failed = None, False
            try:
                result = self.function(self.size, *args, **kwargs)
            except Exception as error:
                failed = should_reduce_batch_size(error)
                if not failed:
                    self._agree("error", f"{type(error).__name__}: {error}")
                    raise
            # Not inside `except`: there the traceback still holds the tensors of the failed try.
            if not self._agree("memory" if failed else "fine"):
                return result
            del result
            clear_device_cache(garbage_collection=True)
            self.size = self._next()

    def _agree(self, how: str, text: str = "") -> bool:
        """Whether to try again, now that all processes have come out of the function."""
        if self.processes is None:
            return how == "memory"
        ends = gather_values(
            self.processes.axis, [how, text], self.processes.wire_device(), "find_executable_batch_size"
        )
        errors = [f"rank {rank}: {text}" for rank, (end, text) in enumerate(ends) if end == "error"]
        if errors and how != "error":
            raise CommError(f"find_executable_batch_size: the function failed on another process: {'; '.join(errors)}")
        return any(end == "memory" for end, _ in ends)

    def _next(self) -> int:
        size, problem = int(self.size * 0.9), ""
        if self.reduce is not None:
            size = self.reduce()
            if not isinstance(size, int) or size >= self.size:
                problem = f"reduce_batch_size_fn gave {size!r}; expected a whole number below {self.size}."
        if self.processes is not None:
            sizes = gather_values(
                self.processes.axis, [problem, 0 if problem else size], self.processes.wire_device(), "batch size"
            )
            problem = problem or next((text for text, _ in sizes if text), "")
            size = min(size for _, size in sizes)
        if problem:
            raise ConfigError(problem)
        return size

    def _refuse_a_batch_size(self, args: tuple[Any, ...]) -> None:
        parameters = list(inspect.signature(self.function).parameters.values())
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in parameters if p.kind in kinds]
        takes_any = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
        if takes_any or len(args) < len(names):
            return
        name = getattr(self.function, "__name__", "the function")
        call = ", ".join(f"{n}={v!r}" for n, v in zip(names[1:], args[1:], strict=False))
        raise BatchSizeGiven(
            f"Batch size was passed into `{name}` as the first argument when called. "
            f"Leave it out, the decorator gives it: `{name}({call})`"
        )
