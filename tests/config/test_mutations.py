from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import Config
from shardwise.config.problems import format_path
from shardwise.errors import ConfigError

from .configs import NAMES, OLD_SPELLINGS, WORLD_SIZE, real_config
from .mutations import KINDS, Edit, at, mutate

EDITS = 200
"""Edits of each kind: 1,000 in all."""


pytestmark = [
    pytest.mark.filterwarnings("ignore:zero_optimization. true is read as:UserWarning"),
    pytest.mark.filterwarnings("ignore:zero_optimization.cpu_offload is the old name:UserWarning"),
]


def check(edit: Edit) -> str:
    """An edit is refused by its path, or its value is in force."""
    try:
        config = Config.load(edit.config, world_size=WORLD_SIZE)
    except ConfigError as error:
        text = str(error)
        assert "Traceback" not in text and "pydantic" not in text
        # A batch number that does not fit is named with the two others.
        assert format_path(edit.path) in text, (edit, text)
        return "refused"
    assert edit.kind != "typo", edit
    if edit.value == "auto":  # a size that has a default says so
        assert format_path(edit.path) in config.filled, edit
        return "accepted"
    if edit.path == ("zero_optimization",) and edit.value is True:  # an old spelling, with a warning
        assert config.zero_optimization.stage == 1
        return "accepted"
    if edit.path[-1] in OLD_SPELLINGS:  # a warning names the new spelling
        assert config.no_effect["zero_optimization"]["offload_optimizer"] == {"device": "none"}
        return "accepted"
    if edit.value is None:  # null is absent
        return "accepted"
    assert in_force(at(config.as_dict(), edit.path), edit.value), edit
    return "accepted"


def in_force(loaded, written):
    if written == float("inf"):
        return loaded is None  # steps_per_print: never
    if isinstance(written, dict):
        keys = {key: value for key, value in written.items() if value is not None and key not in OLD_SPELLINGS}
        return all(in_force(loaded[key], value) for key, value in keys.items())
    return isinstance(loaded, bool) == isinstance(written, bool) and loaded == written


@pytest.mark.parametrize("kind", KINDS)
def test_an_edited_config_is_refused_by_its_path_or_honoured(kind):
    rng = random.Random(f"{kind} 1")
    outcomes = [check(mutate(real_config(rng.choice(NAMES)), kind, rng)) for _ in range(EDITS)]
    # A generator that only makes harmless edits would prove nothing.
    assert outcomes.count("refused") > EDITS / 4


@given(name=st.sampled_from(NAMES), kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_any_other_edit_too(name, kind, seed):
    check(mutate(real_config(name), kind, random.Random(seed)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("auto"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
TOP_KEYS = st.sampled_from(
    ["train_batch_size", "optimizer", "scheduler", "fp16", "bf16", "zero_optimization", "amp", "aio", "seed"]
)
INNER_KEYS = st.sampled_from(["enabled", "type", "params", "stage", "leaf_module", "loss_scale", "block_size"])


@given(st.dictionaries(TOP_KEYS | st.text(), JSON | st.dictionaries(INNER_KEYS | st.text(), JSON, max_size=4)))
@settings(max_examples=100, deadline=None)
def test_any_json_at_all_is_loaded_or_refused(source):
    try:
        Config.load(source)
    except ConfigError as error:
        assert str(error)
