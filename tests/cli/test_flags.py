"""What may be typed in front of the script, in which spelling, and what is said about the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli import app, launch
from shardwise.cli.flags import Flags
from shardwise.cli.plan import LaunchPlan
from shardwise.cli.refused import TABLE, close_option, refused
from tests.peer import alias

Started = list[tuple[LaunchPlan, list[str]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What would have been started."""
    calls: Started = []

    def note(plan: LaunchPlan, argv: list[str], **_: object) -> int:
        calls.append((plan, argv))
        return 0

    monkeypatch.setattr(launch, "launch", note)
    monkeypatch.setattr(launch, "visible_gpus", lambda: 0)
    return calls


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["launch", *arguments])
    # A usage error comes in a frame, and in lines.
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


def test_both_spellings_mean_the_same(started: Started) -> None:
    for line in (
        "--num_processes 4 --num_machines 2 --machine_rank 1 --main_process_ip h --num_cpu_threads_per_process 3",
        "--num-processes 4 --num-machines 2 --machine-rank 1 --main-process-ip h --num-cpu-threads-per-process 3",
        "--num_processes=4 --num-machines=2 --machine_rank=1 --main-process-ip=h --num_cpu_threads_per_process=3",
        "--nproc_per_node 2 --nnodes 2 --node_rank 1 --rdzv_endpoint h:29500 --num-cpu-threads-per-process 3",
    ):
        assert run(*line.split(), __file__)[0] == 0
    plans = [plan for plan, _ in started]
    assert plans == [plans[0]] * 4
    assert (plans[0].nproc, plans[0].max_nodes, plans[0].node_rank, plans[0].threads) == (2, 2, 1, 3)
    assert plans[0].rdzv_endpoint == "h:29500"


def test_every_flag_has_both_spellings_in_the_help() -> None:
    shown = CliRunner().invoke(app, ["launch", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for field in fields(Flags):
        assert f"--{field.name}" in shown
        assert f"--{field.name.replace('_', '-')}" in shown


def test_what_follows_the_script_is_the_script_s(started: Started) -> None:
    own = ["--num_processes", "9", "--num", "1", "--cpu", "--use_fsdp", "--nonsense", "-m", "--", "--help"]
    assert run("--cpu", __file__, *own)[0] == 0
    assert run("-m", "pkg.train", *own)[0] == 0
    assert run("--", __file__, *own)[0] == 0
    assert [argv for _, argv in started] == [[__file__, *own], ["-m", "pkg.train", *own], [__file__, *own]]
    assert [plan.nproc for plan, _ in started] == [1, 1, 1]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--num_proceses", "2"], "--num_proceses: no such option; did you mean --num_processes?"),
        (["--num-proc", "2"], "--num-proc: no such option; did you mean --num-processes?"),
        (["--nproc_per_nod=2"], "--nproc_per_nod: no such option; did you mean --nproc_per_node?"),
        (["--zebra"], "--zebra: no such option; shardwise launch --help lists them"),
        (["--cpu", "--use_fsdp"], "--use_fsdp: FSDP is not used here"),
        (["--num_processes", "2", "--fsdp-version", "2"], "--fsdp-version: FSDP is not used here"),
        (["--megatron_lm_tp_degree=2"], "--megatron_lm_tp_degree: Megatron-LM is not used here"),
        (["--parallelism_config_tp_size", "2"], "have not landed yet"),
        (["--tpu"], "--tpu: TPUs are not supported"),
        (["--aws_access_key_id", "x"], "Amazon SageMaker is not supported"),
        (["--fp8_backend", "te"], "fp8 has not landed yet"),
        (["--mpirun_hostfile", "x"], "MPI is not needed"),
        (["--tee", "3"], "passes through the launcher"),
        (["--mixed_precision", "fp8"], "(fp8 has not landed yet)"),
        (["--mixed_precision", "fp61"], "expected one of no, fp16, bf16"),
        (["--rdzv_backend", "etcd"], "expected one of static, c10d"),
        (["--deepspeed_multinode_launcher", "pdsh"], "expected one of standard"),
        (["--zero_stage", "4"], "'--zero_stage': "),
        (["--num_processes", "0"], "'--num_processes': "),
    ],
)
def test_what_is_not_understood_is_said_with_the_way_out(started: Started, typed: list[str], said: str) -> None:
    code, output = run(*typed, __file__)
    assert code == 2
    assert said in output
    assert not started


def test_options_of_upstream_s_launcher_are_known_or_refused() -> None:
    known = {field.name for field in fields(Flags)}
    names = """config_file quiet cpu multi_gpu tpu mixed_precision num_processes num_machines
        num_cpu_threads_per_process enable_cpu_affinity dynamo_backend dynamo_mode dynamo_use_fullgraph
        dynamo_use_dynamic
        dynamo_use_regional_compilation use_deepspeed use_fsdp use_parallelism_config use_megatron_lm gpu_ids
        same_network
        machine_rank main_process_ip main_process_port tee log_dir role rdzv_backend rdzv_conf max_restarts
        monitor_interval module no_python tpu_cluster no_tpu_cluster tpu_use_sudo vm env main_training_function
        downcast_bf16 deepspeed_config_file zero_stage offload_optimizer_device offload_param_device
        offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps gradient_clipping
        zero3_init_flag zero3_save_16bit_model deepspeed_hostfile deepspeed_exclusion_filter
        deepspeed_inclusion_filter deepspeed_multinode_launcher deepspeed_moe_layer_cls_names fsdp_version
        fsdp_offload_params fsdp_min_num_params fsdp_state_dict_type megatron_lm_tp_degree fp8_backend fp8_format
        aws_access_key_id aws_secret_access_key debug mpirun_hostfile parallelism_config_tp_size"""
    assert [name for name in names.split() if name not in known and refused(name) is None] == []


def test_the_installed_launcher_has_no_other_options() -> None:
    peer = alias.folder()
    if peer is None:
        pytest.skip("the peer is not installed")
    # In a process of its own: importing the peer leaves traces.
    listing = "from accelerate.commands.launch import launch_command_parser as p; import json; "
    listing += "print(json.dumps([n for a in p()._actions for n in a.option_strings]))"
    environment = {**os.environ, "PYTHONPATH": str(peer.parent)}
    done = subprocess.run([sys.executable, "-c", listing], env=environment, capture_output=True, text=True, check=True)
    known = {"h", "help", "q", "m", *(field.name for field in fields(Flags))}
    names = {name.lstrip("-").replace("-", "_") for name in json.loads(done.stdout.splitlines()[-1])}
    assert len(names) > 100
    assert {name for name in names - known if refused(name) is None} == set()


def test_no_option_is_both_known_and_refused() -> None:
    later = {"offload_optimizer_nvme_path", "offload_param_nvme_path"}  # "none" is accepted.
    assert {field.name for field in fields(Flags) if refused(field.name) is not None} == later
    assert all(row.why and row.names for row in TABLE)


def test_a_beginning_is_no_option_but_points_to_it() -> None:
    known = ["--num_processes", "--num_machines", "--cpu"]
    assert close_option("--num_p", known) == "; did you mean --num_processes?"
    assert close_option("--num-m", known) == "; did you mean --num-machines?"
    assert close_option("--zebra", known) == ""


def test_a_program_or_a_module_needs_no_file(started: Started, tmp_path: Path) -> None:
    assert run("--no_python", "sh", "-c", "true")[0] == 0
    assert run("--module", "pkg.train")[0] == 0
    assert "no such program: absent-program" in run("--no_python", "absent-program")[1]
    assert "drop one of them" in run("--no_python", "-m", "sh")[1]
    assert [plan.no_python for plan, _ in started] == [True, False]
