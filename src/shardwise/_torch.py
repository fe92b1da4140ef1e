"""Every torch name that is private or differs between torch 2.11 and later. Each one has a test."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves as _tree_leaves

# torch 2.13 renamed these two; the old names warn there and the new ones are missing before.
all_gather_single: Callable[..., Any] = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
)


def default_store() -> Any:
    """The key-value store behind the default process group."""
    return dist.distributed_c10d._get_default_store()


def env_store(timeout: Any) -> tuple[Any, int, int]:
    """The store that the launcher's variables name, this process's rank and the number of ranks."""
    c10d: Any = dist
    found: tuple[Any, int, int] = next(c10d.rendezvous("env://", timeout=timeout))
    return found


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor has a shape but no data (a dry run)."""
    return isinstance(tensor, FakeTensor)


def tensors_in(value: object) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples, mappings, dataclasses and registered output classes."""
    found: list[torch.Tensor] = []
    for leaf in _tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        elif isinstance(leaf, Mapping):
            found += tensors_in(list(leaf.values()))
    return found


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass that is running now has ended."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def preserve_version(tensor: torch.Tensor) -> Any:
    """A context in which in-place writes to ``tensor`` do not invalidate what autograd saved."""
    autograd: Any = torch.autograd
    return autograd._unsafe_preserve_version_counter(tensor)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether the module is a ``torch.compile`` wrapper."""
    # Importing torch._dynamo takes a second; where nobody has imported it, nothing is compiled.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)


class Variants:
    """What torch has compiled of a method that went through ``torch.compile``.

    Args:
        method: the compiled one. Of anything but a method nothing is known.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        original: Any = getattr(method, "_torchdynamo_orig_callable", method)
        function = getattr(original, "__func__", None)
        self._function = function if isinstance(function, FunctionType) else None
        self._owner = getattr(original, "__self__", None)

    @property
    def count(self) -> int:
        """How many there are; 0 if that is unknown."""
        return len(self._entries())

    def has(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether one of them is for this very call; True if that is unknown."""
        function = self._function
        if function is None:
            return True
        bound = inspect.signature(function, follow_wrapped=False).bind(self._owner, *args, **kwargs)
        bound.apply_defaults()
        # Guards are checked on the frame's variables, and those of a closure are among them.
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        frame = {**bound.arguments, **{name: cell.cell_contents for name, cell in cells.items()}}
        return any(entry.guard_manager.check(frame) for entry in self._entries())

    def _entries(self) -> list[Any]:
        if self._function is None:
            return []
        entries: list[Any] = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(self._function.__code__)
        return entries


def is_missing_storage(error: RuntimeError) -> bool:
    """Whether torch complains that a tensor's storage was released."""
    return "storage of size 0" in str(error) or "data is not allocated yet" in str(error)


def graph_task_id() -> int:
    """A number of the backward graph that this thread executes now; -1 outside. Re-entrant graphs have their own."""
    return int(torch._C._current_graph_task_id())


def in_backward_pass() -> bool:
    """Whether this thread is executing autograd nodes now."""
    return graph_task_id() != -1


def inside_checkpoint() -> bool:
    """Whether the forward of a non-reentrant ``torch.utils.checkpoint`` runs around this call."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return False
    pack: Any = hooks[0]
    return getattr(pack, "__module__", "") == "torch.utils.checkpoint" and "_checkpoint_hook" in getattr(
        pack, "__qualname__", ""
    )


# For functions of ours that a user's compiled code may call. (The decorator imports the compiler when first called.)
outside_compiled_code: Callable[..., Any] = torch._disable_dynamo  # type: ignore[attr-defined]


def fused_adam_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float = 0.0,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Torch's fused AdamW kernel alone: the counts in ``steps`` stay as given."""
    kernel: Callable[..., None] = torch._fused_adamw_
    settings = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
    rest = {"amsgrad": False, "maximize": False, "grad_scale": None, "found_inf": found_inf}
    kernel(params, grads, exp_avgs, exp_avg_sqs, [], steps, **settings, **rest)
