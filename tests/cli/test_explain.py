from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from shardwise.cli import app
from shardwise.cli.advice import GIB, Machine, advise
from shardwise.cli.model_facts import ModelFacts, read_model
from shardwise.config import Config
from shardwise.config.explain import explain
from shardwise.errors import ConfigError
from tests.config.configs import NAMES, WORLD_SIZE, real_config


def explained(tmp_path: Path, config: Any, *options: str) -> Any:
    path = tmp_path / "ds_config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return CliRunner().invoke(app, ["explain", str(path), *options])


CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "round_robin_gradients": True, "stage3_max_live_parameters": 10},
    "comet": {"api_key": "hush"},
}


def test_piped_it_is_a_plain_line_a_key_with_value_origin_state_and_effect(tmp_path: Path) -> None:
    result = explained(tmp_path, CONFIG, "--world-size", "4")
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    lines = {line.split()[0]: line.split(maxsplit=3) for line in result.output.splitlines()}
    assert lines["train_batch_size"][1:3] == ["16", "file"]
    assert lines["gradient_accumulation_steps"][1:3] == ["2", "derived"]
    assert lines["zero_optimization.stage"][3].startswith("honoured   optimizer state and gradients are sharded")
    assert lines["zero_optimization.overlap_comm"][1:3] == ["null", "default"]
    assert lines["zero_optimization.round_robin_gradients"][3] == "no effect  ranks own slices of equal size"
    assert lines["zero_optimization.stage3_max_live_parameters"][3].endswith("only at zero_optimization.stage 3")
    assert "offload_param" not in result.output
    assert "hush" not in result.output
    assert "offload_param.device" in explained(tmp_path, CONFIG, "--world-size", "4", "--all").output


def test_json_has_a_row_for_every_key(tmp_path: Path) -> None:
    result = explained(tmp_path, CONFIG, "--world-size", "4", "--json")
    told = json.loads(result.stdout)
    rows = {row["key"]: row for row in told["keys"]}
    assert rows["zero_optimization.stage"] == {
        "key": "zero_optimization.stage",
        "value": 2,
        "origin": "file",
        "state": "honoured",
        "line": "optimizer state and gradients are sharded; gradients are reduce-scattered every micro-step",
    }
    assert rows["zero_optimization.offload_param.device"]["state"] == "not yet"
    assert rows["sparse_attention.mode"]["state"] == "refused"
    assert any(line.startswith("gradient_clipping: absent") for line in told["warnings"])
    assert "hush" not in result.stdout


def test_every_error_is_listed_with_its_path_and_the_exit_code_is_1(tmp_path: Path) -> None:
    wrong = {**CONFIG, "optimiser": {}, "zero_optimization": {"stage": 5, "offload_param": {"device": "cpu"}}}
    result = explained(tmp_path, wrong, "--world-size", "4")
    assert result.exit_code == 1
    for line in ('optimiser: unknown key; did you mean "optimizer"?', "zero_optimization.stage: 5 is out of range"):
        assert line in result.stderr
    assert "zero_optimization.offload_param.device: " in result.stderr
    as_json = explained(tmp_path, wrong, "--world-size", "4", "--json")
    assert as_json.exit_code == 1
    paths = [error["path"] for error in json.loads(as_json.stdout)["errors"]]
    assert set(paths) == {"zero_optimization.offload_param.device", "optimiser", "zero_optimization.stage"}


@pytest.mark.parametrize("text", ["{", "[]", '{"train_batch_size": 1, "train_batch_size": 2}', ""])
def test_what_is_no_config_is_an_error(tmp_path: Path, text: str) -> None:
    result = explained(tmp_path, text)
    assert result.exit_code == 1
    assert "Traceback" not in result.output and "shardwise explain: " in result.stderr


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["explain", str(tmp_path / "none.json")])
    assert result.exit_code == 1 and "none.json" in result.stderr


AUTO = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
}


def test_auto_is_filled_from_the_model_and_from_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = tmp_path / "config.json"
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2}
    model.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}))
    result = explained(tmp_path, AUTO, "--model", str(model), "--auto", "optimizer.params.lr=3e-4", "--json")
    rows = {row["key"]: (row["value"], row["origin"]) for row in json.loads(result.stdout)["keys"]}
    assert rows["optimizer.params.lr"] == (3e-4, "auto")
    assert rows["zero_optimization.reduce_bucket_size"] == (64 * 64, "auto")
    assert rows["zero_optimization.stage3_param_persistence_threshold"] == (640, "auto")
    missing = explained(tmp_path, AUTO)
    assert missing.exit_code == 1 and 'optimizer.params.lr: "auto" was left without a value' in missing.stderr


def test_what_was_typed_and_fills_nothing_is_an_error(tmp_path: Path) -> None:
    for typed in ("optimizer.params.lrr=5", "seed=9"):
        result = explained(tmp_path, AUTO, "--auto", "optimizer.params.lr=1", "--auto", typed)
        assert result.exit_code == 1
        assert f"--auto {typed.split('=')[0]}: the file has no" in result.stderr


@pytest.mark.parametrize("memory", ["inf", "nan"])
def test_memory_is_a_number(tmp_path: Path, memory: str) -> None:
    result = explained(tmp_path, CONFIG, "--world-size", "4", "--memory", memory)
    assert (
        result.exit_code != 0 and "Traceback" not in result.output and not isinstance(result.exception, OverflowError)
    )


def test_any_text_can_be_shown(tmp_path: Path) -> None:
    strange = {"train_batch_size": 1, "csv_monitor": {"job_name": "\ud800 é"}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(strange))
    for options in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "shardwise.cli", "explain", str(path), *options],
            env=os.environ | {"PYTHONIOENCODING": "ascii"},
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0 and b"csv_monitor.job_name" in done.stdout, done.stderr


ROWS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"wall_clock_breakdown": True}, "steps_per_print", "honoured", "a log line every 10 steps"),
    ({"steps_per_print": 5, "log_level": "error"}, "steps_per_print", "honoured", "hidden by log_level error"),
    (
        {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}},
        "optimizer.params.adam_w_mode",
        "no effect",
        "write type Adam",
    ),
    (
        {"fp16": {"enabled": True}, "prescale_gradients": True, "gradient_predivide_factor": 4},
        "gradient_predivide_factor",
        "no effect",
        "only for fp16 gradients",
    ),
    (
        {"activation_checkpointing": {"enabled": False, "partition_activations": True}},
        "activation_checkpointing.partition_activations",
        "no effect",
        "only when blocks are checkpointed",
    ),
    (
        {"bf16": {"enabled": True}, "managed_gradient_accumulation": False},
        "data_types.grad_accum_dtype",
        "honoured",
        "add up in fp32",
    ),
    (
        {
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            "gradient_accumulation_steps": 2,
        },
        "data_types.grad_accum_dtype",
        "honoured",
        "add up in bf16",
    ),
    (
        {"zero_optimization": {"stage": 1, "reduce_scatter": False}},
        "zero_optimization.stage",
        "honoured",
        "all-reduced",
    ),
    ({"zero_optimization": {"stage": 3}, "sparse_gradients": True}, "sparse_gradients", "no effect", "below stage 3"),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": None}}},
        "scheduler.params.warmup_max_lr",
        "honoured",
        "ends at the optimizer's lr",
    ),
]


@pytest.mark.parametrize(("keys", "key", "state", "words"), ROWS)
def test_a_row_tells_what_happens_in_this_run(keys: dict[str, Any], key: str, state: str, words: str) -> None:
    config = Config.load({"train_micro_batch_size_per_gpu": 1, **keys}, world_size=2)
    row = next(row for row in explain(config) if row.key == key)
    assert row.state == state and words in row.line, row


def test_secrets_are_shown_nowhere() -> None:
    config = Config.load({"train_batch_size": 1, "comet": {"api_key": "hush"}})
    assert "hush" not in repr(config) and "hush" not in str(explain(config))
    with pytest.raises(ConfigError) as caught:
        Config.load({"train_batch_size": 1, "comet": {"api_key": ["hush"]}})
    assert "comet.api_key: a list; expected a string" in str(caught.value) and "hush" not in str(caught.value)


def test_the_size_of_a_model_is_read_from_its_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, str(tmp_path / "model.safetensors"))
    assert read_model(tmp_path / "model.safetensors").params == 17
    assert read_model(tmp_path) == ModelFacts("model.safetensors", 17)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}))
    assert read_model(index).params == 17


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.json", "{", "cannot be read as JSON"),
        ("x.json", "{}", "neither a Hugging Face config.json nor"),
        ("x.json", '{"model_type": "no-such-model"}', "transformers cannot build"),
        ("x.json", '{"model_type": "llama", "num_attention_heads": 0}', "transformers cannot build"),
        ("x.json", "[" * 100_000, "cannot be read as JSON"),
        ("x.json", "9" * 6000, "cannot be read as JSON"),
        ("x.safetensors", "no tensors", "cannot be read as safetensors"),
        ("gone.json", None, "no such file"),
    ],
)
def test_a_model_that_cannot_be_read_is_an_error(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    if "model_type" in (content or ""):
        pytest.importorskip("transformers")
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_model(tmp_path / name)
    result = explained(tmp_path, CONFIG, "--model", str(tmp_path / name))
    assert result.exit_code == 1 and "Traceback" not in result.output


# -- advice --

BIG, SMALL = ModelFacts("big", 70_000_000_000), ModelFacts("small", 100_000_000)


def advised(model: ModelFacts | None = None, machine: Machine | None = None, world_size: int = 8, **keys: Any) -> str:
    config = Config.load({"train_micro_batch_size_per_gpu": 1, **keys}, world_size=world_size)
    return "\n".join(advise(config, machine or Machine(), model))


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


@pytest.mark.parametrize(
    ("starts", "given", "without"),
    [
        ("fp16.enabled: bf16 needs no", {"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        (
            "bf16.enabled: this GPU has no",
            {"bf16": {"enabled": True}, "machine": Machine(bf16=False)},
            {"fp16": {"enabled": True}, "machine": Machine(bf16=False)},
        ),
        (
            "fp16.initial_scale_power: ",
            {"fp16": {"enabled": True, "initial_scale_power": 32}},
            {"fp16": {"enabled": True, "initial_scale_power": 16}},
        ),
        (
            "zero_optimization.stage: 3, but at stage 1",
            {"model": SMALL, **zero(stage=3)},
            {"model": BIG, **zero(stage=3)},
        ),
        ("zero_optimization.stage: 2 shards nothing", {"world_size": 1, **zero(stage=2)}, zero(stage=2)),
        (
            "zero_optimization.reduce_bucket_size: 500,000,000 elements is more than",
            {"model": SMALL, **zero(reduce_bucket_size=5e8)},
            {"model": BIG, **zero(reduce_bucket_size=5e8)},
        ),
        (
            "scheduler.params.warmup_max_lr: 0.001, its default, overrides optimizer.params.lr 0.0001",
            {
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000}},
            },
            {
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                "scheduler": {"type": "WarmupLR", "params": {}},
            },
        ),
        (
            "scheduler.params.warmup_max_lr: 5e-05 overrides optimizer.params.lr 0.001",
            {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-5}}},
            {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}},
        ),
        (
            "log_level: error hides",
            {"steps_per_print": 5, "log_level": "error"},
            {"steps_per_print": 5, "log_level": "info"},
        ),
        (
            "scheduler.params.warmup_num_steps: 1000 of 500",
            {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 500}}},
            {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 5000}}},
        ),
        ("gradient_clipping: absent", {}, {"gradient_clipping": 1.0}),
        ("gradient_clipping: absent", {}, {"optimizer": {"type": "Lamb", "params": {"max_grad_norm": 2.0}}}),
        ("gradient_clipping: 0 clips nothing", {"gradient_clipping": 0}, {"gradient_clipping": 1.0}),
        ("optimizer: absent", {}, {"optimizer": {"type": "AdamW"}}),
        ("steps_per_print: absent", {}, {"steps_per_print": 10}),
        (
            "gradient_accumulation_steps: stage 2 reduces in each of the 4",
            {"gradient_accumulation_steps": 4, **zero(stage=2)},
            {"gradient_accumulation_steps": 4, **zero(stage=1)},
        ),
        ("comet.api_key: ", {"comet": {"api_key": "x"}}, {"comet": {"enabled": False}}),
    ],
)
def test_advice_is_given_where_it_applies_and_only_there(
    starts: str, given: dict[str, Any], without: dict[str, Any]
) -> None:
    assert any(line.startswith(starts) for line in advised(**given).splitlines()), advised(**given)
    assert starts not in advised(**without)


def test_clipping_by_the_optimizer_is_derived(tmp_path: Path) -> None:
    lamb = {"type": "Lamb", "params": {"max_grad_norm": 2.0}}
    result = explained(tmp_path, {"train_batch_size": 1, "optimizer": lamb}, "--json")
    rows = {row["key"]: row for row in json.loads(result.stdout)["keys"]}
    assert (rows["gradient_clipping"]["value"], rows["gradient_clipping"]["origin"]) == (2.0, "derived")
    assert rows["optimizer.params.max_grad_norm"]["value"] == 2.0


def test_memory_decides_whether_stage_3_is_needed(tmp_path: Path) -> None:
    assert "80 GiB" in advised(SMALL, **zero(stage=3))
    assert "at stage 1" not in advised(SMALL, Machine(memory=GIB // 2, assumed=False), **zero(stage=3))


@pytest.mark.filterwarnings("ignore:zero_optimization.cpu_offload is the old name:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_real_config_is_explained(tmp_path: Path, name: str) -> None:
    result = explained(tmp_path, real_config(name), "--world-size", str(WORLD_SIZE), "--json")
    assert result.exit_code == 0, result.output
    rows = {row["key"]: row for row in json.loads(result.stdout)["keys"]}
    written = Config.load(real_config(name), world_size=WORLD_SIZE).written
    plain = {path.split("[")[0] for path in written if ".params." not in path or path.split("[")[0] in rows}
    shown = {path for path in plain if "cpu_offload" not in path and not path.startswith(("amp.", "msamp."))}
    assert shown <= set(rows), shown - set(rows)
    assert all(rows[path]["origin"] == "file" for path in shown)
