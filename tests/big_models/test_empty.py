"""Modules built without memory."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from shardwise.big_models import find_tied_parameters, init_empty_weights, init_on_device
from shardwise.errors import ConfigError
from tests.big_models.models import Tied


def test_parameters_are_empty_and_buffers_real() -> None:
    with init_empty_weights():
        model = Tied()
    assert all(p.is_meta for p in model.parameters())
    assert torch.equal(model.blocks[0].shift, torch.arange(8.0))
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_buffers_are_empty_when_asked() -> None:
    with init_empty_weights(include_buffers=True):
        model = Tied()
        assert torch.zeros(2).is_meta
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert not torch.zeros(2).is_meta


def test_ties_flags_and_classes_stay() -> None:
    class Special(nn.Parameter):
        pass

    with init_empty_weights():
        model = Tied()
        shared = nn.Parameter(torch.ones(3), requires_grad=False)
        shared.note = "kept"  # type: ignore[attr-defined]
        model.one, model.two = nn.Module(), nn.Module()
        model.one.w, model.two.w = shared, shared
        model.one.special = Special(torch.ones(2))
        model.one.lazy = nn.LazyLinear(3).weight
    assert find_tied_parameters(model) == [["embed.weight", "head.weight"], ["one.w", "two.w"]]
    assert not model.one.w.requires_grad
    assert model.one.w.note == "kept"
    assert type(model.one.special) is Special
    assert model.one.special.is_meta
    assert model.one.special.requires_grad
    assert nn.parameter.is_lazy(model.one.lazy)
    assert model.one.lazy.is_meta


def test_undone_after_an_error_and_innermost_decides() -> None:
    with pytest.raises(KeyError), init_empty_weights():
        raise KeyError
    assert not nn.Linear(2, 2).weight.is_meta
    with init_empty_weights():
        with init_on_device("cpu"):
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    assert not inner.weight.is_meta
    assert outer.weight.is_meta


def test_other_threads_build_real_modules() -> None:
    built: list[nn.Linear] = []
    with init_empty_weights():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
    assert not built[0].weight.is_meta


def test_no_such_device() -> None:
    with pytest.raises(ConfigError, match="no such device"), init_on_device("disk"):
        pass
    if not torch.accelerator.is_available():
        with pytest.raises(ConfigError, match="no accelerator"), init_on_device(0):
            pass
