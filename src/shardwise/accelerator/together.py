"""What processes do together, alone and in turn, and what they send each other."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from shardwise.accelerator import operations
from shardwise.accelerator.base import Base
from shardwise.accelerator.kinds import DistributedType
from shardwise.accelerator.nested import leaves, recursively_apply

logger = logging.getLogger(__name__)

UNKNOWN_LENGTH = "The used dataset had no length, returning gathered tensors. You should drop the remainder yourself."


class Together(Base):
    """Process control and collectives."""

    @property
    def distributed_type(self) -> DistributedType:
        """``DEEPSPEED`` with an engine, else by the kind of processes."""
        return self._state.distributed_type

    @property
    def num_processes(self) -> int:
        """How many there are on all machines."""
        return self.processes.num_processes

    @property
    def process_index(self) -> int:
        """Which of all this is, from 0."""
        return self.processes.process_index

    @property
    def local_process_index(self) -> int:
        """Which on its machine this is, from 0."""
        return self.processes.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first of all."""
        return self.processes.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first on its machine."""
        return self.processes.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last of all."""
        return self.processes.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.processes.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes on devices other than the CPU."""
        return self.use_distributed and self.device.type != "cpu"

    def wait_for_everyone(self) -> None:
        """Return when every process has called this."""
        self.processes.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print``, once on each machine."""
        self.processes.print(*args, **kwargs)

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """The block runs on the main process, then on the others."""
        return self.processes.main_process_first()

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """The block runs on the first process of each machine, then on its others."""
        return self.processes.local_main_process_first()

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> contextlib.AbstractContextManager[Any]:
        """This process's part of a list, tuple, dict, tensor or dataset."""
        return self.processes.split_between_processes(inputs, apply_padding)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorates what the main process alone runs."""
        return self.processes.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorates what the first process of each machine runs."""
        return self.processes.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates what the last process alone runs."""
        return self.processes.on_last_process(function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorates what one process alone runs."""
        return self.processes.on_process(function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorates what one process of each machine runs."""
        return self.processes.on_local_process(function, local_process_index)

    def set_trigger(self) -> None:
        """Raise a flag here, for :meth:`check_trigger` on all processes."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any process raised its flag; takes all flags down. All processes must call this."""
        raised = torch.tensor([float(self._trigger)], device=self.processes.wire_device())
        self.processes.axis.max_small(raised, "check_trigger")
        self._trigger = False
        return bool(raised.item())

    def gather(self, tensor: Any) -> Any:
        """Every process's tensors, one after the other along the first dimension. All processes must call this."""
        return operations.gather(tensor, processes=self.processes)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, mean or maximum of every process's tensors. All processes must call this."""
        return operations.reduce(tensor, reduction, scale, processes=self.processes)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors as long as the longest process's. All processes must call this."""
        return operations.pad_across_processes(tensor, dim, pad_index, pad_first, processes=self.processes)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, and leave out what the last round repeats, so that each sample counts once.

        What is cut are tensors and lists with an entry for each sample of the round. Scalars and others stay whole: a
        mean over a batch that repeats samples cannot be corrected here. Gather the values of the samples instead.

        Args:
            input_data: nested tensors, or objects: a list with an entry a sample.
            use_gather_object: gather tensors as objects (of different shapes, to the CPU).
        """
        found = [leaf for _, leaf in leaves(input_data)]
        # A process that has nothing to give has no tensors.
        objects = use_gather_object or not found or not all(isinstance(leaf, torch.Tensor) for leaf in found)
        if objects:
            data = operations.gather_object(input_data, processes=self.processes)
        else:
            data = operations.gather(input_data, processes=self.processes)
        loader = self.gradient_state.active_dataloader
        if loader is None or not loader.end_of_dataloader:
            return data
        remainder = loader.remainder
        if remainder < 0:
            logger.info(UNKNOWN_LENGTH)
            return data
        if remainder == 0:
            return data
        rows = getattr(loader, "rows", None)
        size = loader.total_batch_size if rows is None else rows * self.num_processes
        if objects:
            samples = isinstance(input_data, list) and isinstance(data, list) and len(data) == size
            return data[:remainder] if samples else data
        # A 0-d tensor of each process is gathered to 1-d: that is no entry a sample.
        return _cut(input_data, data, remainder, size)


def _cut(given: Any, data: Any, remainder: int, size: int | None) -> Any:
    before = iter([leaf for _, leaf in leaves(given)])

    def cut(after: torch.Tensor) -> torch.Tensor:
        whole = next(before).ndim > 0 and after.shape[0] == size
        return after[:remainder] if whole else after

    return recursively_apply(cut, data)
