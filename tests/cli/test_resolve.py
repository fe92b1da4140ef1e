"""From flags to a plan: how many ranks, where they meet, what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.flags import Flags
from shardwise.cli.launch import summary
from shardwise.cli.plan import LaunchPlan
from shardwise.cli.resolve import resolve
from shardwise.errors import ConfigError, NotYetSupported


def plan(gpus: int = 0, **flags: Any) -> LaunchPlan:
    return resolve(Flags(**flags), lambda: gpus).plan


def test_the_number_of_ranks() -> None:
    assert plan().nproc == 1
    assert plan(gpus=4).nproc == 4
    assert plan(gpus=4, num_processes=2).nproc == 2
    assert plan(gpus=4, gpu_ids="1, 3").nproc == 2
    assert plan(gpus=4, gpu_ids="all").nproc == 4
    assert plan(num_processes=8, num_machines=2, main_process_ip="a").nproc == 4
    assert plan(nproc=3, num_machines=2, main_process_ip="a").nproc == 3


def test_the_cpu_means_the_cpu_and_as_many_as_asked_for() -> None:
    for name in ("cpu", "use_cpu"):
        found = plan(gpus=4, **{name: True}, num_processes=2)
        assert found.nproc == 2
        assert found.environment == {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    assert plan(gpus=4, cpu=True).nproc == 1


def test_where_nodes_meet() -> None:
    two = plan(num_machines=2, num_processes=2, machine_rank=1, main_process_ip="node-a", main_process_port=1234)
    assert (two.nproc, two.max_nodes, two.node_rank, two.rdzv_endpoint) == (1, 2, 1, "node-a:1234")
    assert plan(num_machines=2, main_process_ip="::1").rdzv_endpoint == "[::1]:29500"
    arriving = plan(num_machines=2, machine_rank=1, main_process_ip="node-a", rdzv_backend="c10d")
    assert arriving.node_rank is None
    assert plan(main_process_port=0) == plan()
    chosen = plan(main_process_port=1234)
    assert (chosen.rdzv_endpoint, chosen.node_rank) == ("127.0.0.1:1234", 0)


def test_a_hostfile_with_a_port(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node-a slots=4\nnode-b slots=2\n")
    found = plan(deepspeed_hostfile=hosts, machine_rank=1, main_process_port=1234)
    assert (found.nproc, found.max_nodes, found.node_rank, found.rdzv_endpoint) == (2, 2, 1, "node-a:1234")


def test_what_the_ranks_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text("{}")
    told = plan(
        mixed_precision="bf16",
        gradient_accumulation_steps=4,
        gpu_ids="1",
        use_deepspeed=True,
        deepspeed_config_file=Path("ds.json"),
        gradient_clipping=0.5,
        zero3_init_flag="false",
        zero3_save_16bit_model="true",
        offload_optimizer_device="none",
        dynamo_backend="inductor",
        dynamo_mode="default",
        num_cpu_threads_per_process=2,
        monitor_interval=0.5,
    )
    assert told.environment == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json"),
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        "ACCELERATE_DYNAMO_BACKEND": "inductor",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    assert (told.threads, told.monitor_interval) == (2, 0.5)
    assert plan().environment == {}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"nproc": 1, "num_processes": 2}, "--nproc 1 and --num_processes 2: give one of them"),
        ({"nnodes": "2", "num_machines": 2}, "give one of them"),
        ({"rdzv_endpoint": "a:1", "main_process_ip": "a"}, "give one of them"),
        ({"cpu": True, "gpu_ids": "0"}, "--cpu and --gpu_ids"),
        ({"use_cpu": True, "multi_gpu": True}, "--cpu and --multi_gpu"),
        ({"gpu_ids": "0,a"}, "--gpu_ids 0,a: expected numbers"),
        ({"gpu_ids": "0,0"}, "a GPU is named twice"),
        ({"zero_stage": 2}, "--zero_stage 2: has an effect with --use_deepspeed only"),
        ({"gradient_clipping": 1.0}, "with --use_deepspeed only"),
        ({"use_deepspeed": True, "deepspeed_config_file": Path("absent.json")}, "no such file: absent.json"),
        ({"num_machines": 2}, "--num_machines 2: the nodes need a place to meet; add --main_process_ip"),
        ({"num_machines": 2, "main_process_ip": "a", "main_process_port": 0}, "a free port is for one node"),
        ({"num_machines": 2, "main_process_ip": "a", "machine_rank": 2}, "--machine_rank 2: expected 0 to 1"),
        ({"num_machines": 2, "main_process_ip": "a", "rdzv_backend": "static"}, "add --machine_rank"),
        ({"num_machines": 2, "main_process_ip": "a", "num_processes": 3}, "2 nodes cannot share evenly"),
        ({"nnodes": "1:2", "rdzv_endpoint": "a", "num_processes": 2}, "give the ranks of a node: --nproc"),
        ({"hostfile": Path("h"), "rdzv_backend": "c10d"}, "the hostfile numbers the nodes"),
        ({"hostfile": Path("h"), "num_processes": 2}, "drop --num_processes or --hostfile"),
    ],
)
def test_flags_that_do_not_fit(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(**flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"offload_optimizer_device": "cpu"},
        {"offload_param_device": "nvme"},
        {"offload_param_nvme_path": "/tmp"},
        {"dynamo_use_fullgraph": True},
        {"dynamo_mode": "max-autotune"},
    ],
)
def test_what_has_not_landed_is_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(NotYetSupported, match=f"--{next(iter(flags))}"):
        plan(**flags)


def test_what_has_no_effect_is_said() -> None:
    notes = resolve(Flags(multi_gpu=True, same_network=True, main_training_function="main"), lambda: 2).notes
    assert [note.split()[0] for note in notes] == ["--multi_gpu", "--same_network", "--main_training_function"]
    assert all("has no effect" in note for note in notes)
    assert resolve(Flags(num_processes=2), lambda: 2).notes == ()


@pytest.mark.parametrize(
    ("given", "gpus", "line"),
    [
        (LaunchPlan(1), 0, "1 process, CPU"),
        (LaunchPlan(2), 2, "2 processes, 2 GPUs"),
        (LaunchPlan(2, threads=4), 0, "2 processes, CPU, OMP_NUM_THREADS=4 for each"),
        (LaunchPlan(2, 1, 4), 2, "2 processes on this node of 1 to 4, 2 GPUs"),
        (LaunchPlan(1, environment={"CUDA_VISIBLE_DEVICES": "3"}), 1, "1 process, 1 GPU (3)"),
        (LaunchPlan(1, environment={"ACCELERATE_MIXED_PRECISION": "no"}), 0, "1 process, CPU, no mixed precision"),
        (
            LaunchPlan(1, environment={"ACCELERATE_USE_DEEPSPEED": "true"}),
            0,
            "1 process, CPU, ZeRO stage 2 (not given)",
        ),
        (
            LaunchPlan(
                1, environment={"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "/a/ds.json"}
            ),
            0,
            "1 process, CPU, ZeRO by /a/ds.json",
        ),
    ],
)
def test_the_line_that_says_what_is_started(given: LaunchPlan, gpus: int, line: str) -> None:
    assert summary(given, gpus) == line
