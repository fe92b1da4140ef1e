from __future__ import annotations

import pytest
import torch

from shardwise.config import Config
from shardwise.errors import ConfigError

from .configs import minimal


def load(kind, name, **params):
    return Config.load(minimal(**{kind: {"type": name, "params": params}}))


@pytest.mark.parametrize(
    ("written", "name"),
    [("adam", "Adam"), ("ADAMW", "AdamW"), ("sgd", "SGD"), ("adagrad", "Adagrad"), ("RMSprop", "RMSprop")],
)
def test_optimizer_names(written, name):
    assert load("optimizer", written, lr=1).optimizer.type == name


def test_every_usable_torch_class_loads_with_its_own_defaults():
    for name, cls in vars(torch.optim).items():
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
            defaults = {"lr": 0.1}
            if name == "Muon":
                assert load("optimizer", name, **defaults).optimizer.type == name  # upstream's
            elif name in ("Optimizer", "LBFGS", "SparseAdam"):
                with pytest.raises(ConfigError):
                    load("optimizer", name, **defaults)
            else:
                given = cls([torch.nn.Parameter(torch.zeros(1))]).defaults
                # torch lists this one of Adam and NAdam, where upstream has adam_w_mode.
                if name in ("Adam", "AdamW"):
                    given.pop("decoupled_weight_decay", None)
                assert load("optimizer", name, **given).optimizer.type == name


@pytest.mark.parametrize(
    ("name", "params", "path", "word"),
    [
        ("Adam", {"lr": -1}, "lr", "expected a number >= 0"),
        ("Adam", {"lr": "3e-4"}, "lr", '"3e-4" is a string'),
        ("Adam", {"lr": True}, "lr", "true is a boolean"),
        ("Adam", {"lr": 10**400}, "lr", "too large"),
        ("AdamW", {"betas": 0.9}, "betas", "a list of 2 numbers"),
        ("AdamW", {"betas": [0.9]}, "betas", "a list of 2 numbers"),
        ("AdamW", {"betas": [0.9, 1.0]}, "betas", "up to but not 1"),
        ("AdamW", {"betas": [0.9, "x"]}, "betas", "a list of 2 numbers"),
        ("AdamW", {"betas": [0.9, None]}, "betas", "null"),
        ("AdamW", {"eps": -1e-8}, "eps", ">= 0"),
        ("AdamW", {"weight_decay": -0.1}, "weight_decay", ">= 0"),
        ("AdamW", {"amsgrad": 1}, "amsgrad", "true or false"),
        ("AdamW", {"fused": "yes"}, "fused", "true or false"),
        ("AdamW", {"torch_adam": "yes"}, "torch_adam", "true or false"),
        ("AdamW", {"adam_w_mode": 1}, "adam_w_mode", "true or false"),
        ("Adam", {"decoupled_weight_decay": True}, "decoupled_weight_decay", "adam_w_mode"),
        ("SGD", {"momentum": [0.9]}, "momentum", "a number"),
        ("SGD", {"params": []}, "params", "unknown key"),
        ("SGD", {"torch_adam": True}, "torch_adam", "unknown key"),
    ],
)
def test_optimizer_arguments_are_checked(name, params, path, word):
    with pytest.raises(ConfigError) as caught:
        load("optimizer", name, **params)
    assert f"optimizer.params.{path}: " in str(caught.value)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"params": {"lr": 1}}, "optimizer.type: missing"),
        ({"type": None}, "optimizer.type: missing"),
        ({"type": 3}, "optimizer.type: 3 is an integer"),
        ({"type": "Adamw8bit"}, 'did you mean "AdamW"?'),
        ({"type": "rmsprop"}, 'did you mean "RMSprop"?'),
        ({"type": "LBFGS"}, 'optimizer.type: "LBFGS" cannot be used'),
        ({"type": "Optimizer"}, "optimizer.type: "),
        ({"type": "Adam", "params": []}, "optimizer.params: [] is a list; expected an object"),
        ("Adam", 'optimizer: "Adam" is a string; expected an object'),
    ],
)
def test_the_optimizer_section_is_checked(section, line):
    with pytest.raises(ConfigError) as caught:
        Config.load(minimal(optimizer=section))
    assert line in str(caught.value)


def test_null_arguments_are_absent_unless_they_mean_something():
    assert load("optimizer", "Adam", lr=None, foreach=None).optimizer.params == {"foreach": None}


def test_a_scheduler_of_upstream_has_integers_where_5e3_was_written():
    params = load("scheduler", "WarmupDecayLR", total_num_steps=5e3, warmup_num_steps=0).scheduler.params
    assert params == {"total_num_steps": 5000, "warmup_num_steps": 0}
    assert all(type(value) is int for value in params.values())


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("LRRangeTest", {}),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_second_step_size": None}),
        ("WarmupLR", {"warmup_max_lr": None, "last_batch_iteration": -1}),
        ("WarmupCosineLR", {"total_num_steps": 10}),
        ("StepLR", {"step_size": 10}),
        ("MultiStepLR", {"milestones": [1, 2]}),
        ("CosineAnnealingLR", {"T_max": 10, "last_epoch": -1}),
        ("OneCycleLR", {"max_lr": [0.1, 0.2], "total_steps": 10, "anneal_strategy": "linear"}),
        ("ReduceLROnPlateau", {"mode": "min"}),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 1, "scale_fn": None}),
    ],
)
def test_schedulers(name, params):
    assert load("scheduler", name, **params).scheduler.type == name


@pytest.mark.parametrize(
    ("name", "params", "line"),
    [
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps: missing"),
        ("StepLR", {}, "scheduler.params.step_size: missing"),
        ("StepLR", {"step_size": 0}, "scheduler.params.step_size: 0 is out of range"),
        ("MultiStepLR", {"milestones": 3}, "scheduler.params.milestones: "),
        ("WarmupLR", {"warmup_type": "cubic"}, 'scheduler.params.warmup_type: "cubic" is not a choice'),
        ("WarmupLR", {"warmup_num_steps": -1}, "scheduler.params.warmup_num_steps: -1 is out of range"),
        ("WarmupLR", {"warmup_num_steps": 0.5}, "scheduler.params.warmup_num_steps: 0.5 is a number"),
        ("OneCycleLR", {"max_lr": 1, "anneal_strategy": "sin"}, "scheduler.params.anneal_strategy: "),
        ("CyclicLR", {"base_lr": 1, "max_lr": 1, "scale_fn": "f"}, "scheduler.params.scale_fn: "),
        ("LambdaLR", {}, 'scheduler.type: "LambdaLR" cannot be used from a config: it takes a function'),
        ("warmuplr", {}, 'scheduler.type: "warmuplr" is unknown'),
        ("warmuplr", {}, 'did you mean "WarmupLR"?'),
        ("LRScheduler", {}, "scheduler.type: "),
    ],
)
def test_schedulers_are_checked(name, params, line):
    with pytest.raises(ConfigError) as caught:
        load("scheduler", name, **params)
    assert line in str(caught.value)
