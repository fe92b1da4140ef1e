"""A recomputation leaves buffers alone, and goes by the training flags of the first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from shardwise.checkpointing import checkpoint
from shardwise.checkpointing.module_state import ModuleState
from shardwise.checkpointing.recompute import Checkpointer
from tests.checkpointing.models import WIDTH, batch, made, start, train

ON = {"activation_checkpointing": {"enabled": True}}


class Normed(nn.Module):
    """Writes running statistics, which torch does not count as writes, and two buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = torch.ones(2, 3) * self.calls  # another tensor
        hidden = self.norm(self.linear(x).flatten(0, 1)).view_as(x)
        return x + torch.tanh(self.drop(hidden))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Normed() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def trained(**keys: Any) -> tuple[Any, dict[str, torch.Tensor], float]:
    engine = start(made(Net), **keys)
    seen = train(engine)
    engine.eval()
    with torch.no_grad():
        evaluated = engine(batch(7)).item()
    state = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return seen, state, evaluated


@pytest.mark.parametrize("more", [{}, {"compile": {"enabled": True, "backend": "aot_eager"}}], ids=["", "compiled"])
def test_buffers_are_those_of_a_model_that_runs_once(more: dict[str, Any]) -> None:
    seen, state, evaluated = trained(**more)
    again, found, evaluated_again = trained(**ON, **more)
    assert again == seen and evaluated_again == evaluated
    assert found["layers.0.calls"] == 4 and found["layers.0.norm.num_batches_tracked"] == 3
    assert all(torch.equal(found[name], value) for name, value in state.items())


def modes(change: Callable[[nn.Module], Any], **keys: Any) -> tuple[float, float | None]:
    """A step whose model is set to another mode between forward and backward."""
    engine = start(made(Net), **keys)
    torch.manual_seed(5)
    loss = engine(batch(0))
    change(engine)
    with torch.no_grad():
        engine(batch(1))
    engine.backward(loss)
    engine.step()
    now = [m.training for m in engine.module.modules()]
    assert now == [now[0]] * len(now), "what the user has set"
    engine.destroy()
    return loss.item(), engine.get_global_grad_norm()


@pytest.mark.parametrize("stage", [0, 3])
def test_another_mode_before_the_backward(stage: int) -> None:
    def evaluate(engine: Any) -> None:
        engine.eval()

    assert modes(evaluate, zero_optimization={"stage": stage}, **ON) == modes(evaluate)


def test_by_hand_of_a_module_and_a_method() -> None:
    def run(call: Callable[..., Any]) -> list[torch.Tensor]:
        model = made(Normed)
        torch.manual_seed(1)
        loss = call(model, batch(0)).sum() + call(model.forward, batch(1)).sum()
        model.eval()
        loss.backward()
        assert not any(m.training for m in model.modules())
        return [*model.state_dict().values(), *(p.grad for p in model.parameters())]

    expected = run(lambda function, x: function(x))
    assert all(torch.equal(a, b) for a, b in zip(run(checkpoint), expected, strict=True))


def test_when_the_recomputation_fails() -> None:
    model = made(Normed)
    out = Checkpointer()(lambda x: model(x).sum(), (batch(0),), module=model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    failing = model.drop.register_forward_pre_hook(lambda *a: (_ for _ in ()).throw(KeyError("its own")))
    model.eval()
    with pytest.raises(KeyError, match="its own"):
        out.backward()
    failing.remove()
    assert not any(m.training for m in model.modules())
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_nothing_is_copied_where_nothing_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    block = weight_norm(nn.Linear(4, 4))
    block.register_buffer("mask", torch.ones(1, 4, 4))
    state = ModuleState(block)
    block(torch.ones(2, 4))
    state.first_call_ended()
    monkeypatch.setattr(torch.Tensor, "clone", lambda *a: pytest.fail("copied"))
    with state.recomputing():
        pass


def test_what_autograd_saved_of_a_written_buffer_stays_valid() -> None:
    """A graph that reads the buffer between the two calls."""
    model, w = made(Normed), torch.ones(WIDTH, requires_grad=True)
    out = Checkpointer()(model, (batch(0),), module=model)
    reads = (w * model.norm.running_mean).sum()
    out.sum().backward()
    reads.backward()
    assert torch.equal(w.grad, model.norm.running_mean)
