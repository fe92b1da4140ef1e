"""Any edit of a valid configuration gives a run that honours it, or an error with its path.

The suite tries some hundred edits, ``make fuzz`` 10,000 (``pytest tests/test_fuzz.py --fuzz 10000``). Each that is
accepted is trained for a step.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardwise
from shardwise import Config, ShardwiseError
from shardwise.config.explain import explain
from shardwise.config.problems import format_path
from tests.config.configs import AUTO, NAMES, OLD_SPELLINGS, STYLE_NAMES, STYLES, real_config
from tests.config.mutations import at, paths
from tests.test_real_configs import Model


def valid() -> list[dict[str, Any]]:
    """The twenty real configurations, "auto" filled, for one rank and one sample."""
    found = [real_config(name) for name in NAMES]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found += [Config.load(STYLES / f"{name}.json", auto=AUTO, world_size=2).as_dict() for name in STYLE_NAMES]
    for config in found:
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            config.pop(key, None)
        config["train_micro_batch_size_per_gpu"] = 1
        # These write files and time things; what they do is tested elsewhere, and a fuzzed folder name is no test.
        for key in ("csv_monitor", "memory_breakdown", "dump_state", "comms_logger"):
            config.pop(key, None)
        for key in ("mics_shard_size", "zero_hpz_partition_size"):
            (config.get("zero_optimization") or {}).pop(key, None)
    return found


CONFIGS = valid()
EVERY_KEY = [tuple(row.key.split(".")) for row in explain(Config.load({"train_micro_batch_size_per_gpu": 1}))]
# Accepted, they would reach for a network, compile with a C++ compiler, or write files.
LEFT_ALONE = {"wandb", "comet", "tensorboard", "csv_monitor", "compile", "dump_state", "memory_breakdown"}

# Sections that ask for something by being there, or whose switch is on unless they say otherwise.
AS_A_WHOLE = (
    "zero_optimization.zenflow",
    "zero_optimization.zeropp_loco_param",
    "checkpoint.writer",
    "sparse_attention",
)
AS_A_WHOLE += ("datastates_ckpt", "weight_quantization")

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**63, 10**30, 5e8, 1e-12, 1e300, float("inf"), float("-inf"), 0.5, 0.999, 1.0]),
    st.floats(-2, 2, allow_nan=False),
    st.sampled_from(
        ["auto", "none", "fp16", "bf16", "fp32", "cpu", "mean", "sum", "log", "linear", "", "AdamW", "SGD"]
    ),
    st.text(max_size=6),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=2),
    max_leaves=4,
)


def near(value: Any) -> st.SearchStrategy[Any]:
    """Values that might well have been written instead."""
    if isinstance(value, bool):
        return st.just(not value)
    if isinstance(value, int | float):
        whole = [max(0, int(value) + d) for d in (-1, 1, 2)] if float(value).is_integer() else []
        return st.sampled_from([value * 2, value / 2, *whole])
    return values


@st.composite
def edits(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[str, ...], str]:
    """A configuration after one edit, the path that was edited, and how."""
    config = copy.deepcopy(draw(st.sampled_from(CONFIGS)))
    own = [path for path in paths(config) if path[0] not in LEFT_ALONE]
    kind = draw(st.sampled_from(["value", "value", "near", "near", "near", "known key", "typo", "removed", "moved"]))
    if kind == "known key":
        path = draw(st.sampled_from([key for key in EVERY_KEY if key[0] not in LEFT_ALONE]))
        place = config
        for part in path[:-1]:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[path[-1]] = draw(values)
        return config, path, kind
    path = draw(st.sampled_from(own))
    section, key = at(config, path[:-1]), path[-1]
    if kind == "value":
        section[key] = draw(values)
    elif kind == "near":
        section[key] = draw(near(section[key]))
    elif kind == "typo":
        letters = list(key)
        letters[draw(st.integers(0, len(letters) - 1))] = draw(st.sampled_from("qxz_-0"))
        if (typo := "".join(letters)) not in section:
            section[typo] = section.pop(key)
            path = (*path[:-1], typo)
    elif kind == "removed":
        del section[key]
    else:
        home = draw(
            st.sampled_from([(), *(p for p in own if isinstance(at(config, p), dict) and p[: len(path)] != path)])
        )
        value = section.pop(key)
        at(config, home)[key] = value
        path = (*home, key)
    return config, path, kind


def in_force(loaded: Any, written: Any) -> bool:
    """Whether what was loaded says what was written: null is absent, infinity is never, words have one spelling."""
    if written is None:
        return True
    if isinstance(written, dict):
        kept = {key: value for key, value in written.items() if value is not None and key not in OLD_SPELLINGS}
        return all(key in loaded and in_force(loaded[key], value) for key, value in kept.items())
    if isinstance(written, float) and math.isinf(written):
        return loaded is None
    if isinstance(written, str) and isinstance(loaded, str):
        return written.lower() in (loaded.lower(), {"bfloat16": "bf16", "float16": "fp16"}.get(loaded))
    return isinstance(loaded, bool) == isinstance(written, bool) and loaded == written


def is_read_otherwise(path: tuple[str, ...], config: dict[str, Any]) -> bool:
    """Whether the path has an old spelling, or is a section that may be written as a number."""
    zero = config.get("zero_optimization")
    return path[-1] in OLD_SPELLINGS or path[0] == "bfloat16" or (path[0] == "zero_optimization" and zero is True)


def train_a_step(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    optimizer = None if config.get("optimizer") else (lambda params: torch.optim.AdamW(params, lr=1e-3))
    engine, *_ = shardwise.initialize(model=Model(blocks=2), config=config, optimizer=optimizer)
    try:
        tokens = torch.arange(8).view(1, 8)
        for _ in range(min(engine.gradient_accumulation_steps(), 2)):
            by_tokens = engine.config.gradient_normalization == "tokens"
            engine.backward(engine(tokens), tokens=8 if by_tokens else None)
            engine.step()
        return engine.config
    finally:
        engine.destroy()


def try_out(config: dict[str, Any], path: tuple[str, ...], kind: str) -> str:
    before = json.dumps(config, default=str)
    try:
        loaded = train_a_step(config)
    except ShardwiseError as error:
        text = str(error)
        # What is missing is named where it should stand, and a batch number with the two others.
        whole = any(".".join(path).startswith(section) and f"  {section}" in text for section in AS_A_WHOLE)
        assert kind == "removed" or whole or format_path(path) in text or ".".join(path) in text, (path, text)
        assert "Traceback" not in text and "pydantic" not in text, text
        return "refused"
    assert json.dumps(config, default=str) == before, "the user's own object was changed"
    if kind == "typo" and path[0] in ("amp", "msamp"):
        return "accepted"
    if kind != "removed" and not is_read_otherwise(path, config):
        written = at(config, path)
        if written == "auto":
            assert format_path(path) in loaded.filled or written in (at(loaded.as_dict(), path),), path
        elif written is not None:
            assert in_force(at(loaded.as_dict(), path), written), (path, written)
    return "accepted"


def cases(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--fuzz"))


def test_any_edit_is_honoured_or_refused_by_its_path(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcomes: list[str] = []

    @settings(
        max_examples=cases(request),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(edits())
    def every(edit: tuple[dict[str, Any], tuple[str, ...], str]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcomes.append(try_out(*edit))

    every()
    assert len(outcomes) >= cases(request)
    # A generator that only makes harmless edits, or only impossible ones, would prove nothing.
    assert outcomes.count("refused") > len(outcomes) / 5 and outcomes.count("accepted") > len(outcomes) / 5
