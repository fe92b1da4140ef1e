"""Bytes of modules and of devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.big_models import compute_module_sizes, find_tied_parameters, get_max_memory, init_empty_weights
from shardwise.big_models.sizes import to_bytes
from shardwise.errors import ConfigError
from tests.big_models.models import Tied


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10GB", 10 * 10**9),
        ("1.5GiB", 3 << 29),
        ("8 MB", 8 * 10**6),
        ("8Gb", 10**9),
        ("2KiB", 2048),
        ("7", 7),
        (2.9, 2),
    ],
)
def test_text_to_bytes(text: str | float, size: int) -> None:
    assert to_bytes(text) == size


@pytest.mark.parametrize("text", ["ten", "-1GB", "", "1XB", -1, True, None, "1iB"])
def test_not_a_size(text: object) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        to_bytes(text)  # type: ignore[arg-type]


def test_tied_weights_count_once_in_whatever_holds_both() -> None:
    sizes = compute_module_sizes(Tied(width=8, vocabulary=16, blocks=1))
    assert sizes["embed"] == sizes["head"] == sizes["head.weight"] == 16 * 8 * 4
    parts = sizes["gain"] + sizes["embed"] + sizes["blocks"] + sizes["norm"]
    assert sizes[""] == parts
    assert sizes["blocks.0"] == 4 * (8 * 16 + 16 + 16 * 8 + 8 + 8 + 8)


def test_row_3383_sizes_with_a_dtype_and_integers() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.short = nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))
            self.codes = nn.Parameter(torch.zeros(10, dtype=torch.int8), requires_grad=False)
            self.register_buffer("positions", torch.zeros(10, dtype=torch.int64))
            self.register_buffer("mask", torch.zeros(10, dtype=torch.bool))

    with init_empty_weights():
        model = Mixed()
    assert compute_module_sizes(model)[""] == 10 * (2 + 1 + 8 + 1)
    # Loading casts floating-point tensors, up as well as down, and no others.
    assert compute_module_sizes(model, dtype="float32")[""] == 10 * (4 + 1 + 8 + 1)
    assert compute_module_sizes(model, "float32", special_dtypes={"short": torch.float64})["short"] == 80
    assert compute_module_sizes(model, buffers_only=True)[""] == 10 * (8 + 1)
    with pytest.raises(ConfigError, match="no dtype"):
        compute_module_sizes(model, dtype="float33")


def test_tied_parameters_are_found_by_object() -> None:
    model = Tied()
    assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]
    model.again = model.blocks[0].up
    assert ["again.weight", "blocks.0.up.weight"] in find_tied_parameters(model)


def test_max_memory_is_read_ordered_and_not_changed() -> None:
    given: dict[int | str, int | float | str] = {"disk": "1TB", "cpu": "2GB"}
    assert list(get_max_memory(given).items()) == [("cpu", 2 * 10**9), ("disk", 10**12)]
    assert given["cpu"] == "2GB"
    assert get_max_memory()["cpu"] > 0
    with pytest.raises(ConfigError, match="'gpu' is no device"):
        get_max_memory({"gpu": 1})
    with pytest.warns(UserWarning, match="not here"):
        get_max_memory({99: 1})
