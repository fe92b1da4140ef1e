"""Dtypes by name, the model's dtype and the autocast region."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.precision import autocast_context, model_dtype, torch_dtype


@dataclass
class Switch:
    enabled: bool = False


@dataclass
class Autocast:
    enabled: bool = True
    dtype: str | None = None
    lower_precision_safe_modules: list[str] | None = None


@dataclass
class Config:
    fp16: Switch = field(default_factory=Switch)
    bf16: Switch = field(default_factory=Switch)
    torch_autocast: Autocast = field(default_factory=Autocast)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp32", torch.float32),
        ("FP16", torch.float16),
        ("torch.bfloat16", torch.bfloat16),
        ("float64", torch.float64),
        ("half", torch.float16),
    ],
)
def test_names(name, dtype):
    assert torch_dtype(name) is dtype


def test_an_unknown_name_is_refused_with_its_path():
    with pytest.raises(ConfigError, match=r"^data_types\.grad_accum_dtype: .*got 'bfp16'.* Did you mean '"):
        torch_dtype("bfp16", "data_types.grad_accum_dtype")


def test_model_dtype():
    assert model_dtype(Config()) is None
    assert model_dtype(Config(fp16=Switch(True))) is torch.float16
    assert model_dtype(Config(bf16=Switch(True))) is torch.bfloat16
    with pytest.raises(ConfigError, match=r"fp16\.enabled and bf16\.enabled are both true"):
        model_dtype(Config(Switch(True), Switch(True)))


@pytest.mark.parametrize(
    ("section", "dtype"),
    [
        (Autocast(False, "fp16"), torch.float32),
        (Autocast(), torch.bfloat16),
        (Autocast(dtype="bfloat16", lower_precision_safe_modules=["torch.nn.Linear"]), torch.bfloat16),
        (Autocast(dtype="fp16"), torch.float16),
    ],
)
def test_a_product_under_autocast_has_the_dtype(section, dtype):
    weight = torch.ones(2, 2)
    for _ in range(2):
        with autocast_context(Config(torch_autocast=section), "cpu"):
            assert (weight @ weight).dtype is dtype
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("section", "error", "message"),
    [
        (Autocast(dtype="fp23"), ConfigError, r"torch_autocast\.dtype: .* Did you mean 'fp32'\?"),
        (
            Autocast(dtype="fp32"),
            ConfigError,
            r"torch_autocast\.dtype: expected 'fp16' or 'bf16', got 'fp32'",
        ),
    ],
)
def test_what_autocast_cannot_do_is_refused_with_its_path(section, error, message):
    with pytest.raises(error, match=message):
        autocast_context(Config(torch_autocast=section), "cpu")
