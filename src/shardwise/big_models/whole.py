"""Whole models that take turns on a device: each comes as it is called and leaves when the next one is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.big_models.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from shardwise.big_models.tensors import Device, as_device, moved


class CpuOffload(ModelHook):
    """Keeps a model on the CPU until it is called, and on a device from then on.

    Args:
        execution_device: where it runs; the machine's accelerator when None, else the CPU.
        prev_module_hook: the hook of the model that leaves the device as this one comes.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        if execution_device is None:
            accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            execution_device = accelerator or "cpu"
        self.execution_device = as_device(execution_device)
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Send the model to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Send the model before away, and bring this one and its inputs."""
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        module.to(self.execution_device)
        return moved(args, self.execution_device), moved(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """What :func:`cpu_offload_with_hook` hands out: sends the model away, or takes its hook off."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Send the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off the model, which stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model on the CPU until it is called; then it stays on the device until it is sent away.

    For pipelines of several models of which one is in use for many calls: unlike :func:`cpu_offload`, the weights do
    not travel with each call.

    Args:
        model: the model, changed in place.
        execution_device: where it runs; the machine's accelerator when None, else the CPU.
        prev_module_hook: what this function returned for the model before; that leaves the device as this one comes.

    Returns:
        The model, and what sends it away (``offload()``) or takes the hook off (``remove()``).

    Raises:
        ConfigError: there is no such device.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
