from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config import Config
from shardwise.errors import ConfigError

TRAIN, MICRO, GAS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    "given_keys",
    [(TRAIN, MICRO, GAS), (TRAIN, MICRO), (TRAIN, GAS), (MICRO, GAS)],
    ids=["all", "train+micro", "train+gas", "micro+gas"],
)
@given(micro=st.integers(1, 1000), gas=st.integers(1, 1000), world=st.integers(1, 1000), as_float=st.booleans())
def test_any_way_to_give_the_batch_leads_to_the_same_numbers(given_keys, micro, gas, world, as_float):
    numbers = {TRAIN: micro * gas * world, MICRO: micro, GAS: gas}
    source = {key: float(numbers[key]) if as_float else numbers[key] for key in given_keys}
    config = Config.load(source, world_size=world)
    assert {key: getattr(config, key) for key in numbers} == numbers
    assert all(type(getattr(config, key)) is int for key in numbers)


def test_train_alone_means_no_accumulation():
    config = Config.load({TRAIN: 12}, world_size=3)
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (4, 1)


def test_micro_alone_means_no_accumulation():
    config = Config.load({MICRO: 4}, world_size=3)
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (12, 1)


@pytest.mark.parametrize(
    ("source", "world", "words"),
    [
        ({}, 1, ["train_batch_size: no batch size is given", MICRO]),
        ({GAS: 4}, 1, [f"{GAS} 4 alone"]),
        ({TRAIN: 10, MICRO: 4}, 1, ["10 is no multiple of 4", f"{TRAIN} 8, or {TRAIN} 12, or {MICRO} 2"]),
        ({TRAIN: 10, GAS: 4}, 2, ["10 is no multiple of 4", "2 (world size) = 8", f"{GAS} 1"]),
        ({TRAIN: 3}, 4, ["3 is no multiple of 4 (world size)", f"what fits: {TRAIN} 4"]),
        (
            {TRAIN: 8, MICRO: 2, GAS: 1},
            2,
            [
                "8 is not 2",
                "1 (gradient_accumulation_steps) x 2",
                "= 4",
                f"{MICRO} 4",
                f"{GAS} 2",
                f"{TRAIN} 4",
            ],
        ),
        ({MICRO: 2**62, GAS: 2**10}, 1, [MICRO, "above 2^63"]),
        ({TRAIN: 0}, 1, ["train_batch_size: 0 is out of range; expected an integer >= 1"]),
        ({TRAIN: "8"}, 1, ['train_batch_size: "8" is a string; expected an integer']),
        ({TRAIN: True}, 1, ["train_batch_size: true is a boolean"]),
        ({MICRO: 2.5}, 1, [f"{MICRO}: 2.5 is a number"]),
        ({MICRO: 2**64}, 1, [f"{MICRO}: 18446744073709551616 is too large"]),
    ],
)
def test_numbers_that_do_not_fit_are_named_with_what_would(source, world, words):
    with pytest.raises(ConfigError) as caught:
        Config.load(source, world_size=world)
    for word in words:
        assert word in str(caught.value)


@given(train=st.integers(1, 500), micro=st.integers(1, 50), world=st.integers(1, 8))
def test_a_suggested_number_fits(train, micro, world):
    try:
        Config.load({TRAIN: train, MICRO: micro}, world_size=world)
    except ConfigError as error:
        fits = str(error).split("what fits: ")[1].split(", or ")
        for name, value in (fit.split(" ") for fit in fits):
            Config.load({TRAIN: train, MICRO: micro, name: int(value)}, world_size=world)


@pytest.mark.parametrize("world", [0, -1, 1.5, "2", None, True])
def test_the_world_size_is_checked(world):
    with pytest.raises(ConfigError, match="world_size"):
        Config.load({MICRO: 1}, world_size=world)
