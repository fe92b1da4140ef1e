"""The key table of upstream (``upstream_keys.json``): no key without a state, no state without a test."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.config import Config
from shardwise.config.explain import Row, explain
from shardwise.errors import ConfigError

HERE = Path(__file__).parent
UPSTREAM: dict[str, Any] = json.loads((HERE / "upstream_keys.json").read_text())

# Names of old that are read as others, with a warning.
OLD = ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "stage3_gather_fp16_weights_on_model_save")
# In DeepSpeed 0.14; in articles; ours. The defaults of the first two are those of the places that they are from.
BEYOND = {
    "compile.enabled",
    "compile.backend",
    "compile.kwargs",
    "flashattention.enable",
    "flashattention.attention_dropout",
    "flashattention.cross_attention",
    "msamp",
    "msamp.enabled",
    "seed",
    "gradient_normalization",
    "communication_timeout",
    "activation_checkpointing.enabled",
    "optimizer.type",
    "scheduler.type",
}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        here = f"{path}.{key}" if path else key
        if isinstance(item, dict):
            yield from leaves(item, here)
        else:
            yield here, item


KEYS = dict(leaves(UPSTREAM))


def rows(**keys: Any) -> dict[str, Row]:
    return {row.key: row for row in explain(Config.load({"train_micro_batch_size_per_gpu": 1, **keys}))}


def test_every_key_of_upstream_has_a_state_and_a_line() -> None:
    found = rows()
    missing = set(KEYS) - set(found)
    assert not missing
    for key in KEYS:
        assert found[key].state in ("honoured", "no effect", "refused", "not yet")
        assert found[key].line, key


# The switch of sparse attention is its mode, and this is the mode that is none.
OTHER_DEFAULT = {"sparse_attention.mode": "dense", "train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}


def test_every_default_is_upstream_s() -> None:
    found = rows()
    for key, default in KEYS.items():
        if default is not None or key in OTHER_DEFAULT:
            value = found[key].value
            # Where the table knows no value that asks for nothing it shows none: the section is off.
            assert value == OTHER_DEFAULT.get(key, default) or (value is None and found[key].state != "honoured"), key


def test_there_is_no_key_that_nobody_has_heard_of() -> None:
    known = {key for key in rows() if key not in KEYS and key not in BEYOND}
    assert not known


def test_only_what_comes_later_is_not_yet() -> None:
    later = {key.split(".")[0] for key, row in rows().items() if row.state == "not yet"}
    assert later == {
        "aio",
        "autotuning",
        "checkpoint",
        "compile",
        "data_parallel_size",
        "expert_parallel",
        "flops_profiler",
        "pipeline",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "tensor_parallel",
        "use_data_before_expert_parallelism",
        "zero_optimization",
    }
    below = {key for key, row in rows().items() if row.state == "not yet" and key.startswith(("compile", "zero_"))}
    names = ("offload", "zenflow", "load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint")
    assert all(any(name in key for name in names) for key in below), below


@pytest.mark.parametrize("key", OLD)
def test_old_names_warn_of_the_new_ones(key: str) -> None:
    with pytest.warns(UserWarning, match=f"zero_optimization.{key} is the old name of "):
        config = Config.load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {key: False}})
    assert key not in config.as_dict()["zero_optimization"]


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"cpu_offload": True}, r"zero_optimization.cpu_offload \(now zero_optimization.offload_optimizer.device\)"),
        ({"cpu_offload_param": True}, r"zero_optimization.cpu_offload_param \(now .*offload_param.device\)"),
        ({"cpu_offload": 1}, "zero_optimization.cpu_offload"),
        ({"cpu_offload": True, "offload_optimizer": {"device": "none"}}, "zero_optimization.cpu_offload"),
    ],
)
@pytest.mark.filterwarnings("ignore:zero_optimization:UserWarning")
def test_old_names_ask_for_what_they_asked_for(keys: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=f"  {path}: "):
        Config.load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": keys})


def without_effect() -> dict[str, Any]:
    """Every key that never has an effect, with a value other than its default."""
    keys: dict[str, Any] = {}
    for key, row in rows(zero_optimization={"stage": 3}).items():
        default = KEYS.get(key)
        if (
            row.state != "no effect"
            or "." not in key
            or not isinstance(default, bool | int)
            or row.line.startswith("only")
        ):
            continue
        place = keys
        *above, name = key.split(".")
        for part in above:
            place = place.setdefault(part, {})
        place[name] = not default if isinstance(default, bool) else default + 1
    return keys


def train(config: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    base = {"train_micro_batch_size_per_gpu": 2, "optimizer": adam, "zero_optimization": {"stage": 3}}
    engine, *_ = shardwise.initialize(model=model, config={**base, **config})
    try:
        losses = []
        for step in range(2):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, engine.module_state_dict()
    finally:
        engine.destroy()


def test_what_is_said_to_have_no_effect_has_none_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    keys = without_effect()
    assert len(list(leaves(keys))) > 20
    keys["zero_optimization"]["stage"] = 3
    keys["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}, "legacy_fusion": True}
    with caplog.at_level("INFO", logger="shardwise"):
        losses, state = train(keys)
    said = " ".join(record.getMessage() for record in caplog.records)
    assert all(key in said for key, _ in leaves(keys) if rows(**keys)[key].state == "no effect")
    expected, values = train({})
    assert losses == expected
    assert all(torch.equal(state[name], values[name]) for name in values)


# -- what each honoured key is proved by --

PROOFS: dict[str, str] = json.loads((HERE / "key_tests.json").read_text())


def honoured() -> set[str]:
    both = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}
    found = rows(**both).values()
    # Keys that have no effect in this run only: their condition does not hold.
    return {r.key for r in found if ".params." not in r.key and (r.state == "honoured" or is_conditional(r))}


def is_conditional(row: Row) -> bool:
    return row.state == "no effect" and row.line.startswith(("only ", "gradients are divided while"))


def test_every_honoured_key_names_a_test_that_is_about_it() -> None:
    assert set(PROOFS) == honoured()
    for key, proof in PROOFS.items():
        file, _, name = proof.partition("::")
        source = (HERE.parent / file).read_text()
        functions = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{key}: {file} has no {name}"
        *section, leaf = key.split(".")
        word = section[-1] if leaf in ("type", "enabled") else leaf
        assert re.search(rf"\b{word}\b", source), f"{key}: {file} does not speak of it"
