from __future__ import annotations

import base64
import copy
import json
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from shardwise.config import Config
from shardwise.errors import ConfigError

from .configs import NAMES, WORLD_SIZE, minimal, real_config


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_path_a_mapping_and_base64_are_the_same_config(name, tmp_path):
    source = real_config(name)
    path = write(tmp_path, json.dumps(source))
    expected = Config.load(source, world_size=WORLD_SIZE)
    encoded = base64.urlsafe_b64encode(json.dumps(source).encode()).decode()
    for other in (path, str(path), encoded, MappingProxyType(source), OrderedDict(source)):
        assert Config.load(other, world_size=WORLD_SIZE) == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_mapping_is_left_as_it_was(name):
    source = {"bfloat16" if key == "bf16" else key: value for key, value in real_config(name).items()}
    source["gradient_clipping"] = "auto"
    before = copy.deepcopy(source)
    config = Config.load(source, world_size=WORLD_SIZE)
    assert source == before
    if config.optimizer:
        config.optimizer.params["lr"] = 5.0
        assert source == before


def test_comments_trailing_commas_and_a_byte_order_mark(tmp_path):
    path = write(
        tmp_path,
        '\ufeff{ // batch\n "train_batch_size": 8, # samples\n /* zero */ "zero_optimization": {"stage": 2,},\n}',
    )
    config = Config.load(path)
    assert (config.train_batch_size, config.zero_optimization.stage) == (8, 2)


@pytest.mark.parametrize("comment", ["", "# a comment\n"])
def test_duplicate_keys_are_refused_with_their_path(comment, tmp_path):
    path = write(tmp_path, comment + '{"train_batch_size": 8, "fp16": {"enabled": true, "enabled": false}}')
    with pytest.raises(ConfigError, match=r"fp16\.enabled: this key is written twice"):
        Config.load(path)


@pytest.mark.parametrize("comment", ["", "# a comment\n"])
@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" * 5000])
def test_numbers_too_large_for_any_type_are_refused_with_their_path(comment, number, tmp_path):
    zero = f'{{"sub_group_size": {number}}}'
    path = write(tmp_path, f'{comment}{{"train_batch_size": 8, "zero_optimization": {zero}}}')
    with pytest.raises(ConfigError, match=r"zero_optimization\.sub_group_size: .*too large"):
        Config.load(path)


def test_infinity_at_steps_per_print_means_never(tmp_path):
    assert Config.load(minimal(steps_per_print=float("inf"))).steps_per_print is None
    path = write(tmp_path, '{"train_batch_size": 8, "steps_per_print": Infinity, "seed": 3}')
    assert Config.load(path).steps_per_print is None


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"gradient_clipping": float("inf")}, "gradient_clipping"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping"),
        ({"steps_per_print": float("nan")}, "steps_per_print"),
        ({"steps_per_print": float("-inf")}, "steps_per_print"),
        ({"fp16": {"loss_scale": float("nan")}}, "fp16.loss_scale"),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9, float("nan")]}}},
            "optimizer.params.betas[1]",
        ),
    ],
)
def test_nan_and_infinity_are_refused_elsewhere(keys, path):
    with pytest.raises(ConfigError) as caught:
        Config.load(minimal(**keys))
    assert f"  {path}: " in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1, 2]",
        "3",
        '"text"',
        "null",
        "{}}",
        '{"a": 1} x',
        "[" * 10_000,
        '{"a":' * 10_000,
        "\x00",
        '{"a" 1}',
    ],
)
def test_a_file_that_is_no_config_is_refused_by_name(text, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        Config.load(path)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00{")
    for path in (tmp_path, tmp_path / "absent.json", binary):
        with pytest.raises(ConfigError) as caught:
            Config.load(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("source", ["", "ds_config.json", "conf", "{}", "e30", "a" * 10_000, "bm9wZQ==", "\x00"])
def test_a_string_that_is_neither_file_nor_base64(source):
    with pytest.raises(ConfigError, match="neither an existing file nor"):
        Config.load(source)


@pytest.mark.parametrize("source", [None, 3, [1], b"{}", object()])
def test_a_source_of_another_type(source):
    with pytest.raises(ConfigError, match="expected a path, a dict or a base64 string"):
        Config.load(source)


def test_numpy_scalars_and_tuples_are_json_after_all():
    config = Config.load(
        {
            "train_batch_size": np.int64(8),
            "optimizer": {"type": "Adam", "params": {"lr": np.float32(0.5), "betas": (0.9, 0.95)}},
        }
    )
    assert json.dumps(config.as_dict())
    assert config.optimizer.params == {"lr": 0.5, "betas": [0.9, 0.95]}


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", 1j])
def test_what_json_cannot_hold_is_refused_with_its_path(value):
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr: a .* object"):
        Config.load(minimal(optimizer={"type": "Adam", "params": {"lr": value}}))


def test_keys_that_are_no_strings_and_a_mapping_that_holds_itself():
    with pytest.raises(ConfigError, match="3: a key of type int"):
        Config.load(minimal(**{"fp16": {3: True}}))
    loop: dict[str, object] = {}
    loop["fp16"] = loop
    with pytest.raises(ConfigError, match="levels deep"):
        Config.load(loop)


def test_a_message_stays_printable_and_on_one_line():
    with pytest.raises(ConfigError) as caught:
        Config.load(minimal(**{"a\nb\ud800": 1, "seed": 10**5000, "fp16": "x" * 1000}))
    lines = str(caught.value).split("\n")
    assert len(lines) == 4
    assert max(map(len, lines)) < 250
    str(caught.value).encode()
