"""A checkpointed call: what it keeps, hands on, and calls again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.checkpointing.recompute import Checkpointer
from shardwise.checkpointing.rng import RngTracker


class Counted:
    """Multiplies by a drawn mask; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.masks: list[torch.Tensor] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        mask = torch.rand_like(x).round()
        self.masks.append(mask)
        return (x * mask).sin().exp()


def test_it_is_called_again_in_the_backward_with_the_same_random_numbers() -> None:
    function, x = Counted(), torch.ones(5, requires_grad=True)
    out = Checkpointer()(function, (x,))
    assert function.calls == 1
    drawn = torch.rand(1)
    state = torch.get_rng_state()
    out.sum().backward()
    assert function.calls == 2 and torch.equal(*function.masks)
    assert torch.equal(torch.get_rng_state(), state) and drawn.numel() == 1, "the stream goes on where it was"


def test_without_gradients_and_inside_another_it_is_a_plain_call() -> None:
    function, x, run = Counted(), torch.ones(5, requires_grad=True), Checkpointer()
    with torch.no_grad():
        run(function, (x,))
    assert function.calls == 1

    def outer(x: torch.Tensor) -> torch.Tensor:
        assert run.is_plain()
        return run(function, (x,)).cos()

    run(outer, (x,)).sum().backward()
    assert function.calls == 3 and not run.is_plain()


def test_tensors_anywhere_in_the_arguments() -> None:
    w = torch.randn(3, requires_grad=True)

    def function(a: Any, *, b: Any, n: int) -> Any:
        assert type(a) is tuple and type(b["x"]) is list and n == 2
        return {"y": (a[0] * b["x"][0] * w).tanh() * n}, a[1]

    def grads(run: Any) -> Any:
        leaves = [torch.linspace(0, 1, 3).requires_grad_(), torch.linspace(1, 2, 3).requires_grad_()]
        out, text = run(function, ((leaves[0].exp(), "text"),), {"b": {"x": [leaves[1].exp()]}, "n": 2})
        assert text == "text"
        return torch.autograd.grad(out["y"].sum(), [*leaves, w])

    expected = grads(lambda function, args, kwargs: function(*args, **kwargs))
    assert all(torch.equal(a, b) for a, b in zip(grads(Checkpointer()), expected, strict=True))


def test_the_first_call_gets_the_very_containers() -> None:
    seen: list[torch.Tensor] = []

    def function(x: torch.Tensor, into: list[torch.Tensor]) -> torch.Tensor:
        y = x.tanh()
        into.append(y.detach())
        return y.exp()

    Checkpointer()(function, (torch.ones(2, requires_grad=True), seen)).sum().backward()
    assert len(seen) == 1, "the recomputation has a list of its own"


def test_gradients_of_gradients() -> None:
    layer, x = nn.Linear(3, 3), torch.linspace(-1, 1, 3).requires_grad_()

    def penalty(run: Any) -> torch.Tensor:
        (grad,) = torch.autograd.grad(run(lambda t: layer(t).tanh(), (x,)).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), layer.weight)[0]

    assert torch.equal(penalty(Checkpointer()), penalty(lambda function, args: function(*args)))


def test_an_exception_goes_through() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        Checkpointer()(fails, (torch.ones(2, requires_grad=True),))
    assert not Checkpointer.is_plain()


class Noted:
    """Takes the times."""

    class _Watch:
        def __init__(self) -> None:
            self.now = 0.0

        def mark(self) -> float:
            self.now += 1.0
            return self.now

        def measure(self, start: float, end: float, then: Any) -> None:
            then(end - start)

    def __init__(self) -> None:
        self.watch: Any = self._Watch()
        self.names: list[str] = []

    def add(self, name: str, seconds: float) -> None:
        assert seconds == 1.0
        self.names.append(name)


def test_profile_and_synchronize(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append("wait"))
    times, function = Noted(), Counted()
    out = Checkpointer(synchronize=True, times=times)(function, (torch.ones(2, requires_grad=True),))
    assert times.names == ["checkpointed forward"] and len(waits) == 2
    out.sum().backward()
    assert times.names == ["checkpointed forward", "recompute"] and len(waits) == 4
    Checkpointer()(function, (torch.ones(2, requires_grad=True),)).sum().backward()
    assert len(waits) == 4 and len(times.names) == 2


def test_named_generators_are_put_back_for_the_recomputation() -> None:
    rng, masks = RngTracker(), []
    rng.add("mine", 7)

    def function(x: torch.Tensor) -> torch.Tensor:
        with rng.fork("mine"):
            masks.append(torch.rand(4))
        return (x * masks[-1]).exp()

    out = Checkpointer(rng=rng)(function, (torch.ones(4, requires_grad=True),))
    with rng.fork("mine"):
        after = torch.rand(4)
    out.sum().backward()
    assert torch.equal(*masks) and not torch.equal(after, masks[0])
    with rng.fork("mine"):
        assert not torch.equal(torch.rand(4), after), "the stream goes on where it was"
