from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import warnings

import pydantic
import pytest

from shardwise.config import Config
from shardwise.errors import ConfigError

from .configs import NAMES, OLD_SPELLINGS, WORLD_SIZE, minimal, real_config


def test_the_defaults_are_those_of_the_reference():
    config = Config.load({"train_batch_size": 1})
    zero = config.zero_optimization
    assert config.gradient_clipping == 1.0
    assert (config.optimizer, config.scheduler, config.steps_per_print, config.seed) == (None,) * 4
    assert config.communication_data_type is None
    assert (config.gradient_normalization, config.communication_timeout) == ("micro_steps", 600.0)
    assert (
        config.wall_clock_breakdown,
        config.dataloader_drop_last,
        config.zero_allow_untested_optimizer,
    ) == (
        False,
        False,
        False,
    )
    assert config.fp16.model_dump() == {
        "enabled": False,
        "auto_cast": False,
        "loss_scale": 0.0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1.0,
    }
    assert config.bf16.model_dump() == {
        "enabled": False,
        "check_grad_overflow": True,
        "immediate_grad_update": False,
        "bf16_master_weights_and_grads": False,
        "bf16_optimizer_states": False,
    }
    assert (zero.stage, zero.overlap_comm, zero.mics_shard_size, zero.zero_hpz_partition_size) == (
        0,
        None,
        -1,
        1,
    )
    assert (zero.reduce_bucket_size, zero.allgather_bucket_size, zero.sub_group_size) == (5e8, 5e8, 1e9)
    assert (zero.stage3_prefetch_bucket_size, zero.stage3_param_persistence_threshold) == (5e7, 1e5)
    assert (zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance) == (1e9, 1e9)
    assert zero.stage3_model_persistence_threshold == sys.maxsize
    assert (config.filled, config.no_effect) == ({}, {})


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_a_real_config_is_honoured_or_recorded(name):
    config = Config.load(real_config(name), world_size=WORLD_SIZE)
    assert contains(config.as_dict(), real_config(name))


def contains(whole, part):
    if isinstance(part, dict):
        keys = {key: value for key, value in part.items() if value is not None and key not in OLD_SPELLINGS}
        return all(contains(whole[key], value) for key, value in keys.items())
    return whole == part


@pytest.mark.parametrize("name", NAMES)
def test_as_dict_is_json_and_reads_back_as_the_same_config(name):
    config = Config.load(real_config(name), world_size=WORLD_SIZE)
    text = json.dumps(config.as_dict(), allow_nan=False)
    assert Config.load(json.loads(text), world_size=WORLD_SIZE) == config


def test_it_is_frozen_copied_and_pickled():
    config = Config.load(real_config(NAMES[0]), world_size=WORLD_SIZE)
    for target in (config, config.zero_optimization):
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            target.stage = 2
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))


def test_sizes_written_as_floats_are_integers():
    zero = Config.load(minimal(zero_optimization={"stage": 3.0, "reduce_bucket_size": 5e8})).zero_optimization
    assert type(zero.reduce_bucket_size) is int is type(zero.stage)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"zero_optimization": {"stage": 4}},
            "zero_optimization.stage: 4 is out of range; expected an integer from 0",
        ),
        ({"zero_optimization": {"stage": -1}}, "zero_optimization.stage: -1 is out of range"),
        ({"zero_optimization": {"stage": "2"}}, 'zero_optimization.stage: "2" is a string'),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage: true is a boolean"),
        (
            {"zero_optimization": {"reduce_bucket_size": 0}},
            "zero_optimization.reduce_bucket_size: 0 is out of range",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": 0.5}},
            "zero_optimization.reduce_bucket_size: 0.5 is a number",
        ),
        ({"zero_optimization": {"overlap_comm": 1}}, "zero_optimization.overlap_comm: 1 is an integer"),
        ({"zero_optimization": {"leaf_module": {"classes": "A"}}}, "zero_optimization.leaf_module.classes: "),
        ({"zero_optimization": {"leaf_module": {"classes": [1]}}}, "zero_optimization.leaf_module.classes: "),
        ({"zero_optimization": {"leaf_module": []}}, "zero_optimization.leaf_module: [] is a list"),
        ({"zero_optimization": [2]}, "zero_optimization: [2] is a list; expected an object"),
        ({"zero_optimization": 2}, "zero_optimization: 2 is an integer; expected an object"),
        ({"fp16": True}, "fp16: true is a boolean; expected an object"),
        ({"fp16": {"enabled": "true"}}, 'fp16.enabled: "true" is a string; expected true or false'),
        ({"fp16": {"hysteresis": 0}}, "fp16.hysteresis: 0 is out of range"),
        ({"fp16": {"loss_scale_window": 0}}, "fp16.loss_scale_window: 0 is out of range"),
        ({"fp16": {"initial_scale_power": 200}}, "fp16.initial_scale_power: 200 is out of range"),
        ({"fp16": {"min_loss_scale": 0}}, "fp16.min_loss_scale: 0 is out of range"),
        ({"fp16": {"loss_scale": 1e300}}, "fp16.loss_scale: 1e+300 is too large for fp32"),
        ({"gradient_clipping": -1}, "gradient_clipping: -1 is out of range"),
        ({"gradient_clipping": "1"}, 'gradient_clipping: "1" is a string'),
        (
            {"communication_data_type": "fp8"},
            'communication_data_type: "fp8" is not a choice; expected "fp32" or',
        ),
        ({"torch_autocast": {"dtype": "int8"}}, 'torch_autocast.dtype: "int8" is not a choice'),
        ({"steps_per_print": 0}, "steps_per_print: 0 is out of range"),
        ({"seed": -1}, "seed: -1 is out of range"),
        ({"seed": 2**63}, "seed: 9223372036854775808 is too large"),
        ({"communication_timeout": 0}, "communication_timeout: 0 is out of range"),
        ({"gradient_normalization": "samples"}, "gradient_normalization: "),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "fp16.enabled: true, but bf16.enabled is true",
        ),
        ({"bf16": {}, "bfloat16": {}}, 'bfloat16: this is another name of "bf16"'),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(keys, line):
    with pytest.raises(ConfigError) as caught:
        Config.load(minimal(**keys))
    assert f"  {line}" in str(caught.value)


@pytest.mark.parametrize(
    ("zero", "world", "line"),
    [
        (
            {"stage": 3, "mics_shard_size": 3},
            4,
            "mics_shard_size: 3 does not divide the world size 4; write 1 or 2 or 4",
        ),
        ({"stage": 3, "mics_shard_size": 0}, 4, "mics_shard_size: 0 is out of range"),
        ({"stage": 3, "mics_shard_size": -2}, 4, "mics_shard_size: -2 is out of range"),
        ({"stage": 0, "mics_shard_size": 2}, 4, "mics_shard_size: 2 ranks are to share"),
        ({"stage": 3, "zero_hpz_partition_size": 3}, 4, "zero_hpz_partition_size: 3 does not divide"),
        ({"stage": 3, "zero_hpz_partition_size": 0}, 4, "zero_hpz_partition_size: 0 is out of range"),
        (
            {"stage": 2, "zero_hpz_partition_size": 2},
            4,
            "zero_hpz_partition_size: 2 needs zero_optimization.stage 3",
        ),
        (
            {"stage": 3, "zero_hpz_partition_size": 2, "mics_shard_size": 2},
            4,
            "zero_hpz_partition_size: 2 cannot be combined with zero_optimization.mics_shard_size 2",
        ),
    ],
)
def test_hybrid_sharding_must_fit_the_ranks(zero, world, line):
    with pytest.raises(ConfigError) as caught:
        Config.load(minimal(zero_optimization=zero), world_size=world)
    assert f"zero_optimization.{line}" in str(caught.value)


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 3, "mics_shard_size": 2},
        {"stage": 1, "mics_shard_size": 4},
        {"stage": 0, "mics_shard_size": 1},
        {"stage": 3, "zero_hpz_partition_size": 2},
        {"stage": 0, "zero_hpz_partition_size": 1},
    ],
)
def test_hybrid_sharding_that_fits(zero):
    loaded = Config.load(minimal(zero_optimization=zero), world_size=4).zero_optimization
    assert all(getattr(loaded, name) == value for name, value in zero.items())


def test_a_wrong_stage_is_not_blamed_on_the_groups_too():
    with pytest.raises(ConfigError, match=r"^1 problem "):
        Config.load(minimal(zero_optimization={"stage": "3", "zero_hpz_partition_size": 2}), world_size=2)


def test_null_is_absent():
    nulls = dict.fromkeys(
        (
            "optimizer",
            "fp16",
            "zero_optimization",
            "seed",
            "gradient_clipping",
            "tensorboard",
            "train_batch_size",
        )
    )
    assert Config.load(minimal(**nulls)) == Config.load(minimal())
    zero = {"stage": None, "overlap_comm": None, "leaf_module": {"names": None}, "offload_param": None}
    assert Config.load(minimal(zero_optimization=zero)) == Config.load(minimal())


def test_older_spellings_are_read_and_said_so():
    with pytest.warns(UserWarning, match="zero_optimization: true is read as"):
        assert Config.load(minimal(zero_optimization=True)).zero_optimization.stage == 1
    with pytest.warns(UserWarning, match="old name of stage3_gather_16bit"):
        zero = {"stage3_gather_fp16_weights_on_model_save": True}
        loaded = Config.load(minimal(zero_optimization=zero)).zero_optimization
    assert loaded.stage3_gather_16bit_weights_on_model_save
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Config.load(minimal(zero_optimization=False)).zero_optimization.stage == 0
        assert Config.load(minimal(bfloat16={"enabled": True})).bf16.enabled
    both = {
        "stage3_gather_fp16_weights_on_model_save": True,
        "stage3_gather_16bit_weights_on_model_save": False,
    }
    with pytest.raises(ConfigError, match="says otherwise"):
        Config.load(minimal(zero_optimization=both))


@pytest.mark.parametrize("written", ["bf16", "BF16", "bfloat16"])
def test_names_of_dtypes(written):
    assert Config.load(minimal(torch_autocast={"dtype": written})).torch_autocast.dtype == "bfloat16"


def test_the_file_is_named_in_the_error(tmp_path):
    path = tmp_path / "my.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"^1 problem in .*my\.json:\n  train_batch_size: no batch size"):
        Config.load(path)


def test_reading_a_config_without_classes_needs_no_torch():
    code = (
        "import sys, shardwise.errors\n"
        "before = 'torch' in sys.modules\n"
        "from shardwise.config import Config\n"
        "Config.load({'train_batch_size': 8, 'zero_optimization': {'stage': 3}})\n"
        "assert ('torch' in sys.modules) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
