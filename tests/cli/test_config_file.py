"""The YAML of `--config_file`: what upstream's questionnaire writes is read, and nothing is ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise.cli import app, launch
from shardwise.cli.config_file import load, merge
from shardwise.cli.flags import Flags
from shardwise.cli.plan import LaunchPlan
from shardwise.cli.resolve import resolve
from shardwise.errors import ConfigError

# As the questionnaire of Accelerate 1.x leaves it for two machines.
TWO_MACHINES = """
compute_environment: LOCAL_MACHINE
debug: true
distributed_type: MULTI_CPU
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config: {}
ipex_config:
  ipex: false
main_process_ip: node-a
main_process_port: 29501
main_training_function: main
machine_rank: 1
megatron_lm_config: {}
mixed_precision: bf16
mpirun_config: {}
num_machines: 2
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""
DEEPSPEED = """
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: none
  offload_optimizer_nvme_path: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: default
  dynamo_use_dynamic: false
mixed_precision: no
num_processes: -1
gpu_ids: 0
"""


def read(folder: Path, text: str, name: str = "run.yaml", **typed: Any) -> LaunchPlan:
    (folder / name).write_text(text)
    return resolve(merge(Flags(**typed), load(folder / name)), lambda: 1).plan


def test_two_machines_are_two(tmp_path: Path) -> None:
    plan = read(tmp_path, TWO_MACHINES)
    assert (plan.nproc, plan.max_nodes, plan.node_rank, plan.rdzv_endpoint) == (2, 2, 1, "node-a:29501")
    assert plan.environment == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_DEBUG_MODE": "true",
        "CUDA_VISIBLE_DEVICES": "",
    }


def test_deepspeed_and_words_that_yaml_reads_as_something_else(tmp_path: Path) -> None:
    plan = read(tmp_path, DEEPSPEED)
    assert plan.nproc == 1
    assert plan.environment == {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_DYNAMO_BACKEND": "inductor",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        "CUDA_VISIBLE_DEVICES": "0",
    }


def test_json_and_older_spellings(tmp_path: Path) -> None:
    content = {"distributed_type": "NO", "fp16": True, "dynamo_backend": "EAGER", "num_processes": 1}
    environment = read(tmp_path, json.dumps(content), "run.json").environment
    assert environment == {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_DYNAMO_BACKEND": "eager"}


def test_what_is_typed_wins(tmp_path: Path) -> None:
    plan = read(tmp_path, TWO_MACHINES, num_machines=1, num_processes=3, mixed_precision="no")
    assert (plan.nproc, plan.max_nodes, plan.node_rank) == (3, 1, 0)
    assert plan.environment["ACCELERATE_MIXED_PRECISION"] == "no"
    plan = read(tmp_path, TWO_MACHINES, nproc=1, node_rank=0, rdzv_endpoint="b:1")
    assert (plan.nproc, plan.max_nodes, plan.node_rank, plan.rdzv_endpoint) == (1, 2, 0, "b:1")
    assert read(tmp_path, DEEPSPEED, cpu=True).environment["CUDA_VISIBLE_DEVICES"] == ""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    assert (p := read(tmp_path, TWO_MACHINES, hostfile=hosts)).nproc == 2
    assert (p.max_nodes, p.rdzv_endpoint) == (1, None)
    (tmp_path / "ds.json").write_text("{}")
    told = read(tmp_path, DEEPSPEED, deepspeed_config_file=tmp_path / "ds.json").environment
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE" not in told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_procesess: 2", '^config file .*run.yaml: num_procesess: unknown key; did you mean "num_processes"'),
        ("deepspeed_config: {zero_stag: 2}", 'deepspeed_config.zero_stag: unknown key; did you mean "zero_stage"'),
        ("deepspeed_config: {train_batch_size: 64}", "train_batch_size: unknown key; it belongs in a ds_config: write"),
        ("deepspeed_config: {stage3_max_live_parameters: 1}", "parameters: unknown key; it belongs in a ds_config"),
        ("dynamo_config: {bakend: eager}", "dynamo_config.dynamo_bakend: unknown key; did you mean"),
        ("zero3_init_flag: true", "zero3_init_flag: unknown key; it belongs in deepspeed_config"),
        ("num_processes: two", "num_processes: 'two': "),
        ("num_processes: yes", "num_processes: True: .*not a boolean"),
        ("num_processes: 0", "num_processes: 0: "),
        ("mixed_precision: fp8", "mixed_precision: 'fp8': "),
        ("compute_environment: AMAZON_SAGEMAKER", "compute_environment: 'AMAZON_SAGEMAKER'"),
        ("distributed_type: FSDP", "distributed_type: FSDP: FSDP is not used here; write DEEPSPEED"),
        ("distributed_type: MULTI_NPU", "MULTI_NPU: the ranks run on CPUs or NVIDIA GPUs"),
        ("fsdp_config: {fsdp_version: 2}", "fsdp_config: FSDP is not used here"),
        ("enable_cpu_affinity: true", "enable_cpu_affinity: ranks are not bound"),
        ("deepspeed_config: {deepspeed_moe_layer_cls_names: A}", "deepspeed_config.deepspeed_moe_layer_cls_names: mix"),
        ("distributed_type: NO\ndeepspeed_config: {zero_stage: 2}", "needs distributed_type: DEEPSPEED, not NO"),
        (
            "deepspeed_config: {deepspeed_config_file: a, zero_stage: 2, gradient_clipping: 1}",
            "deepspeed_config_file already says zero_stage, gradient_clipping; remove them here",
        ),
        (
            "rdzv_backend: etcd\nuse_cpus: true",
            '(?s)run.yaml:\n  rdzv_backend.*\n  use_cpus: unknown key; did you mean "use_c',
        ),
        ("- 1", "expected keys and values, got list"),
        ("a: [", "not YAML"),
        ("a: !!python/object/apply:os.getcwd []", "not YAML"),
    ],
)
def test_every_problem_is_named_by_its_path(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load(tmp_path / "run.yaml")


def test_an_absent_file_points_to_what_writes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: .*`shardwise config` writes one"):
        load(tmp_path / "absent.yaml")


def test_the_default_file_is_read_where_it_exists_and_only_ours(
    no_settings: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate/default_config.yaml").write_text("num_processes: 7\n")
    monkeypatch.setattr(launch, "visible_gpus", lambda: 0)
    source, launched = launch.plan_launch(Flags())
    assert (source, launched.plan.nproc) == (None, 1)
    ours = no_settings / "shardwise" / "config.yaml"
    ours.parent.mkdir()
    ours.write_text("num_processes: 3\n")
    source, launched = launch.plan_launch(Flags())
    assert (source, launched.plan.nproc) == (ours, 3)
    assert launch.summary(launched.plan, 0, source=source) == f"3 processes, CPU, settings from {ours}"


def test_a_wrong_file_ends_the_launch(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("num_machine: 2\n")
    done = CliRunner().invoke(app, ["launch", "--config-file", str(tmp_path / "run.yaml"), __file__])
    assert done.exit_code == 2
    assert 'num_machine: unknown key; did you mean "num_machines"?' in done.output
