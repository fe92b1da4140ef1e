"""Keys that no other test is about: what each changes in a run."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardwise
from shardwise.monitor import configured


def started(model: nn.Module, **keys: Any) -> Any:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **keys}
    return shardwise.initialize(model=model, config=config)[0]


@pytest.mark.parametrize("cast", [True, False])
def test_auto_cast_casts_the_inputs_of_fp16_models(cast: bool) -> None:
    engine = started(nn.Linear(4, 2), fp16={"enabled": True, "auto_cast": cast})
    try:
        if cast:
            assert engine(torch.ones(2, 4)).dtype == torch.float16
        else:
            with pytest.raises(RuntimeError, match=r"dtype"):
                engine(torch.ones(2, 4))
    finally:
        engine.destroy()


@pytest.mark.parametrize("checks", [True, False])
def test_check_grad_overflow_skips_a_step_of_bf16_whose_gradient_is_not_finite(checks: bool) -> None:
    engine = started(nn.Linear(4, 2), bf16={"enabled": True, "check_grad_overflow": checks}, gradient_clipping=0)
    try:
        engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().mean() * float("inf"))
        engine.step()
        assert engine.skipped_steps == int(checks)
        finite = all(bool(v.isfinite().all()) for v in engine.module_state_dict().values())
        assert finite == checks
    finally:
        engine.destroy()


@pytest.mark.parametrize(("drop", "sizes"), [(True, [2, 2]), (False, [2, 2, 1])])
def test_dataloader_drop_last_leaves_out_the_short_batch(drop: bool, sizes: list[int]) -> None:
    data = TensorDataset(torch.arange(5.0))
    config = {"train_micro_batch_size_per_gpu": 2, "dataloader_drop_last": drop}
    engine, _, loader, _ = shardwise.initialize(model=nn.Linear(1, 1), training_data=data, config=config)
    try:
        assert loader is not None
        assert [len(batch[0]) for batch in loader] == sizes
    finally:
        engine.destroy()


def test_vocabulary_size_warns_of_a_size_that_gpus_dislike() -> None:
    with pytest.warns(UserWarning, match=r"vocabulary_size: 50257 is no multiple of 8; .* 50264"):
        shardwise.Config.load({"train_batch_size": 1, "vocabulary_size": 50257})
    shardwise.Config.load({"train_batch_size": 1, "vocabulary_size": 50304})


def test_the_autocast_dtype_is_that_of_matrix_products() -> None:
    engine = started(nn.Linear(4, 2), torch_autocast={"enabled": True, "dtype": "bfloat16"})
    try:
        assert engine(torch.ones(2, 4)).dtype == torch.bfloat16
        assert next(engine.module.parameters()).dtype == torch.float32
    finally:
        engine.destroy()


@pytest.mark.parametrize("low", ["fp16", "bf16"])
def test_autocast_beside_parameters_of_16_bits_has_their_dtype(low: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    engine = started(model, torch_autocast={"enabled": True}, **{low: {"enabled": True}})
    try:
        assert engine(torch.tensor([1, 2])).dtype == next(engine.module.parameters()).dtype
    finally:
        engine.destroy()


def test_param_dtype_is_that_of_the_parameters_or_an_error() -> None:
    types = {"param_dtype": "fp32"}
    with pytest.raises(shardwise.ConfigError, match=r'data_types\.param_dtype: "fp32", but weight is bfloat16'):
        started(nn.Linear(4, 2).bfloat16(), data_types=types)
    started(nn.Linear(4, 2), data_types=types).destroy()


def test_every_key_of_comet_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Experiment(SimpleNamespace):
        def set_name(self, name: str) -> None:
            seen["set_name"] = name

        def log_parameters(self, parameters: Any) -> None: ...

        def log_metric(self, name: str, value: float, step: int) -> None:
            seen.setdefault("steps", []).append(step)

        def end(self) -> None: ...

    def start(**options: Any) -> Experiment:
        seen.update(options)
        return Experiment()

    monkeypatch.setitem(sys.modules, "comet_ml", SimpleNamespace(start=start))
    keys = {"project": "p", "workspace": "w", "api_key": "k", "experiment_key": "e", "online": False, "mode": "get"}
    section = {"enabled": True, "samples_log_interval": 7, "experiment_name": "n", **keys}
    (tracker,) = configured(shardwise.Config.load({"train_batch_size": 1, "comet": section}))
    tracker.start({})
    for step in range(0, 20, 2):
        tracker.log({"x": 1.0}, step)
    tracker.finish()
    assert {name: seen[name] for name in keys} == keys
    assert (seen["set_name"], seen["steps"]) == ("n", [0, 8, 16])


def test_every_key_of_wandb_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def init(**options: Any) -> Any:
        seen.update(options)
        return MagicMock()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None, init=init))
    section = {"enabled": True, "group": "g", "team": "t", "project": "p"}
    (tracker,) = configured(shardwise.Config.load({"train_batch_size": 1, "wandb": section}))
    tracker.start({})
    tracker.finish()
    assert (seen["group"], seen["entity"], seen["project"]) == ("g", "t", "p")
