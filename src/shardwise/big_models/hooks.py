"""Hooks with state around a module's forward, on top of torch's own forward hooks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ModelHook:
    """What happens around each call of a module; subclass it and give it to :func:`add_hook_to_module`.

    Set ``no_grad = True`` to run the module's forward without gradients.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called once, as the hook is attached. Returns the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before the module's forward with its arguments. Returns those that forward gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after the module's forward with its output. Returns what the caller gets."""
        return output

    def on_error(self, module: nn.Module) -> None:
        """Called instead of :meth:`post_forward` when the forward, or a hook before it, raised."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called once, as the hook is taken off. Returns the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one: each event reaches them in their order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.no_grad = any(hook.no_grad for hook in hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Attach every hook."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the arguments through every hook."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Give the output through every hook."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def on_error(self, module: nn.Module) -> None:
        """Tell every hook."""
        for hook in self.hooks:
            hook.on_error(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Take every hook off."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Attach a hook to a module.

    Torch's own forward hooks call it, so it acts where the module is called (``module(...)``), not where somebody
    calls ``module.forward(...)``.

    Args:
        module: the module, changed in place.
        hook: the hook; it is also found as ``module._hf_hook``.
        append: keep the hook that is there and let it run first; without this it is replaced.

    Returns:
        The module.
    """
    old: ModelHook | None = module.__dict__.get("_hf_hook")
    if old is not None and append:
        # The old hook stays as it is: taking it off and on again would move its weights for nothing.
        _unhook(module)
        module = hook.init_hook(module)
        hook = _joined(old, hook)
    else:
        remove_hook_from_module(module)
        module = hook.init_hook(module)
    module.__dict__["_hf_hook"] = hook
    module.__dict__["_shardwise_calls"] = _Calls(module, hook)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take the hook off a module.

    Args:
        module: the module, changed in place.
        recurse: off every module within as well.

    Returns:
        The module.
    """
    hook: ModelHook | None = module.__dict__.get("_hf_hook")
    if hook is not None:
        _unhook(module)
        hook.detach_hook(module)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return module


def _joined(first: ModelHook, second: ModelHook) -> SequentialHook:
    hooks = first.hooks if type(first) is SequentialHook else (first,)
    return SequentialHook(*hooks, second)


def _unhook(module: nn.Module) -> None:
    module.__dict__.pop("_shardwise_calls").remove()
    del module.__dict__["_hf_hook"]


def _uncompiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """A method that torch.compile leaves alone. What marks it imports the compiler, so that waits until it is there."""

    @functools.wraps(call)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            disable: Any = torch.compiler.disable
            return disable(call)(*args, **kwargs)
        return call(*args, **kwargs)

    return plain


class _Frame:
    """One call of a module that is under way."""

    def __init__(self, grad: bool) -> None:
        self.grad = grad
        self.done = False


class _Calls:
    """Torch's hooks of one module that call a ModelHook, in pairs even when something raises."""

    def __init__(self, module: nn.Module, hook: ModelHook) -> None:
        self._hook = hook
        self._frames: dict[int, list[_Frame]] = {}  # by thread, since threads may share a model
        self._handles = [
            # First of all, since hooks that torch's own weight_norm and spectral_norm attach compute with the weights.
            module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            module.register_forward_hook(self._after),
            # Torch calls this one whether or not the forward raised, and after the one above.
            module.register_forward_hook(self._finally, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @_uncompiled
    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._frames.setdefault(threading.get_ident(), []).append(_Frame(torch.is_grad_enabled()))
        result = self._hook.pre_forward(module, *args, **kwargs)
        if self._hook.no_grad:
            torch.set_grad_enabled(False)
        return result

    @_uncompiled
    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        frames = self._frames.get(threading.get_ident())
        if not frames:
            return None  # attached while the module was running
        frame = frames[-1]
        if self._hook.no_grad:
            torch.set_grad_enabled(frame.grad)
        result = self._hook.post_forward(module, output)
        frame.done = True
        return result

    @_uncompiled
    def _finally(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        frames = self._frames.get(threading.get_ident())
        if not frames:
            return
        frame = frames.pop()
        if not frames:
            self._frames.pop(threading.get_ident(), None)
        if not frame.done:
            if self._hook.no_grad:
                torch.set_grad_enabled(frame.grad)
            self._hook.on_error(module)
