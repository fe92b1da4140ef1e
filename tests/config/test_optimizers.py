"""Optimizers of upstream that torch does not have, in a configuration."""

from __future__ import annotations

import pytest

from shardwise.config import Config
from shardwise.errors import ConfigError

from .configs import minimal


def load(name, top=None, **params):
    return Config.load(minimal(optimizer={"type": name, "params": params}, **(top or {})))


@pytest.mark.parametrize(
    ("written", "name", "params"),
    [
        ("lamb", "Lamb", {"lr": 1e-3, "max_coeff": 0.3, "min_coeff": 0.01, "eps_inside_sqrt": True, "amsgrad": False}),
        ("LION", "Lion", {"betas": [0.9, 0.99], "weight_decay": 0.1, "fp32_optimizer_states": True}),
        ("muon", "Muon", {"muon_lr": 0.02, "adam_lr": 3e-4, "ns_method": "standard", "adam_w_mode": True}),
        ("Adam", "Adam", {"bias_correction": False, "fp32_optimizer_states": False}),
        ("adagrad", "Adagrad", {"fp32_optimizer_states": True}),
    ],
)
def test_they_load_in_any_case(written, name, params):
    section = load(written, **params).optimizer
    assert section.type == name and section.params == params


@pytest.mark.parametrize(
    ("name", "params", "line"),
    [
        ("OneBitAdam", {}, 'optimizer.type: "OneBitAdam" is refused: '),
        ("zerooneadam", {"freeze_step": 3}, 'optimizer.type: "zerooneadam" is refused: '),
        ("MuSGD", {}, "write SGD"),
        ("Lamb", {"max_coeff": -1}, "optimizer.params.max_coeff: -1 is out of range"),
        ("Lamb", {"amsgrad": True}, "optimizer.params.amsgrad: true is not available"),
        ("Lamb", {"maxcoeff": 1}, 'did you mean "max_coeff"?'),
        ("Lion", {"betas": [0.9]}, "optimizer.params.betas: "),
        ("Muon", {"ns_method": "qr"}, "optimizer.params.ns_method: "),
        ("Muon", {"adam_w_mode": False}, "optimizer.params.adam_w_mode: false is not available"),
        ("Muon", {"per_head_muon": True}, "optimizer.params.per_head_muon: true is not available"),
        ("Adam", {"bias_correction": False, "amsgrad": True}, "optimizer.params.amsgrad: true needs bias_correction"),
        ("Lam", {}, 'did you mean "Lamb"?'),
    ],
)
def test_they_are_checked(name, params, line):
    with pytest.raises(ConfigError) as caught:
        load(name, **params)
    assert line in str(caught.value)


@pytest.mark.parametrize("name", ["Lamb", "AdamW", "SGD"])
def test_max_grad_norm_is_gradient_clipping(name):
    config = load(name, lr=0.1, max_grad_norm=0.25)
    assert config.gradient_clipping == 0.25
    again = Config.load(config.as_dict())
    assert again.gradient_clipping == 0.25
    assert load(name, {"gradient_clipping": 0.25}, lr=0.1, max_grad_norm=0.25).gradient_clipping == 0.25


def test_a_max_grad_norm_of_0_asks_for_nothing():
    assert load("Lamb", max_grad_norm=0.0).gradient_clipping == load("Lamb").gradient_clipping
    assert load("Lamb", {"gradient_clipping": 3.0}, max_grad_norm=0).gradient_clipping == 3.0


def test_two_different_norms_contradict():
    with pytest.raises(ConfigError) as caught:
        load("Lamb", {"gradient_clipping": 1.0}, max_grad_norm=0.5)
    assert "optimizer.params.max_grad_norm: 0.5, but gradient_clipping is 1.0: gradients are clipped once" in str(
        caught.value
    )
