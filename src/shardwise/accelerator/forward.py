"""The forward of a model under mixed precision, by hooks: nothing of the model is replaced."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from shardwise.accelerator.nested import convert_to_fp32
from shardwise.data.batches import cast


class LowPrecisionForward:
    """Runs a model's forward under ``torch.autocast``, and gives its outputs in float32.

    Args:
        model: the model; it gets two hooks.
        device: type of the device.
        dtype: of the autocast.
        cache: whether autocast keeps cast weights for the time of a forward; None: torch's default.
        outputs_in_fp32: convert what the model returns.
    """

    def __init__(
        self, model: nn.Module, device: str, dtype: torch.dtype, *, cache: bool | None, outputs_in_fp32: bool
    ) -> None:
        self._options: dict[str, Any] = {"device_type": device, "dtype": dtype, "cache_enabled": cache}
        self._outputs_in_fp32 = outputs_in_fp32
        self._entered: dict[int, list[Any]] = {}  # by thread: autocast is a thread's own
        self._hooks = [
            model.register_forward_pre_hook(self._enter, prepend=True),
            # Also after an exception: the context must not stay open.
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        context = torch.autocast(**self._options)
        context.__enter__()  # type: ignore[no-untyped-call]
        self._entered.setdefault(threading.get_ident(), []).append(context)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        entered = self._entered.get(threading.get_ident())
        if entered:
            entered.pop().__exit__(None, None, None)
        return convert_to_fp32(output) if self._outputs_in_fp32 else output


def remove_low_precision(model: nn.Module) -> None:
    """Let a model's forward run in its own precision, whoever made it run in another."""
    for hook in list(model._forward_pre_hooks.values()):
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, LowPrecisionForward):
            owner.remove()


class LowPrecisionEngine:
    """Gives an engine's fp16 or bf16 model inputs of its dtype, and its outputs in float32, as autocast would.

    Args:
        engine: it gets two hooks, which go with it.
        dtype: of the model's parameters.
        outputs_in_fp32: convert what the model returns.
    """

    def __init__(self, engine: nn.Module, dtype: torch.dtype, *, outputs_in_fp32: bool) -> None:
        self._dtype = dtype
        engine.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        if outputs_in_fp32:
            engine.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return cast(args, self._dtype), cast(kwargs, self._dtype)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        return convert_to_fp32(output)
