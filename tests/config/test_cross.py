"""Good values that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.config import Config
from shardwise.errors import ConfigError

from .configs import minimal


@pytest.mark.parametrize(
    ("keys", "path", "words"),
    [
        ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype", "make the parameters fp32"),
        (
            {"data_types": {"param_dtype": "fp32"}, "fp16": {"enabled": True}},
            "data_types.param_dtype",
            "make the parameters fp16",
        ),
        (
            {"torch_autocast": {"enabled": True, "dtype": "bf16"}, "fp16": {"enabled": True}},
            "torch_autocast.dtype",
            "fp16.enabled makes the parameters fp16 and torch_autocast.enabled is true",
        ),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, "data_types.grad_accum_dtype", 'write "fp32"'),
        (
            {"data_types": {"grad_accum_dtype": "fp16"}, "bf16": {"enabled": True}},
            "data_types.grad_accum_dtype",
            'write "fp32" or "bf16"',
        ),
    ],
)
def test_dtypes_that_contradict_each_other(keys: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(minimal(**keys))
    assert f"  {path}: " in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize("one", ["bf16_master_weights_and_grads", "bf16_optimizer_states"])
def test_state_has_the_dtype_of_the_weights_that_are_stepped(one: str) -> None:
    with pytest.raises(
        ConfigError, match=r"bf16_master_weights_and_grads: and bf16\.bf16_optimizer_states go together"
    ):
        Config.load(minimal(bf16={"enabled": True, one: True}))


@pytest.mark.parametrize(
    ("keys", "path"),
    [({"prescale_gradients": True}, "prescale_gradients"), ({"gradient_normalization": "tokens"}, "gradient_norm")],
)
def test_a_sum_is_no_mean(keys: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=rf'  {path}.*gradient_allreduce_op is "sum"'):
        Config.load(minimal(gradient_allreduce_op="sum", **keys))
