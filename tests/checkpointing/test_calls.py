"""Upstream's names for checkpointing by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import shardwise
from shardwise import NotYetSupported, ShardwiseError
from shardwise.checkpointing import calls
from shardwise.checkpointing.process import Process
from tests.checkpointing.models import Lines

checkpointing = shardwise.checkpointing
CONFIG = {
    "train_batch_size": 1,
    "activation_checkpointing": {"cpu_checkpointing": True, "synchronize_checkpoint_boundary": True, "profile": True},
}


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    fresh = Process()
    monkeypatch.setattr(calls, "PROCESS", fresh)
    return fresh


def run(function: Any) -> int:
    """How often the function is called."""
    count = 0

    def counted(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal count
        count += 1
        return (x * y).exp(), x.sin()

    x, y = torch.ones(3, requires_grad=True), torch.ones(3)
    a, b = function(counted, x, y)
    (a.sum() + b.sum()).backward()
    expected = torch.full((3,), 1.0).exp() + torch.ones(3).cos()
    torch.testing.assert_close(x.grad, expected)
    return count


def test_checkpoint() -> None:
    assert run(checkpointing.checkpoint) == run(checkpointing.non_reentrant_checkpoint) == 2
    assert run(lambda f, x, y: checkpointing.checkpoint(f, x=x, y=y)) == 2
    assert checkpointing.checkpoint(lambda: 3) == 3


def test_checkpoint_function() -> None:
    outputs: list[torch.Tensor] = []
    assert run(lambda f, *args: checkpointing.CheckpointFunction.apply(f, outputs, *args)) == 2
    assert len(outputs) == 2


def test_configure_by_argument(process: Process) -> None:
    assert not checkpointing.is_configured()
    checkpointing.configure(None)
    assert checkpointing.is_configured() and process.configured is not None
    assert process.configured.host is None and not process.configured.synchronize and process.configured.times is None
    checkpointing.configure(None, checkpoint_in_cpu=True, synchronize=True)
    assert process.configured.host is not None and process.configured.synchronize
    assert run(checkpointing.checkpoint) == 2
    checkpointing.reset()
    checkpointing.set_num_layers(4)
    assert checkpointing.is_configured()


def test_configure_by_file_and_arguments_that_beat_it(process: Process) -> None:
    checkpointing.configure(None, CONFIG, synchronize=False)
    found = process.configured
    assert found is not None and found.host is not None and not found.synchronize and found.times is not None
    with pytest.raises(shardwise.ConfigError, match=r"activation_checkpointing\.profil"):
        checkpointing.configure(None, {"train_batch_size": 1, "activation_checkpointing": {"profil": True}})


def test_profile_logs_each_call(log: Lines) -> None:
    checkpointing.configure(None, profile=True)
    run(checkpointing.checkpoint)
    assert [line.split(":")[0] for line in log.lines] == ["checkpointed forward", "recompute"]


def test_what_has_no_effect_is_said(log: Lines) -> None:
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=4)
    checkpointing.partition_activations_in_checkpoint(True)
    assert "no effect: partition_activations, contiguous_checkpointing, num_checkpoints" in str(log)
    log.lines.clear()
    checkpointing.configure(None)
    checkpointing.partition_activations_in_checkpoint(False)
    assert log.lines == []


@pytest.mark.parametrize("name", ["get_model_parallel_world_size", "get_tensor_model_parallel_world_size"])
def test_several_tensor_ranks_have_not_landed(name: str) -> None:
    checkpointing.configure(SimpleNamespace(**{name: lambda: 1}))
    with pytest.raises(NotYetSupported, match="tensor-parallel"):
        checkpointing.configure(SimpleNamespace(**{name: lambda: 2}))


def test_generators(upstream: Callable[[str], ModuleType]) -> None:
    checkpointing.model_parallel_cuda_manual_seed(5)
    own = torch.rand(3)
    tracker = checkpointing.get_cuda_rng_tracker()
    with tracker.fork():
        drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(own, torch.rand(3))
    torch.manual_seed(5 + 2718)
    assert torch.equal(drawn, torch.rand(3))
    checkpointing.model_parallel_reconfigure_tp_seed(5)
    with tracker.fork("model-parallel-rng"):
        assert torch.equal(drawn, torch.rand(3))
    names = vars(upstream("deepspeed").checkpointing.CudaRNGStatesTracker)
    assert all(hasattr(tracker, name) for name in names if not name.startswith("_"))


def test_a_generator_that_is_not_there_or_is_there_already() -> None:
    tracker = checkpointing.get_cuda_rng_tracker()
    with pytest.raises(ShardwiseError, match="none named 'model-parallel-rng'"), tracker.fork():
        pass
    tracker.add("a", 1)
    for name, seed, what in (("a", 2, "name 'a'"), ("b", 1, "seed 1")):
        with pytest.raises(ShardwiseError, match=f"the {what} is in use"):
            tracker.add(name, seed)
    before = tracker.get_states()
    with tracker.fork("a"):
        torch.rand(1)
    assert not torch.equal(before["a"], tracker.get_states()["a"])
    tracker.set_states(before)
    tracker.reset()
    assert tracker.get_states() == {}


def test_the_names_are_upstreams(upstream: Callable[[str], ModuleType]) -> None:
    theirs = upstream("deepspeed").checkpointing
    assert all(hasattr(theirs, name) for name in checkpointing.__all__)


def test_inside_a_compiled_function_it_runs_outside_of_it() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return checkpointing.checkpoint(lambda t: t.sin().exp(), x * 2).cos()

    x = torch.linspace(0, 1, 4).requires_grad_()
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    (found,) = torch.autograd.grad(torch.compile(function, backend="eager")(x).sum(), x)
    assert torch.equal(found, expected)
