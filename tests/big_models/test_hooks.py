"""Hooks around a module's forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.big_models import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    cpu_offload_with_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


class Adds(ModelHook):
    """Adds to the first argument and to the output."""

    def __init__(self, before: float, after: float, no_grad: bool = False) -> None:
        self.before, self.after, self.no_grad = before, after, no_grad
        self.events: list[str] = []

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.events.append("init")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.events.append("pre")
        return (args[0] + self.before, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.events.append("post")
        return output + self.after

    def on_error(self, module: nn.Module) -> None:
        self.events.append("error")

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.events.append("detach")
        return module


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        if fail:
            raise KeyError("asked to")
        return x * self.weight


ONE = torch.tensor(1.0)


def test_a_hook_changes_arguments_and_output() -> None:
    module, hook = Double(), Adds(1, 10)
    assert add_hook_to_module(module, hook) is module
    assert module(ONE).item() == 14
    assert module._hf_hook is hook
    other = Adds(2, 0)
    add_hook_to_module(module, other)  # in its place
    assert module(ONE).item() == 6
    assert hook.events == ["init", "pre", "post", "detach"]
    remove_hook_from_module(module)
    assert module(ONE).item() == 2
    assert not hasattr(module, "_hf_hook")
    remove_hook_from_module(module)


def test_appended_hooks_run_in_order() -> None:
    module, first, second = Double(), Adds(1, 0), Adds(10, 100)
    add_hook_to_module(module, first)
    add_hook_to_module(module, second, append=True)
    add_hook_to_module(module, Adds(0, 1000), append=True)
    assert isinstance(module._hf_hook, SequentialHook)
    assert len(module._hf_hook.hooks) == 3
    assert module(ONE).item() == 12 * 2 + 100 + 1000
    assert first.events == ["init", "pre", "post"]
    outer = nn.Sequential(module)
    remove_hook_from_submodules(outer)
    assert outer(ONE).item() == 2
    assert first.events[-1] == second.events[-1] == "detach"


def test_no_grad_and_errors() -> None:
    module, hook = Double(), Adds(0, 0, no_grad=True)
    add_hook_to_module(module, SequentialHook(hook))
    assert not module(ONE).requires_grad
    assert torch.is_grad_enabled()
    with pytest.raises(KeyError):
        module(ONE, fail=True)
    assert torch.is_grad_enabled()
    assert hook.events == ["init", "pre", "post", "pre", "error"]
    assert not module(ONE, fail=False).requires_grad


def test_models_take_turns() -> None:
    first, hook_1 = cpu_offload_with_hook(Double(), "cpu")
    second, hook_2 = cpu_offload_with_hook(Double(), "cpu", prev_module_hook=hook_1)
    assert second(first(ONE)).item() == 4
    hook_2.offload()
    hook_2.remove()
    hook_1.remove()
    assert not hasattr(second, "_hf_hook")
    assert second(first(ONE)).item() == 4
    sent: list[str] = []
    hook_2.offload = lambda: sent.append("away")  # type: ignore[method-assign]
    third, _ = cpu_offload_with_hook(Double(), "meta", prev_module_hook=hook_2)
    assert not sent
    assert third(ONE).is_meta  # model and inputs went there
    assert sent == ["away"]
