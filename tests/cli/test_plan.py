"""What a launch decides before it starts anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.plan import (
    LaunchPlan,
    available_cores,
    command_for,
    plan_hostfile,
    plan_nodes,
    threads_per_rank,
)
from shardwise.errors import ConfigError


def test_one_node_needs_nothing() -> None:
    assert plan_nodes(nproc=2) == LaunchPlan(nproc=2)


def test_several_nodes() -> None:
    plan = plan_nodes(nproc=8, nnodes="2", node_rank=1, rdzv_endpoint="node-a")
    assert (plan.min_nodes, plan.max_nodes, plan.node_rank) == (2, 2, 1)
    assert plan.rdzv_endpoint == "node-a:29500"
    elastic = plan_nodes(nproc=8, nnodes="1:4", rdzv_endpoint="node-a:1234")
    assert (elastic.min_nodes, elastic.max_nodes, elastic.rdzv_endpoint) == (1, 4, "node-a:1234")


@pytest.mark.parametrize(("given", "full"), [("[::1]:5", "[::1]:5"), ("[::1]", "[::1]:29500"), ("::1", "[::1]:29500")])
def test_an_ipv6_endpoint_keeps_its_colons(given: str, full: str) -> None:
    assert plan_nodes(nproc=1, nnodes="2", rdzv_endpoint=given).rdzv_endpoint == full


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nnodes": "two"}, "--nnodes two: expected a number"),
        ({"nnodes": "0"}, "--nnodes 0: expected a number"),
        ({"nnodes": "3:2"}, "--nnodes 3:2: expected a number"),
        ({"nnodes": "2"}, "add --rdzv-endpoint"),
        ({"nnodes": "1:2", "node_rank": 0, "rdzv_endpoint": "a"}, "elastic job"),
        ({"nnodes": "2", "node_rank": 2, "rdzv_endpoint": "a"}, "--node-rank 2: expected 0 to 1"),
        ({"nnodes": "2", "rdzv_endpoint": "a:http"}, "--rdzv-endpoint a:http: expected HOST:PORT"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_nodes(nproc=1, **options)


def test_a_hostfile_gives_nodes_ranks_and_the_meeting_place(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("node-a slots=4\nnode-b slots=2\n")
    plan, hosts = plan_hostfile(path, node_rank=1)
    assert plan == LaunchPlan(nproc=2, min_nodes=2, max_nodes=2, node_rank=1, rdzv_endpoint="node-a:29500")
    assert command_for(0, hosts, plan, ["train.py", "--lr", "1 e"]) == (
        "shardwise launch --nnodes 2 --node-rank 0 --nproc 4 --rdzv-endpoint node-a:29500 -- train.py --lr '1 e'"
    )
    assert command_for(0, hosts, plan, ["-m", "pkg.train"]).endswith("--rdzv-endpoint node-a:29500 -m pkg.train")
    with pytest.raises(ConfigError, match="nodes 0 to 1"):
        plan_hostfile(path, node_rank=2)


def test_a_hostfile_of_this_machine_alone_is_one_node(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("localhost slots=3\n")
    assert plan_hostfile(path)[0] == LaunchPlan(nproc=3)


def test_threads_are_the_cores_divided_by_the_ranks() -> None:
    cores = available_cores()
    assert threads_per_rank(2, {}) == max(1, cores // 2)
    assert threads_per_rank(10 * cores, {}) == 1
    assert threads_per_rank(1, {}) is None
    assert threads_per_rank(2, {"OMP_NUM_THREADS": "3"}) is None
