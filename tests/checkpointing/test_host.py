"""`cpu_checkpointing`: what is moved, when it comes back. Copies within host memory stand for those of a GPU."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import ShardingError
from shardwise.checkpointing.host import HostCopies, Parked
from shardwise.checkpointing.recompute import Checkpointer


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, seen: Any = None, table: Any = None) -> torch.Tensor:
        x = x + torch.tanh(self.line(x))
        x = x if seen is None else x * seen["encoder"].mean()
        return x if table is None else x + table


def loss_of(checkpointer: Checkpointer | None, layers: list[Layer]) -> torch.Tensor:
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    encoder = (x * 2).tanh()
    table = torch.full((4,), 0.5)
    for layer in layers:
        keys = {"seen": {"encoder": encoder}, "table": table}
        x = checkpointer(layer, (x,), keys) if checkpointer is not None else layer(x, **keys)
    return x.square().sum()


def grads(loss: torch.Tensor, layers: list[Layer]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [p for layer in layers for p in layer.parameters()], retain_graph=True))


def test_gradients_are_those_without_it_also_the_second_time() -> None:
    layers = [Layer() for _ in range(4)]
    expected = grads(loss_of(None, layers), layers)
    loss = loss_of(Checkpointer(host=HostCopies(always=True)), layers)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(grads(loss, layers), expected, strict=True))


def test_what_carries_gradients_is_moved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parked: list[Parked] = []
    init = Parked.__init__

    def watched(self: Parked, *args: Any) -> None:
        init(self, *args)
        parked.append(self)

    monkeypatch.setattr(Parked, "__init__", watched)
    layers = [Layer() for _ in range(4)]
    loss = loss_of(Checkpointer(host=HostCopies(always=True)), layers)
    # The four inputs, and what the encoder gave; not the table that all share.
    assert [tuple(p.host.shape) for p in parked] == [(3, 4)] * 5
    held = [weakref.ref(p.host) for p in parked]
    parked.clear()
    grads(loss, layers)
    del loss
    gc.collect()
    assert not any(ref() is not None for ref in held), "host memory is given back"


def test_the_one_before_travels_while_this_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Parked] = []
    fetched: list[tuple[int, int]] = []
    start, fetch = Parked.start, Parked.fetch

    def watched_start(self: Parked) -> None:
        if self._back is None:
            started.append(self)
        start(self)

    def watched_fetch(self: Parked) -> torch.Tensor:
        early = self._back is not None
        out = fetch(self)
        fetched.append((len(started), int(early)))
        return out

    monkeypatch.setattr(Parked, "start", watched_start)
    monkeypatch.setattr(Parked, "fetch", watched_fetch)
    checkpointer = Checkpointer(host=HostCopies(always=True))
    x = torch.ones(3, 4, requires_grad=True)
    layers = [Layer() for _ in range(4)]
    out = x
    for layer in layers:
        out = checkpointer(layer, (out,))
    out.sum().backward()
    # Each fetch has started its own (unless it was started before) and the next one.
    assert fetched == [(2, 0), (3, 1), (4, 1), (4, 1)]


def test_the_device_copy_is_not_kept() -> None:
    checkpointer = Checkpointer(host=HostCopies(always=True))
    x = torch.ones(3, 4, requires_grad=True) * 2
    alive = weakref.ref(x)
    out = checkpointer(lambda t: t.tanh(), (x,))
    node = out.grad_fn
    del x
    assert alive() is None and node is not None
    out.sum().backward()


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.long)],
    ids=["without gradient", "parameter", "positions"],
)
def test_what_stays(tensor: torch.Tensor) -> None:
    assert not HostCopies(always=True).moves(tensor)


def test_on_a_cpu_nothing_is_copied() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not HostCopies().moves(x) and HostCopies(always=True).moves(x)


def test_a_tensor_that_was_written_to_is_copied_again() -> None:
    host = HostCopies(always=True)
    x = torch.ones(2, requires_grad=True) * 1
    first = host.park(x)
    assert host.park(x) is first
    x.mul_(3)
    second = host.park(x)
    assert second is not first and first.fetch().tolist() == [1, 1] and second.fetch().tolist() == [3, 3]


def test_a_block_that_writes_into_its_input_is_refused() -> None:
    checkpointer = Checkpointer(host=HostCopies(always=True))
    with pytest.raises(ShardingError, match="changes an input of its own in place"):
        checkpointer(lambda x: x.mul_(2).sin(), (torch.ones(2, requires_grad=True) * 1,))
