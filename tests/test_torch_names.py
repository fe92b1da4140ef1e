"""Every private or renamed name of torch that `_torch.py` uses does what shardwise relies on."""

from __future__ import annotations

import ast
import collections
import inspect
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise import _torch
from tests.ranks import RankPools


def test_every_name_is_tested() -> None:
    tree = ast.parse(inspect.getsource(_torch))
    names = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    names |= {n.target.id for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    tests = inspect.getsource(inspect.getmodule(test_every_name_is_tested))  # type: ignore[arg-type]
    assert not [name for name in names if f"_torch.{name}" not in tests]


def exchange() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    flat = torch.zeros(2 * size)
    work = _torch.all_gather_single(flat, torch.full((2,), float(rank)), group=dist.group.WORLD, async_op=True)
    work.wait()
    assert flat.tolist() == [float(r) for r in range(size) for _ in range(2)]
    own = torch.zeros(2)
    work = _torch.reduce_scatter_single(own, torch.arange(2.0 * size), group=dist.group.WORLD, async_op=True)
    work.wait()
    assert own.tolist() == [size * (2.0 * rank), size * (2.0 * rank + 1)]
    store = _torch.default_store()
    store.set(f"tests/{rank}", f"value {rank}")
    dist.barrier()
    other = (rank + 1) % size
    assert store.check([f"tests/{other}"]) and store.get(f"tests/{other}").decode() == f"value {other}"
    assert not store.check(["tests/nobody"])
    dist.barrier()
    store.delete_key(f"tests/{rank}")


def test_collectives_and_store(ranks: RankPools) -> None:
    ranks(2).run(exchange)


def test_is_fake() -> None:
    with FakeTensorMode():
        assert _torch.is_fake(torch.empty(2))
        assert _torch.is_fake(nn.Linear(2, 2).weight)
    assert not _torch.is_fake(torch.empty(2)) and not _torch.is_fake(torch.empty(2, device="meta"))


def test_tensors_in() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    pair = collections.namedtuple("pair", "x y")
    found = _torch.tensors_in({"a": [a, (b, None)], "p": pair(c, 3), "s": "text"})
    assert {id(t) for t in found} == {id(a), id(b), id(c)}
    assert _torch.tensors_in(a)[0] is a and _torch.tensors_in(None) == []


def test_queue_backward_callback() -> None:
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: seen.append("gradient"))
    y = x * 2

    def start(grad: torch.Tensor) -> None:
        _torch.queue_backward_callback(lambda: seen.append("end"))
        seen.append("start")

    y.register_hook(start)
    y.sum().backward()
    assert seen == ["start", "gradient", "end"]


def test_preserve_version() -> None:
    x, w = torch.ones(2, requires_grad=True), torch.ones(2)
    loss = (x * w).sum()
    with torch.no_grad(), _torch.preserve_version(w):
        w.fill_(3.0)
    loss.backward()
    assert x.grad is not None and x.grad.tolist() == [3.0, 3.0]


def test_is_compiled() -> None:
    model = nn.Linear(2, 2)
    assert not _torch.is_compiled(model)
    assert _torch.is_compiled(torch.compile(model, backend="eager"))  # type: ignore[arg-type]


class Shifted:
    def __init__(self, by: int) -> None:
        self.by = by

    def call(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        return x + self.by * (1 + twice)


def test_variants_and_for_which_calls_they_are() -> None:
    torch._dynamo.reset()
    method, other = (torch.compile(Shifted(by).call, backend="eager", dynamic=False) for by in (1, 2))
    of, of_other = _torch.Variants(method), _torch.Variants(other)
    x = torch.ones(3)
    assert of.count == 0 and not of.has((x,), {})
    method(x)
    assert of.count == 1 and of.has((x,), {}) and of.has((x,), {"twice": False})
    assert not of.has((x,), {"twice": True}) and not of.has((torch.ones(4),), {}) and not of_other.has((x,), {})
    other(x)
    assert of.count == of_other.count == 2 and of_other.has((x,), {})
    unknown = _torch.Variants(torch.compile(lambda x: x + 1, backend="eager"))
    assert unknown.count == 0 and unknown.has((x,), {})


def test_in_backward_pass() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: seen.append(_torch.in_backward_pass()))
    (x * 2).sum().backward()
    assert seen == [True] and not _torch.in_backward_pass()


def test_is_missing_storage() -> None:
    flat = torch.ones(16)
    view = flat.view(4, 4)
    flat.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError) as read:
        torch.mm(torch.ones(4, 4), view)
    with pytest.raises(RuntimeError) as seen:
        flat[2:].view(7, 2).add(1)
    assert _torch.is_missing_storage(read.value) and _torch.is_missing_storage(seen.value)
    assert not _torch.is_missing_storage(RuntimeError("mat1 and mat2 must have the same dtype"))


def test_graph_task_id() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)

    def nested(g: torch.Tensor) -> None:
        seen.append(_torch.graph_task_id())
        y = torch.ones(2, requires_grad=True)
        y.register_hook(lambda _: seen.append(_torch.graph_task_id()))
        with torch.enable_grad():
            (y * 2).sum().backward()

    x.register_hook(nested)
    (x * 2).sum().backward()
    assert len(set(seen)) == 2 and -1 not in seen and _torch.graph_task_id() == -1


def test_inside_checkpoint() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.inside_checkpoint())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(look, x, use_reentrant=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        look(x)
    assert seen == [True, False] and not _torch.inside_checkpoint()


def test_outside_compiled_code() -> None:
    compiling: list[bool] = []

    @_torch.outside_compiled_code
    def look(x: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x + 1

    found = torch.compile(lambda x: look(x * 2), backend="eager")(torch.ones(2))
    assert found.tolist() == [3.0, 3.0] and compiling == [False]


def test_fused_adam_subtracts_the_plain_direction_after_infinitely_many_steps() -> None:
    """`_torch.fused_adam_`: no bias correction, and the counts stay."""
    grad, out = torch.tensor([3.0, -0.5]), torch.zeros(2)
    first, second, count = torch.zeros(2), torch.zeros(2), torch.tensor(torch.inf)
    _torch.fused_adam_([out], [grad], [first], [second], [count], lr=1.0, beta1=0.5, beta2=0.75, eps=0.1)
    torch.testing.assert_close(out, -(0.5 * grad) / ((0.25 * grad**2).sqrt() + 0.1))
    assert torch.isinf(count) and torch.equal(grad, torch.tensor([3.0, -0.5]))


def the_launchers_store() -> list[Any]:
    store, rank, size = _torch.env_store(timedelta(seconds=20))
    store.set(f"from {rank}", str(rank))
    return [rank, size, [store.get(f"from {r}").decode() for r in range(size)]]


def test_the_launchers_store_is_everyones(ranks: RankPools) -> None:
    assert ranks(2).run(the_launchers_store, fresh=True, group=False) == [[0, 2, ["0", "1"]], [1, 2, ["0", "1"]]]
