"""Values between ranks: what is packed comes back as it was, and what cannot be packed is refused by its place."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import CommError
from shardwise.dist import Mesh
from shardwise.dist.objects import broadcast_value, gather_tensor, gather_values
from shardwise.dist.values import ValueKindError, pack, unpack
from tests.ranks import RankPools

Point = namedtuple("Point", "x y")


def back(value: Any) -> Any:
    return unpack(*pack(value))


SIMPLE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.none() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
NESTED = st.recursive(
    SIMPLE | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(st.integers() | st.text(), max_size=4)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(NESTED)
def test_nested_values_come_back_with_their_types(value: Any) -> None:
    found = back(value)
    assert found == value and kinds(found) == kinds(value)


def kinds(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [(kinds(k), kinds(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [kinds(v) for v in value]
    return type(value)


def test_tensors_arrays_and_mappings() -> None:
    tensor = torch.randn(3, 2).to(torch.bfloat16)
    value = {"a": [tensor, torch.tensor(3)], ("b", 1): torch.zeros(0, 4, dtype=torch.bool)}
    text, tensors = pack(value)
    assert tensors[0].data_ptr() == tensor.data_ptr(), "a tensor is not copied"
    found = unpack(text, tensors)
    assert torch.equal(found["a"][0], tensor) and found["b", 1].shape == (0, 4)
    for array in (np.arange(6.0).reshape(2, 3).T, np.array(["é", "b"]), np.array(5), np.array([None, "x"], object)):
        came = back(array)
        assert came.dtype == array.dtype and came.shape == array.shape and (came == array).all()
    assert back(np.float32(1.5)).dtype == np.float32 and back(np.str_("x")) == "x" and back(np.bool_(True))
    assert back([torch.Size([2, 3]), torch.float16, float("inf")]) == [torch.Size([2, 3]), torch.float16, float("inf")]
    assert np.isnan(back(float("nan")))
    ordered = back(OrderedDict(a=1))
    assert type(ordered) is OrderedDict and ordered == {"a": 1}
    assert type(back(Counter("aab"))) is Counter
    assert back(defaultdict(list, a=[1])) == {"a": [1]}, "a mapping that is not made from a dict becomes one"


def test_what_cannot_be_sent_is_named() -> None:
    class Local(dict):  # type: ignore[type-arg]
        pass

    itself: list[Any] = []
    itself.append(itself)
    for value, match in (
        ({"a": [1, object()]}, r"value\['a'\]\[1\] is a builtins.object, which is not sent between ranks"),
        ([lambda: 1], r"value\[0\] is a builtins.function"),
        ([Local()], r"value\[0\] is a .*Local that is not found by its name"),
        (itself, "contains itself"),
        (np.datetime64("2020-01-01"), "datetime.date"),
    ):
        with pytest.raises(ValueKindError, match=match):
            pack(value)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"tensor":0}',
        '{"class":"os:system"}',
        '{"dict":[],"class":"os:system"}',
        '{"dict":[],"class":"subprocess:Popen"}',
        '{"named":[],"class":"builtins:eval"}',
        '{"dtype":"load"}',
        '{"what":1}',
        '{"dict":[[[],1]]}',
        '{"array":["O",[2],[1]]}',
        "{}",
    ],
)
def test_a_text_from_a_stranger_makes_no_object_and_no_call(text: str) -> None:
    with pytest.raises(ValueKindError):
        unpack(text, [])


# -- on ranks --


def values_from_all() -> None:
    axis = (mesh := Mesh.build(timeout=_soon())).world
    cpu = torch.device("cpu")
    mine = {"rank": axis.position, "text": "é" * axis.position, "t": torch.full((axis.position, 2), axis.position)}
    found = gather_values(axis, mine, cpu, "metrics")
    assert [v["rank"] for v in found] == list(range(axis.size))
    for rank, value in enumerate(found):
        assert value["text"] == "é" * rank and torch.equal(value["t"], torch.full((rank, 2), rank))
    for giver in range(axis.size):
        sent = broadcast_value(axis, [mine, (torch.ones(3, 0), torch.tensor(True))], giver, cpu, "batch")
        assert sent[0]["rank"] == giver and torch.equal(sent[0]["t"], torch.full((giver, 2), giver))
        assert sent[1][0].shape == (3, 0) and sent[1][1].item() is True and sent[1][1].shape == ()
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.complex64):
        tensor = torch.arange(6).reshape(2, 3).add(axis.position).to(dtype)
        whole = gather_tensor(axis, tensor.T, "logits")
        expected = [torch.arange(6).reshape(2, 3).add(r).to(dtype).T for r in range(axis.size)]
        assert torch.equal(whole, torch.cat(expected))
    assert gather_tensor(axis, torch.zeros(0, 3), "nothing").shape == (0, 3)
    with pytest.raises(CommError, match=r"rank 0: float32 \[1, 2\]\n  rank 1: float32 \[2, 2\]"):
        gather_tensor(axis, torch.zeros(axis.position + 1, 2), "logits")
    with pytest.raises(CommError, match="rank 1: int64"):
        gather_tensor(axis, torch.zeros(2, dtype=torch.int64 if axis.position == 1 else torch.float32), "logits")
    # One rank's refusal is everyone's error, and no collective is left over.
    with pytest.raises(ValueKindError, match=r"metrics: rank 1: .*builtins.object"):
        gather_values(axis, object() if axis.position == 1 else 1, cpu, "metrics")
    with pytest.raises(ValueKindError, match=r"batch: .*builtins.object"):
        broadcast_value(axis, object(), 0, cpu, "batch")
    assert gather_values(axis, axis.position, cpu, "after") == list(range(axis.size))
    mesh.close()


def _soon() -> Any:
    from datetime import timedelta

    return timedelta(seconds=20)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_values_travel_between_ranks(ranks: RankPools, size: int) -> None:
    if size == 1:
        axis = Mesh.build(timeout=_soon()).world
        assert gather_values(axis, {1}, torch.device("cpu"), "x") == [{1}] and not dist.is_initialized()
        return
    ranks(size).run(values_from_all)


def test_the_text_is_json() -> None:
    assert json.loads(pack([1, "a", (2,)])[0]) == [1, "a", {"tuple": [2]}]
