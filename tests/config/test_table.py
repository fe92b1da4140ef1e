from __future__ import annotations

import re

import pytest

from shardwise.config import Config
from shardwise.config.keys import Group, Key
from shardwise.config.table import TABLE, Reason
from shardwise.errors import ConfigError, NotYetSupported

from .configs import minimal
from .mutations import at

SAMPLES = {bool: (True, False), int: (7,), float: (0.37,), str: ("other",), list: ([1],), dict: ({"x": 1},)}


def nest(path, value):
    for part in reversed(path):
        value = {part: value}
    return value


def scalars(group, path=()):
    """Every scalar key of the table, with what stands above it."""
    for name, spec in group.keys.items():
        if isinstance(spec, Group):
            yield from scalars(spec, (*path, name))
        else:
            yield (*path, name), spec


def groups_above(path):
    spec, found = TABLE, []
    for part in path[:-1]:
        spec = spec.keys[part]
        found.append(spec)
    return found


def context(path):
    """A config that holds what the key's own section needs."""
    return {"optimizer": {"type": "Adam"}} if path[0] == "optimizer" else {}


def merged(path, value):
    config = minimal(**context(path))
    place = config
    for part in path[:-1]:
        place = place.setdefault(part, {})
    place[path[-1]] = value
    return config


CASES = list(scalars(TABLE))


def state_of(path):
    """What the table says becomes of a key that asks for something."""
    reason, spec = Reason(), TABLE
    reason = reason.within(spec)
    for part in path:
        spec = spec.keys[part]
        reason = reason.within(spec)
    return reason


def asks_by_itself(path):
    """Whether a section above asks for something by being there, whatever this key holds."""
    return any(group.request or group.absent not in (False, "none") for group in groups_above(path))


def is_asleep(path):
    """Whether a switch above, which this key is not, is off."""
    return not asks_by_itself(path) and any(
        group.switch is not None and ".".join(path[index + 1 :]) != group.switch
        for index, group in enumerate(groups_above(path))
    )


def active_sample(key):
    """A value of the right type that asks for something, if there is any."""
    samples = [each for kind in key.kinds for each in SAMPLES[kind]]
    inert = [(type(value), value) for value in key.inert]
    return next((each for each in samples if (type(each), each) not in inert), None)


# One test a section, since there are more than 300 keys.
each_section = pytest.mark.parametrize("section", sorted({path[0] for path, _ in CASES}))


@each_section
def test_a_value_that_asks_for_nothing_is_accepted_and_recorded(section):
    for path, key in CASES:
        if path[0] != section or asks_by_itself(path):
            continue
        for value in (*key.inert, None):
            config = Config.load(merged(path, value))
            place = config.no_effect
            for part in path[:-1]:
                place = place.get(part, {})
            assert place.get(path[-1]) == value, path
            assert Config.load(config.as_dict()).no_effect == config.no_effect


@each_section
def test_a_value_that_asks_for_something_is_refused_by_path(section):
    for path, key in CASES:
        sample, reason = active_sample(key), state_of(path)
        if path[0] != section or is_asleep(path):
            continue
        if sample is None:
            assert set(key.inert) == {True, False}, "a key no value of which asks for anything"
            continue
        if reason.state == "no effect":
            assert reason.why, path
            config = Config.load(merged(path, sample))
            assert at(config.no_effect, path) == sample, path
            continue
        with pytest.raises(ConfigError) as caught:
            Config.load(merged(path, sample))
        assert isinstance(caught.value, NotYetSupported) == (reason.state == "not yet"), path
        assert reason.why and reason.why in str(caught.value), path
        # The key itself, or the section that asks as a whole.
        named = [".".join(path[:end]) for end in range(1, len(path) + 1)] + [f"{section}.mode"]
        assert any(f"\n  {name}: " in str(caught.value) for name in named), path


@each_section
def test_a_value_of_the_wrong_type_is_a_config_error_even_in_a_section_that_is_off(section):
    wrong = ((str, "x"), (bool, True), (list, [1]), (dict, {}))
    for path, key in CASES:
        for kind, value in wrong:
            if path[0] != section or kind in key.kinds:
                continue
            with pytest.raises(ConfigError) as caught:
                Config.load(merged(path, value))
            assert f"  {'.'.join(path)}: " in str(caught.value)
            assert "expected" in str(caught.value)


def test_zero_is_not_false_and_one_is_not_true():
    for value in (0, 1):
        with pytest.raises(ConfigError, match=rf"graph_harvesting: {value} is an integer; expected true or false"):
            Config.load(minimal(graph_harvesting=value))


@pytest.mark.parametrize(
    ("keys", "paths"),
    [
        ({"flops_profiler": {"enabled": True, "profile_step": 9}}, ["flops_profiler.enabled"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ["offload_optimizer.device"]),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, ["zero_optimization.zenflow"]),
        ({"checkpoint": {"writer": {"type": "FAST"}}}, ["checkpoint.writer"]),
        ({"tensor_parallel": {"autotp_size": 4}}, ["tensor_parallel.autotp_size"]),
        (
            {"sequence_parallel_size": 2, "aio": {"queue_depth": 32}},
            ["sequence_parallel_size", "aio.queue_depth"],
        ),
    ],
)
def test_requests(keys, paths):
    with pytest.raises(NotYetSupported) as caught:
        Config.load(minimal(**keys))
    assert str(caught.value).startswith(f"{len(paths)} problem")
    for path in paths:
        assert f"{path}: " in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "path", "instead"),
    [
        ({"sparse_attention": {"block": 16}}, "sparse_attention.mode", "flashattention"),
        ({"datastates_ckpt": {"host_cache_size": 16}}, "datastates_ckpt", "remove"),
        ({"zero_optimization": {"zeropp_loco_param": {}}}, "zero_optimization.zeropp_loco_param", "bf16"),
        ({"zero_optimization": {"legacy_stage1": True}}, "zero_optimization.legacy_stage1", '"stage": 1'),
        (
            {"compression_training": {"row_pruning": {"shared_parameters": {"enabled": True}}}},
            "compression_training.row_pruning.shared_parameters.enabled",
            "torchao",
        ),
        ({"elasticity": {"enabled": True}}, "elasticity.enabled", "train_batch_size"),
    ],
)
def test_refusals_say_what_to_write(keys, path, instead):
    with pytest.raises(ConfigError, match=rf"\n  {re.escape(path)}: .* is refused: ") as caught:
        Config.load(minimal(**keys))
    assert not isinstance(caught.value, NotYetSupported)
    assert instead in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"sparse_attention": {}},
        {"sparse_attention": {"mode": "dense", "block": 32}},
        {"datastates_ckpt": {}},
        {
            "compression_training": {
                "row_pruning": {"shared_parameters": {"enabled": False}, "different_groups": {"a": 1}}
            }
        },
        {"zero_optimization": {"zenflow": None}},
        {"amp": {"enabled": False, "anything": [1]}},
        {"elasticity": {"enabled": False, "min_gpus": 4, "version": 0.1}},
    ],
)
def test_sections_that_are_off(keys):
    Config.load(minimal(**keys))


def test_a_config_error_beside_it_wins_and_both_are_listed():
    with pytest.raises(ConfigError) as caught:
        Config.load(minimal(sequence_parallel_size=2, seed=-1))
    assert not isinstance(caught.value, NotYetSupported)
    assert "sequence_parallel_size: 2" in str(caught.value)
    assert "seed: -1" in str(caught.value)


def test_the_table_is_well_formed():
    for path, key in CASES:
        assert isinstance(key, Key)
        for value in key.inert:
            assert isinstance(value, key.kinds), path
