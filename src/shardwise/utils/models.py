"""Helpers on models that scripts call without an Accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from shardwise import _torch
from shardwise.accelerator.files import write_value
from shardwise.engine import Engine
from shardwise.errors import ConfigError


def is_compiled_module(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile`` returned."""
    return _torch.is_compiled(module)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether a module inside of it is."""
    return any(is_compiled_module(m) for m in module.modules() if m is not module)


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The script's own model; see ``Accelerator.unwrap_model``."""
    inner = model._orig_mod if _torch.is_compiled(model) else model
    found = inner
    while isinstance(found, nn.DataParallel | nn.parallel.DistributedDataParallel | Engine):
        found = found.module
    return model if found is inner and keep_torch_compile else found


def save(obj: Any, f: str | Path, save_on_each_node: bool = False, safe_serialization: bool = True) -> None:
    """Write a value on the first process, as ``Accelerator.save`` does."""
    from shardwise.accelerator.current import current_processes

    if not safe_serialization:
        raise ConfigError("safe_serialization=False would write a pickle, which shardwise neither writes nor reads.")
    processes = current_processes()
    if processes.is_local_main_process if save_on_each_node else processes.is_main_process:
        write_value(Path(f), obj)
