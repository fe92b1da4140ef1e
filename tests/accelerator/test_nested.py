"""Functions on nested values keep structures and types, and change nothing that is given."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, MutableMapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

from shardwise import ConfigError
from shardwise.accelerator import operations
from shardwise.accelerator.nested import (
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_batch_size,
    find_device,
    honor_type,
    ignorant_find_batch_size,
    is_namedtuple,
    leaves,
    listify,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from shardwise.dist.values import ValueKindError

Point = namedtuple("Point", "x y")
META = torch.device("meta")


class Encoded(UserDict[str, Any]):
    """As a tokenizer's output: it holds more than its items, and its ``to`` changes itself."""

    def __init__(self, data: Any = None, encodings: str = "none") -> None:
        super().__init__(data)
        self.encodings = encodings

    def to(self, device: Any) -> Encoded:
        self.data = {k: v.to(device) for k, v in self.data.items()}
        return self


class OwnWay(MutableMapping[str, Any]):
    """A mapping that is neither a dict nor made from one, with a ``to`` of its own."""

    def __init__(self, items: dict[str, Any], size: int) -> None:
        self.items_, self.size = items, size

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)

    def to(self, device: Any) -> OwnWay:
        return OwnWay({k: v.to(device) for k, v in self.items_.items()}, self.size)


def test_structures_and_types_are_kept() -> None:
    double = torch.tensor([1.0])
    data = [Point(double, (double, "text")), OrderedDict(a=double), {"b": None, "c": [3, double]}]
    found = recursively_apply(lambda t, by, *, plus=0: t * by + plus, data, 2, plus=1)
    assert type(found[0]) is Point and type(found[1]) is OrderedDict
    assert found[0].x.item() == 3 and found[0].y[1] == "text" and found[2] == {"b": None, "c": [3, torch.tensor([3.0])]}
    assert double.item() == 1
    assert recursively_apply(lambda n: n + 1, [1, "a"], test_type=lambda v: isinstance(v, int)) == [2, "a"]
    with pytest.raises(TypeError, match=r"`<lambda>` got a str; it takes nested lists, .*`is_torch_tensor` accepts"):
        recursively_apply(lambda t: t, ["a"], error_on_other_type=True)
    assert issubclass(ValueKindError, TypeError)


def test_mappings_of_other_kinds() -> None:
    lists = defaultdict(list, a=torch.zeros(1))
    found = recursively_apply(lambda t: t + 1, lists)
    assert type(found) is defaultdict and found["new"] == [] and found["a"].item() == 1 and lists["a"].item() == 0
    encoded = Encoded({"ids": torch.zeros(2)}, encodings="words")
    found = recursively_apply(lambda t: t + 1, encoded)
    assert (
        type(found) is Encoded and found.encodings == "words" and encoded["ids"].sum() == 0 and found["ids"].sum() == 2
    )


class Sized(dict[str, Any]):
    """A dict that is made from something else."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


def test_a_class_is_not_made_from_what_it_does_not_take() -> None:
    sized = Sized(3)
    sized["a"] = torch.zeros(1)
    found = recursively_apply(lambda t: t + 1, sized)
    assert type(found) is Sized and found.size == 3 and found["a"].item() == 1 and sized["a"].item() == 0
    fixed = recursively_apply(lambda t: t + 1, MappingProxyType({"a": torch.zeros(1)}))
    assert type(fixed) is MappingProxyType and fixed["a"].item() == 1


def test_honor_type_and_leaves() -> None:
    assert honor_type(Point(1, 2), (i for i in (3, 4))) == Point(3, 4) and honor_type((1,), iter([2])) == (2,)
    best = torch.ones(2, 2).max(dim=0)
    assert type(honor_type(best, [best.values, best.indices])) is type(best)
    assert is_namedtuple(Point(1, 2)) and not is_namedtuple((1, 2))
    assert list(leaves({"a": [1, (2,)], "b": 3})) == [("['a'][0]", 1), ("['a'][1][0]", 2), ("['b']", 3)]


def test_sending_to_a_device() -> None:
    here = torch.zeros(2)
    encoded = Encoded({"ids": here}, encodings="words")
    given = {"a": here, "p": Point(here, "x"), "e": encoded, "keep": [here], "o": OwnWay({"t": here}, 7)}
    found = send_to_device(given, META, skip_keys="keep")
    assert found["a"].device == META == found["p"].x.device and found["p"].y == "x" and type(found["p"]) is Point
    assert type(found["e"]) is Encoded and found["e"]["ids"].device == META and found["e"].encodings == "words"
    assert encoded["ids"] is here and given["a"] is here, "what was given is not changed"
    assert found["keep"][0] is here and found["o"].size == 7 and found["o"]["t"].device == META
    assert send_to_device(found["e"], META, skip_keys=["ids"])["ids"].device == META
    assert send_to_device([encoded], META, skip_keys=["ids"])[0]["ids"] is here
    # A `to` that does not know `non_blocking` is called without it.
    assert send_to_device(OwnWay({"t": here}, 1), META, non_blocking=True)["t"].device == META
    assert send_to_device(torch.nn.Linear(1, 1), META).weight.device == META
    assert send_to_device("text", META) == "text"


def test_the_outputs_of_a_real_tokenizer_and_model() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.zeros(1, 2)})
    moved = send_to_device(batch, META)
    assert type(moved) is transformers.BatchEncoding and moved["input_ids"].device == META
    assert batch["input_ids"].device.type == "cpu"
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.zeros(1, dtype=torch.bfloat16))
    wide = convert_to_fp32(output)
    assert type(wide) is type(output) and wide.last_hidden_state.dtype == torch.float32
    assert wide[0] is wide.last_hidden_state and output[0].dtype == torch.bfloat16


def test_small_helpers() -> None:
    rows = {"a": [torch.arange(6.0).reshape(3, 2)], "t": "x"}
    assert slice_tensors(rows, slice(1, 3))["a"][0].tolist() == [[2, 3], [4, 5]]
    assert slice_tensors(rows, slice(0, 1), process_index=0, num_processes=2)["t"] == "x"
    assert find_batch_size(rows) == 3 == find_batch_size([rows])
    for value, kind in (([], ValueError), ({}, ValueError), (torch.tensor(1), ConfigError), ("x", TypeError)):
        with pytest.raises(kind, match="find_batch_size"):
            find_batch_size(value)
        assert ignorant_find_batch_size(value) is None
    assert listify({"a": torch.tensor([1.5], dtype=torch.bfloat16, requires_grad=True), "b": torch.tensor(2)}) == {
        "a": [1.5],
        "b": 2,
    }
    assert find_device([1, {"a": torch.zeros(1, device=META)}]) == META and find_device(["x"]) is None


def test_concatenating() -> None:
    one, two = ({"a": torch.full((n, 2), n), "b": Point(torch.zeros(n), [torch.ones(n)])} for n in (1, 2))
    found = concatenate([one, two])
    assert found["a"].tolist() == [[1, 1], [2, 2], [2, 2]] and type(found["b"]) is Point
    assert found["b"].x.shape == (3,) == found["b"].y[0].shape
    assert concatenate([torch.zeros(2, 1), torch.zeros(2, 3)], dim=1).shape == (2, 4)
    assert concatenate([{"text": "x"}]) == {"text": "x"}
    with pytest.raises(TypeError, match="is a str"):
        concatenate(["a", "b"])
    with pytest.raises(ConfigError, match="nothing in the list"):
        concatenate([])


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        """Doc."""
        return {"half": (x * self.weight).half(), "ids": torch.ones(1, dtype=torch.long), "text": "x"}


def test_outputs_become_float32() -> None:
    found = convert_to_fp32([torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.float64), 3])
    assert found[0].dtype == torch.float32 and found[1].dtype == torch.float64 and found[2] == 3
    model = Model()
    original = model.forward
    model.forward = convert_outputs_to_fp32(model.forward)  # type: ignore[method-assign]
    assert model.forward.__wrapped__ == original and model.forward.__doc__ == "Doc."  # type: ignore[attr-defined]
    out = model(torch.ones(1))
    assert out["half"].dtype == torch.float32 and out["ids"].dtype == torch.long and out["text"] == "x"
    with pytest.raises(pickle.PicklingError, match="unwrap_model"):
        pickle.dumps(model)
    # A copy computes with its own weights.
    twin = copy.deepcopy(model)
    twin.weight.data.fill_(3)
    assert twin(torch.ones(1))["half"].item() == 3 and model(torch.ones(1))["half"].item() == 1


def test_they_are_found_among_the_operations() -> None:
    for name in operations.__all__:
        assert hasattr(operations, name)
    assert operations.send_to_device is send_to_device
