"""Inputs shared out among processes: every item once, padded only when asked for, and the caller's value left alone."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, UserDict
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise import ConfigError
from shardwise.accelerator.operations import gather, gather_object
from shardwise.accelerator.process import Processes
from shardwise.accelerator.splitting import split
from tests.ranks import RankPools


def parts(inputs: Any, size: int, padded: bool = False) -> list[Any]:
    return [split(inputs, rank, size, padded) for rank in range(size)]


@given(st.integers(0, 30), st.integers(2, 9))
def test_every_item_goes_to_one_process(length: int, size: int) -> None:
    items = list(range(length))
    found = parts(items, size)
    assert [i for part in found for i in part] == items
    lengths = [len(part) for part in found]
    assert sorted(lengths, reverse=True) == lengths and max(lengths) - min(lengths) <= 1


@given(st.integers(0, 30), st.integers(2, 9))
def test_padded_parts_cut_to_the_length_are_the_inputs(length: int, size: int) -> None:
    for items in (list(range(length)), tuple(range(length)), torch.arange(length), np.arange(length)):
        found = parts(items, size, padded=True)
        assert {len(part) for part in found} == {-(-length // size)}
        joined = [int(i) for part in found for i in part]
        assert joined[:length] == list(range(length)) and set(joined[length:]) <= {length - 1}
        assert {type(part) for part in found} == {type(items)}


# -- reports of wrong splits, by the number of the report --


def test_3485_what_divides_evenly_is_not_padded() -> None:
    assert parts([["0", "1"], ["2", "3"]], 2, padded=True) == [[["0", "1"]], [["2", "3"]]]


def test_2750_seventeen_items_on_eight_processes_are_seventeen() -> None:
    assert parts(list(range(17)), 8) == [[0, 1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12], [13, 14], [15, 16]]


def test_3393_fewer_items_than_processes_leave_the_last_empty() -> None:
    assert parts(["a", "b"], 4) == [["a"], ["b"], [], []]
    assert [part.shape for part in parts(torch.zeros(2, 5), 4)] == [(1, 5), (1, 5), (0, 5), (0, 5)]
    assert parts(["a", "b"], 4, padded=True) == [["a"], ["b"], ["b"], ["b"]]


def test_4053_three_prompts_on_two_processes_are_three() -> None:
    assert parts(["a", "b", "c"], 2) == [["a", "b"], ["c"]]
    assert parts(["a", "b", "c"], 2, padded=True) == [["a", "b"], ["c", "c"]]


def test_4306_a_tuple_is_padded() -> None:
    assert parts(("a", "b", "c"), 2, padded=True) == [("a", "b"), ("c", "c")]
    assert parts(("a", "b", "c", "d"), 2, padded=True) == [("a", "b"), ("c", "d")]


def test_no_item_is_lost_when_padding_is_cut_off() -> None:
    # Nine on four: with three, two, two and two, each padded to three, the first nine would hold item 8 twice, not 7.
    found = parts(list(range(9)), 4, padded=True)
    assert [i for part in found for i in part][:9] == list(range(9))


# -- mappings --


def test_mappings_are_split_and_left_alone() -> None:
    inputs = {
        "a": [1, 2, 3],
        "more": OrderedDict(b=("x", "y", "z"), c=torch.arange(6).reshape(3, 2)),
        "e": UserDict(d=[4, 5, 6]),
    }
    before = copy.deepcopy(inputs)
    first, second = parts(inputs, 2)
    assert first["a"] == [1, 2] and second["a"] == [3]
    assert type(second["more"]) is OrderedDict and second["more"]["b"] == ("z",)
    assert first["more"]["c"].tolist() == [[0, 1], [2, 3]] and second["more"]["c"].tolist() == [[4, 5]]
    assert type(second["e"]) is UserDict and second["e"]["d"] == [6]
    assert (
        inputs["a"] == before["a"]
        and inputs["e"] == before["e"]
        and torch.equal(inputs["more"]["c"], before["more"]["c"])
    )  # type: ignore[index]
    assert parts(inputs, 2, padded=True)[1]["more"]["c"].tolist() == [[4, 5], [4, 5]]
    assert split({}, 1, 2) == {}


def test_what_cannot_be_split_is_named() -> None:
    with pytest.raises(ConfigError, match=r"same length, but inputs\['a'\] has 2, inputs\['b'\]\['c'\] has 3"):
        split({"a": [1, 2], "b": {"c": [1, 2, 3]}}, 0, 2)
    for value, match in (
        ("text", "inputs is a builtins.str; expected a list, tuple"),
        ({"n": 3}, r"inputs\['n'\] is a builtins.int"),
        (torch.tensor(3), "inputs is a single number"),
        (iter([1]), "list_iterator"),
    ):
        with pytest.raises(ConfigError, match=match):
            split(value, 0, 2)
    assert split("text", 0, 1) == "text", "one process gets what there is"


def test_tensors_keep_what_they_are() -> None:
    whole = torch.arange(10, dtype=torch.int16).reshape(5, 2).T.contiguous().T
    found = parts(whole, 3, padded=True)
    assert torch.equal(torch.cat(found)[:5], whole) and all(part.dtype == torch.int16 for part in found)
    assert split(range(5), 1, 2) == range(3, 5) and split(range(5), 1, 2, True) == [3, 4, 4]


# -- data sets --


class FakeSet:
    """What is used of a data set."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, which: list[int]) -> FakeSet:
        return FakeSet([self.rows[i] for i in which])


def test_data_sets_select_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="FakeSet"):
        split(FakeSet([1]), 0, 2)
    library = ModuleType("datasets")
    library.Dataset = FakeSet  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    rows = FakeSet([5, 6, 7])
    assert [part.rows for part in parts(rows, 2)] == [[5, 6], [7]]
    assert [part.rows for part in parts({"d": rows}, 2, padded=True)[1].values()] == [[7, 7]]
    assert [part.rows for part in parts(rows, 5)] == [[5], [6], [7], [], []]
    assert [part.rows for part in parts(FakeSet([]), 2, padded=True)] == [[], []]


def test_a_real_data_set() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.table.InMemoryTable.from_pydict({"k": list(range(5))})
    rows = datasets.Dataset(table, fingerprint="rows")  # named, so that nothing is pickled for a name
    assert [part["k"][:] for part in parts(rows, 3, padded=True)] == [[0, 1], [2, 3], [4, 4]]
    assert [part["k"][:] for part in parts(rows, 3)] == [[0, 1], [2, 3], [4]]


# -- on ranks --


def split_and_join() -> None:
    processes = Processes()
    for length in range(2 * processes.num_processes + 1):
        items = [f"prompt {i}" for i in range(length)]
        with processes.split_between_processes(items, apply_padding=True) as mine:
            assert gather_object(mine, processes=processes)[:length] == items
        with processes.split_between_processes(items) as mine:
            assert gather_object(mine, processes=processes) == items
        rows = torch.arange(length).reshape(length, 1)
        with processes.split_between_processes(rows, apply_padding=True) as part:
            assert torch.equal(gather(part, processes=processes)[:length], rows)


@pytest.mark.parametrize("size", [2, 3])
def test_what_was_split_is_joined_again(ranks: RankPools, size: int) -> None:
    ranks(size).run(split_and_join)
