"""Writing weights and values, once for all processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shardwise.accelerator.base import Base
from shardwise.accelerator.files import write_tensors, write_value
from shardwise.accelerator.process import Processes
from shardwise.accelerator.weights import save_weights, size_of, without_copies
from shardwise.dist.objects import gather_values
from shardwise.engine import Engine
from shardwise.errors import CommError, ConfigError


class Saving(Base):
    """The methods that write what other programs read."""

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """The whole weights of a model, under its own names. All processes must call this.

        Args:
            model: a prepared one, or any.
            unwrap: no effect: names are never those of a wrapper.
        """
        if isinstance(model, Engine):
            state = model.module_state_dict()
            first: dict[int, str] = {}
            for name, param in model.module.named_parameters(remove_duplicate=False):
                owner = first.setdefault(id(param), name)
                if name in state and owner in state:
                    state[name] = state[owner]
            return state
        inner = getattr(model, "_orig_mod", model)
        found: dict[str, Any] = inner.state_dict()
        return found

    def save(self, obj: Any, f: Any, safe_serialization: bool = True) -> None:
        """Write a value, once a run (or once a machine, ``save_on_each_node``).

        Args:
            obj: tensors by name, or numbers, text, tensors, nested.
            f: path; a safetensors file is written.
            safe_serialization: only True: nothing is pickled.
        """
        only_safe(safe_serialization)
        if not self._writes:
            return
        tensors = isinstance(obj, Mapping) and all(isinstance(v, torch.Tensor) for v in obj.values())
        if tensors:
            kept, same = without_copies({str(k): v for k, v in obj.items()})
            write_tensors(
                Path(f), {k: v.detach().contiguous().cpu() for k, v in kept.items()}, {"format": "pt", **same}
            )
        else:
            write_value(Path(f), obj)

    def save_model(
        self,
        model: Any,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's whole weights as ``model.safetensors``, or as parts with an index. All processes must call
        this."""
        only_safe(safe_serialization)
        folder, limit = Path(save_directory), size_of(max_shard_size)
        with together(self.processes, "save_model"):
            if folder.is_file():
                raise ConfigError(f"save_model: {folder} is a file, expected a folder.")
        state = self.get_state_dict(model)
        with together(self.processes, "save_model"):
            if self._writes:
                folder.mkdir(parents=True, exist_ok=True)
                save_weights(state, folder, limit)

    @property
    def _writes(self) -> bool:
        each = self.project_configuration.save_on_each_node
        return self.processes.is_local_main_process if each else self.processes.is_main_process


@contextmanager
def together(processes: Processes, what: str) -> Iterator[None]:
    """What each process does in here has worked on all of them, or an error is raised on all of them.

    Raises:
        CommError: on those where it worked, with the others' errors.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    if processes.num_processes > 1:
        text = "" if mine is None else f"{type(mine).__name__}: {mine}"
        told = gather_values(processes.axis, text, processes.wire_device(), what)
        others = "; ".join(f"process {rank}: {problem}" for rank, problem in enumerate(told) if problem)
        if others and mine is None:
            raise CommError(f"{what} failed: {others}")
    if mine is not None:
        raise mine


def only_safe(safe_serialization: bool) -> None:
    """Refuse pickles.

    Raises:
        ConfigError: one is asked for.
    """
    if not safe_serialization:
        raise ConfigError("safe_serialization=False would write a pickle, which shardwise neither writes nor reads.")
