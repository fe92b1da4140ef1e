from __future__ import annotations

import pytest

from shardwise.config import Config
from shardwise.config.auto import DEFAULTED
from shardwise.errors import ConfigError

from .configs import minimal


def test_batch_keys_count_as_absent_and_are_recorded():
    config = Config.load(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": "auto",
        },
        world_size=2,
    )
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (8, 1)
    assert config.filled == {"train_batch_size": 8, "gradient_accumulation_steps": 1}


def test_a_given_batch_value_is_taken():
    source = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    config = Config.load(source, auto={"train_micro_batch_size_per_gpu": 4})
    assert config.train_batch_size == 4
    with pytest.raises(ConfigError, match="train_batch_size: no batch size is given"):
        Config.load(source)


def test_values_are_filled_by_path_at_any_depth():
    config = Config.load(
        minimal(
            bf16={"enabled": "auto"},
            zero_optimization={"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": "auto"},
            optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-8}},
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        ),
        auto={
            "bf16.enabled": True,
            "zero_optimization.reduce_bucket_size": 1048576,
            "zero_optimization.overlap_comm": False,
            "optimizer.params.lr": 1e-4,
            "optimizer.params.betas": (0.9, 0.95),
            "scheduler.params.warmup_num_steps": 0,
            "fp16.enabled": True,  # not "auto" in the config, so not taken
        },
    )
    assert config.bf16.enabled and not config.fp16.enabled
    assert config.zero_optimization.reduce_bucket_size == 1048576
    assert config.zero_optimization.overlap_comm is False
    assert config.optimizer.params == {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8}
    assert config.scheduler.params == {"warmup_num_steps": 0}
    assert config.filled["optimizer.params.lr"] == 1e-4
    assert "fp16.enabled" not in config.filled


@pytest.mark.parametrize("section", ["bf16", "bfloat16"])
@pytest.mark.parametrize("given", ["bf16", "bfloat16"])
def test_both_names_of_bf16(section, given):
    config = Config.load(minimal(**{section: {"enabled": "auto"}}), auto={f"{given}.enabled": True})
    assert config.bf16.enabled


@pytest.mark.parametrize("path", sorted(DEFAULTED))
def test_sizes_and_clipping_take_their_default_and_say_so(path):
    section, _, name = path.rpartition(".")
    source = {name: "auto"} if not section else {section: {name: "auto"}}
    config = Config.load(minimal(**source))
    holder = getattr(config, section) if section else config
    assert getattr(holder, name) == DEFAULTED[path] == config.filled[path]


@pytest.mark.parametrize(
    ("keys", "path", "write"),
    [
        ({"bf16": {"enabled": "auto"}}, "bf16.enabled", "write true or false"),
        ({"fp16": "auto"}, "fp16", "write an object"),
        ({"optimizer": {"type": "auto"}}, "optimizer.type", "write a string"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, "optimizer.params.lr", "write a value"),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": ["auto", 0.9]}}},
            "optimizer.params.betas[0]",
            "write",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
            "scheduler.params.total_num_steps",
            "write an integer >= 1",
        ),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage", "write an integer from 0 to 3"),
        (
            {"zero_optimization": {"offload_param": {"device": "auto"}}},
            "offload_param.device",
            'write "none"',
        ),
        (
            {"torch_autocast": {"lower_precision_safe_modules": ["auto"]}},
            "lower_precision_safe_modules[0]",
            "write",
        ),
        ({"steps_per_print": "auto"}, "steps_per_print", "write"),
        ({"amp": {"enabled": False, "opt_level": "auto"}}, "amp.opt_level", "write"),
        ({"wandb": {"enabled": False, "project": "auto"}}, "wandb.project", "write a string"),
    ],
)
def test_auto_without_a_value_is_an_error_that_says_what_to_write(keys, path, write):
    with pytest.raises(ConfigError) as caught:
        Config.load(minimal(**keys))
    (line,) = [line for line in str(caught.value).split("\n") if "was left without a value" in line]
    assert f'{path}: "auto"' in line
    assert write in line


def test_a_misspelt_key_is_a_misspelt_key_first():
    with pytest.raises(ConfigError) as caught:
        Config.load(minimal(bf16={"enabld": "auto"}))
    assert 'bf16.enabld: unknown key; did you mean "enabled"?' in str(caught.value)
    assert "was left" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "word"),
    [(943718.4, "expected an integer"), (None, "was left"), ("auto", "was left"), (object(), "object")],
)
def test_a_filled_value_is_checked_as_a_written_one(given, word):
    source = minimal(zero_optimization={"stage": "auto"})
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage: ") as caught:
        Config.load(source, auto={"zero_optimization.stage": given})
    assert word in str(caught.value)


def test_keys_for_which_auto_is_a_value():
    assert Config.load(minimal(pipeline={"stages": "auto"})).no_effect == {"pipeline": {"stages": "auto"}}


def test_the_paths_are_strings():
    with pytest.raises(ConfigError, match="its keys are JSON paths"):
        Config.load(minimal(), auto={3: True})
