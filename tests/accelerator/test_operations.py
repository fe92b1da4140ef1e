"""Collectives on nested values: results as one process would have them, and one error on all when they differ."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from datetime import timedelta
from typing import Any

import pytest
import torch

from shardwise import CommError, ConfigError
from shardwise.accelerator.operations import (
    CannotPadNestedTensorWarning,
    DistributedOperationException,
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from shardwise.accelerator.process import Processes
from shardwise.dist.values import ValueKindError
from tests.ranks import RankPools

Pair = namedtuple("Pair", "x y")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.complex64,
)


def here() -> Processes:
    return Processes(timeout=timedelta(seconds=20))


def of_rank(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    return (torch.arange(6).reshape(shape) + rank).to(dtype)


# -- one process --


def test_one_process_gets_what_it_gave() -> None:
    value = {"a": torch.ones(2, requires_grad=True), "text": "x"}
    assert gather(value) is value and gather_object([1]) == [1] and broadcast(value) is value
    assert pad_across_processes(value) is value and broadcast_object_list(["a"]) == ["a"]
    assert torch.equal(copy_tensor_to_devices(torch.ones(2)), torch.ones(2))
    given = torch.ones(2, dtype=torch.int32)
    for reduction in ("sum", "max", "none"):
        assert torch.equal(reduce(given, reduction), given)
    found = reduce([given], "sum")[0]
    found += 1
    assert given.tolist() == [1, 1], "the result is the caller's own"
    assert reduce(torch.ones(2, requires_grad=True)).requires_grad
    assert reduce(torch.ones(2), "sum", scale=0.5).tolist() == [0.5, 0.5]


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="reduction: `average`; expected one of sum, mean, max, none"):
        reduce(torch.ones(1), "average")
    with pytest.raises(ConfigError, match="from_process: 1; there are the processes 0 to 0"):
        broadcast(torch.ones(1), from_process=1)
    with pytest.raises(ConfigError, match="a tuple; expected a list"):
        broadcast_object_list(("a",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="exactly one process gives a tensor"):
        copy_tensor_to_devices()
    with pytest.raises(ValueKindError, match=r"`reduce sum` takes nested .*; \['a'\] is a str"):
        reduce({"a": "x"}, "sum")
    assert issubclass(DistributedOperationException, CommError)


# -- several --


def gathers() -> None:
    p = here()
    rank, size = p.process_index, p.num_processes
    for dtype in DTYPES:
        mine = of_rank(rank, dtype)
        expected = torch.cat([of_rank(r, dtype) for r in range(size)])
        assert torch.equal(gather(mine, processes=p), expected)
        assert torch.equal(gather(mine.T, processes=p), torch.cat([of_rank(r, dtype).T for r in range(size)]))
    assert gather(torch.tensor(rank), processes=p).tolist() == list(range(size)), "a number becomes a row"
    assert gather(torch.zeros(0, 3), processes=p).shape == (0, 3) and gather(torch.zeros(2, 0), processes=p).shape == (
        2 * size,
        0,
    )
    assert torch.equal(gather(of_rank(rank, torch.complex64).conj(), processes=p)[:2], of_rank(0, torch.complex64))
    nested = {
        "a": [torch.full((1,), rank), Pair(torch.tensor(True), torch.zeros(0))],
        "b": OrderedDict(c=torch.ones(1, 2)),
    }
    found = gather(nested, processes=p)
    assert (
        found["a"][0].tolist() == list(range(size)) and type(found["a"][1]) is Pair and found["a"][1].x.shape == (size,)
    )
    assert type(found["b"]) is OrderedDict and found["b"]["c"].shape == (size, 2)
    assert not gather(torch.ones(1, requires_grad=True), processes=p).requires_grad
    assert gather({}, processes=p) == {}
    # One tensor costs two collectives: the comparison and the tensor.
    before = sum(t.calls for t in p.axis.traffic.values())
    gather(torch.ones(3), processes=p)
    assert sum(t.calls for t in p.axis.traffic.values()) - before == 2
    # The free functions find the processes themselves.
    assert gather(torch.tensor([rank])).tolist() == list(range(size))


def objects() -> None:
    p = here()
    rank, size = p.process_index, p.num_processes
    assert gather_object([rank], processes=p) == list(range(size))
    assert gather_object([f"a{rank}", {"n": rank}] * rank, processes=p)[:2] == ["a1", {"n": 1}]
    assert gather_object([[rank, rank]], processes=p) == [[r, r] for r in range(size)], "one level is opened"
    assert gather_object(("x", [rank]), processes=p)[1::2] == [[r] for r in range(size)]
    assert gather_object({"n": rank}, processes=p) == [{"n": r} for r in range(size)]
    assert gather_object("text", processes=p) == ["text"] * size
    tensors = gather_object([torch.tensor([rank])], processes=p)
    assert [t.item() for t in tensors] == list(range(size))
    with pytest.raises(ValueKindError, match=r"gather_object: rank 1: value\[0\] is a builtins.object"):
        gather_object([object() if rank == 1 else 0], processes=p)
    last = size - 1
    given = [rank, {"t": torch.full((2,), rank)}, "é"] if rank == last else [None, None, None]
    found = broadcast_object_list(given, from_process=last, processes=p)
    assert found is given and found[0] == last and found[1]["t"].tolist() == [last, last] and found[2] == "é"
    assert broadcast_object_list([rank, 1], processes=p) == [0, 1]


def broadcasts() -> None:
    p = here()
    rank, size = p.process_index, p.num_processes
    for giver in range(size):
        for dtype in DTYPES:
            mine = of_rank(rank, dtype)
            found = broadcast({"a": [mine]}, from_process=giver, processes=p)
            assert torch.equal(found["a"][0], of_rank(giver, dtype)) and found["a"][0] is mine
            turned = of_rank(rank, dtype).T
            assert torch.equal(broadcast(turned, giver, processes=p), of_rank(giver, dtype).T)
    assert broadcast(torch.tensor(rank), processes=p).item() == 0
    assert broadcast(torch.tensor([rank]).expand(3), processes=p).tolist() == [0, 0, 0]
    weight = torch.nn.Parameter(torch.full((2,), float(rank)))
    assert broadcast(weight, processes=p) is weight and weight.tolist() == [0, 0] and weight.requires_grad
    conjugate = torch.tensor([complex(rank, 1)]).conj()
    assert broadcast(conjugate, 1, processes=p).tolist() == [complex(1, -1)]
    assert broadcast(torch.zeros(0, 2), processes=p).shape == (0, 2)
    last = size - 1
    given = torch.arange(3, dtype=torch.int32) if rank == last else None
    assert copy_tensor_to_devices(given, processes=p).tolist() == [0, 1, 2]
    for count in (0, 2):
        with pytest.raises(ConfigError, match=r"but these did: \[\]" if count == 0 else r"these did: \[0, 1\]"):
            copy_tensor_to_devices(torch.ones(1) if rank < count else None, processes=p)


def reduces() -> None:
    p = here()
    rank, size = p.process_index, p.num_processes
    total = size * (size - 1) // 2
    for dtype in DTYPES:
        mine = of_rank(rank, dtype)
        kept = mine.clone()
        every = torch.stack([of_rank(r, dtype) for r in range(size)])
        plain = every.sum(0) if dtype == torch.bool else every.to(torch.complex128).sum(0).to(dtype)
        summed = reduce(mine, "sum", processes=p)
        assert torch.equal(summed, plain) and summed.dtype == (torch.int64 if dtype == torch.bool else dtype)
        mean = reduce([mine], processes=p)[0]
        wide = torch.complex128 if dtype.is_complex else torch.float64
        expected = (every.to(wide).sum(0) / size).to(mean.dtype)
        # Sums of a few small whole numbers are exact in every dtype here, so only the division rounds, once.
        assert torch.allclose(mean, expected, rtol=torch.finfo(mean.dtype).eps, atol=0)
        assert mean.dtype == (dtype if dtype.is_floating_point or dtype.is_complex else torch.float32)
        if not dtype.is_complex:
            largest = reduce(mine, "max", processes=p)
            assert torch.equal(largest, every.amax(0)) and largest.dtype == dtype
        assert torch.equal(mine, kept), "what was given is not changed"
    assert reduce(torch.tensor(rank), "sum", processes=p).item() == total
    assert reduce({"a": torch.ones(2, 0)}, "sum", processes=p)["a"].shape == (2, 0)
    assert reduce(torch.tensor([1.0]), "mean", scale=3.0, processes=p).item() == 3
    given = torch.tensor([rank])
    assert reduce(given, "none", processes=p) is given
    conjugate = torch.tensor([complex(rank, 1)]).conj()
    assert reduce(conjugate, "sum", processes=p).item() == complex(total, -size)
    # The sum of 16-bit numbers overflows where their mean does not.
    assert reduce(torch.tensor([60000.0], dtype=torch.float16), processes=p).item() == 60000
    # NaN wins, wherever it is.
    for place in range(size):
        mine = torch.tensor([torch.nan if rank == place else float(rank), -torch.inf])
        assert reduce(mine, "max", processes=p).isnan().tolist() == [True, False]
    with pytest.raises(ValueKindError, match="complex numbers have no maximum"):
        reduce(torch.ones(1, dtype=torch.complex64), "max", processes=p)
    # All processes hold the same bits, whoever added.
    values = torch.randn(1001, generator=torch.Generator().manual_seed(rank))
    assert len({tuple(row) for row in gather(reduce(values, processes=p)[None], processes=p).tolist()}) == 1


def pads() -> None:
    p = here()
    rank, size = p.process_index, p.num_processes
    mine = torch.full((rank + 1, 2), rank + 1)
    found = pad_across_processes(mine, processes=p)
    assert found.shape == (size, 2) and torch.equal(found[: rank + 1], mine) and not found[rank + 1 :].any()
    assert gather(found, processes=p).shape == (size * size, 2)
    front = pad_across_processes(mine, pad_index=-100, pad_first=True, processes=p)
    assert torch.equal(front[size - rank - 1 :], mine) and (front[: size - rank - 1] == -100).all()
    nested = {"a": mine.T, "b": [torch.tensor(rank)], "flag": torch.ones(rank, dtype=torch.bool)}
    wide = pad_across_processes(nested, dim=1, processes=p)
    assert wide["a"].shape == (2, size) and wide["b"][0].item() == rank and wide["flag"].shape == (rank,), (
        "no such dimension"
    )
    assert pad_across_processes(mine.T, dim=-1, processes=p).shape == (2, size)
    assert pad_across_processes(torch.ones(rank, dtype=torch.bool), processes=p).sum() == rank
    same = torch.ones(3)
    assert pad_across_processes(same, processes=p) is same
    with pytest.warns(UserWarning):
        ragged = torch.nested.nested_tensor([torch.ones(rank + 1), torch.ones(2)])
        assert pad_across_processes(ragged, processes=p) is ragged
    with pytest.warns(CannotPadNestedTensorWarning):
        pad_across_processes([ragged], processes=p)
    with pytest.raises(ValueKindError, match="a nested tensor cannot be sent"):
        gather(ragged, processes=p)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("function", [gathers, objects, broadcasts, reduces, pads])
def test_operations(ranks: RankPools, size: int, function: Any) -> None:
    ranks(size).run(function)


def differ() -> list[str]:
    """Every way to differ raises on all ranks, and the ranks are in step after it."""
    p = here()
    rank, last = p.process_index, p.num_processes - 1
    odd = rank == last
    said = []

    def fails(run: Any, *kinds: type[Exception]) -> None:
        try:
            run()
        except kinds as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            raise AssertionError("did not raise")
        assert gather(torch.tensor(rank), processes=p).tolist() == list(range(last + 1))

    wrong = DistributedOperationException
    fails(lambda: gather(torch.ones(3 if odd else 2), processes=p), wrong)
    fails(lambda: gather(torch.ones(2, dtype=torch.int32 if odd else torch.float32), processes=p), wrong)
    fails(lambda: gather([torch.ones(2)] * (2 if odd else 1), processes=p), wrong)
    fails(lambda: gather({"b" if odd else "a": torch.ones(2)}, processes=p), wrong)
    fails(lambda: reduce(torch.ones(3 if odd else 2), processes=p), wrong)
    fails(lambda: reduce(torch.ones(2), "max" if odd else "sum", processes=p), wrong)
    fails(lambda: broadcast(torch.ones(3 if odd else 2), processes=p), wrong)
    fails(lambda: broadcast(torch.ones(2), 1 if odd else 0, processes=p), wrong)
    fails(lambda: pad_across_processes(torch.ones((2, 2) if odd else 2), processes=p), wrong)
    # One calls another operation.
    fails(lambda: reduce(torch.ones(2), processes=p) if odd else gather(torch.ones(2), processes=p), wrong)
    fails(lambda: gather_object([1], processes=p) if odd else broadcast_object_list([1], processes=p), wrong)
    # One gives something that cannot be sent.
    fails(lambda: gather(["x" if odd else torch.ones(2)], processes=p), wrong, ValueKindError)
    fails(lambda: gather(torch.eye(2).to_sparse() if odd else torch.eye(2), processes=p), wrong, ValueKindError)
    # One gives an argument that is none.
    fails(lambda: reduce(torch.ones(2), "avg" if odd else "sum", processes=p), wrong, ConfigError)
    fails(lambda: broadcast(torch.ones(2), 9 if odd else 0, processes=p), wrong, ConfigError)
    fails(lambda: broadcast_object_list([1], -1 if odd else 0, processes=p), wrong, ConfigError)
    return said


@pytest.mark.parametrize("size", [2, 3])
def test_what_differs_is_an_error_on_all(ranks: RankPools, size: int) -> None:
    *others, odd = ranks(size).run(differ)
    for said in others:
        assert all(text.startswith("DistributedOperationException: ") for text in said)
        assert "rank 0: `gather`, the value: float32 [2]\n" in said[0]
        assert f"rank {size - 1}: `gather`, the value: float32 [3]\n" in said[0] and "pad_across_processes" in said[0]
        assert f"rank {size - 1}: `gather`, the value: int32 [2]" in said[1]
        assert f"rank {size - 1}: `gather`, [1]: float32 [2]" in said[2]
        assert "rank 0: `gather`, ['a']: float32 [2]" in said[3]
        assert f"rank {size - 1}: `reduce max`, tensors: 1" in said[5]
        assert f"rank {size - 1}: `broadcast from 1`" in said[7]
        assert f"rank {size - 1}: `pad_across_processes dim=0`, the value: 2 dimensions" in said[8]
        assert "rank 0: `gather`, tensors: 1" in said[9] and f"rank {size - 1}: `reduce mean`" in said[9]
        assert "rank 0: `broadcast_object_list from 0`" in said[10]
        assert f"rank {size - 1}: `gather`, `gather` takes nested" in said[11] and "[0] is a str" in said[11]
    assert odd[:11] == others[0][:11]
    assert odd[11] == "ValueKindError: `gather` takes nested lists, tuples and dicts of tensors; [0] is a str."
    assert all(text.startswith("ConfigError: ") for text in odd[13:]) and len(odd) == 16
    assert odd[12].startswith("ValueKindError: `gather`: the value: a torch.sparse_coo tensor cannot be sent")


def debugged() -> str:
    """What a script that checks its shapes relies on."""
    p = here()
    p.debug = True
    one, two = torch.arange(5.0)[None], torch.arange(10.0).reshape(1, 2, 5)
    data = {"tensor": one if p.process_index == 0 else two}
    for run in (gather, reduce, broadcast, lambda v, processes: pad_across_processes(v, dim=0, processes=processes)):
        with pytest.raises(DistributedOperationException) as error:
            run(data, processes=p)
    with pytest.raises(DistributedOperationException, match="lies on the meta, but this process computes on the cpu"):
        gather(torch.ones(2, device="meta"), processes=p)
    p.wait_for_everyone()
    return str(error.value)


def test_debug(ranks: RankPools) -> None:
    for said in ranks(2).run(debugged):
        assert "rank 0: `pad_across_processes dim=0`, ['tensor']: 2 dimensions\n" in said
        assert "rank 1: `pad_across_processes dim=0`, ['tensor']: 3 dimensions\n" in said


def on_an_unnamed_backend() -> None:
    import torch.distributed as dist

    dist.init_process_group()
    try:
        for function in (gathers, broadcasts, reduces, pads):
            function()
    finally:
        from shardwise.accelerator.current import forget

        forget()
        dist.destroy_process_group()


def test_a_group_that_torch_started_without_a_name(ranks: RankPools) -> None:
    ranks(2).run(on_an_unnamed_backend, fresh=True, group=False)
