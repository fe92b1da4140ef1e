"""What communication costs: counts, filters, lines, the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.config.sections import CommsLoggerSection
from shardwise.dist import Axis
from shardwise.meter import Meter
from shardwise.monitor import CommLog, comms
from tests.monitor.listening import Listening
from tests.ranks import RankPools
from tests.sharding.harness import At, adamw, built, config, mean_square
from tests.sharding.models import Stack

AXIS = Axis("shard", (0, 1), 0, None, None)  # type: ignore[arg-type]


def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("shardwise.meter.time.perf_counter", lambda: now[0])
    return now


def one_call(log: CommLog, now: list[float], op: str = "all_gather") -> None:
    """In flight for 3 s, of which 1 s is waited for."""
    note = log.issued(AXIS, op, "layers.0", 6_000_000)
    now[0] += 2
    log.waiting(note)
    now[0] += 1
    log.done(note)


def made(breakdown: bool = False, **section: Any) -> CommLog:
    return CommLog(CommsLoggerSection(**section), Meter(torch.device("cpu"), breakdown), speaks=True)


def test_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)
    log = made(enabled=True)
    with Listening() as said:
        one_call(log, now)
        one_call(log, now)
        log.close()
        log.close()
    cost = {"calls": 2, "bytes_sent": 12_000_000, "seconds_in_flight": 6.0, "seconds_waiting": 2.0}
    assert log.summary() == {"shard": {"all_gather": cost}}
    assert len(said) == 1, "the table, once"
    assert said[0].splitlines()[-1].split() == ["shard", "all_gather", "2", "11.44", "MiB", "6.000", "2.000", "2.0"]


@pytest.mark.parametrize(
    ("section", "counted"),
    [
        ({"prof_all": False, "prof_ops": ["all_gather_into_tensor", "barrier"]}, ["all_gather", "barrier"]),
        ({"prof_all": False, "prof_ops": ["all_reduce"]}, ["all_reduce"]),
        ({"prof_all": False}, []),
        ({"prof_ops": ["barrier"]}, ["all_gather", "all_reduce", "barrier", "one that comes later"]),
    ],
)
def test_the_collectives_that_are_asked_for(section: Any, counted: list[str]) -> None:
    log = made(enabled=True, **section)
    for op in ("all_gather", "all_reduce", "barrier", "one that comes later"):
        one_call(log, [0.0], op)
    assert sorted(log.summary().get("shard", {})) == counted
    log.say()
    log.close()


def test_an_unknown_collective_is_said() -> None:
    with Listening() as said:
        made(enabled=True, prof_all=False, prof_ops=["all_gahter"]).close()
    assert said[0].startswith("comms_logger.prof_ops: there is no collective 'all_gahter' here; there are all_gather,")


@pytest.mark.parametrize(("debug", "what"), [(False, "all_gather"), (True, "all_gather of layers.0")])
def test_a_line_for_each(debug: bool, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)
    log = made(enabled=True, verbose=True, debug=debug)
    with Listening() as said:
        one_call(log, now)
        line = f"{what} on axis shard | 5.72 MiB | 3000.000 ms in flight | 1000.000 ms waiting | 2.0 MB/s"
        assert list(said) == [line]
        log.close()


def test_the_breakdown_counts_without_the_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)
    log = made(breakdown=True)
    with Listening() as said:
        one_call(log, now)
        log.close()
        assert log._meter.read().spent == {"communication": 1.0} and not log.costs and not said
        assert comms.summary_of(log) == {} and "comms_logger.enabled is false" in said[0]


def engine(stage: str, **keys: Any) -> Any:
    model = built(Stack)
    return shardwise.initialize(model=model, optimizer=adamw(model.parameters()), config=config(stage, **keys))[0]


def step(engine: Any) -> None:
    engine.backward(mean_square(engine, At(0, 0, dist.get_rank())))
    engine.step()


def logged(stage: str) -> dict[str, int]:
    """All that is sent is logged, and on one rank the table is printed."""
    with Listening() as said:
        trained = engine(stage, comms_logger={"enabled": True})
        before = {op: (t.calls, t.bytes_sent) for op, t in trained.mesh.world.traffic.items()}
        step(trained)
        summary = trained.log_comm_summary()["world"]
        sent = sum(t.bytes_sent - before.get(op, (0, 0))[1] for op, t in trained.mesh.world.traffic.items())
        assert sum(cost["bytes_sent"] for cost in summary.values()) == sent > 0
        assert all(cost["seconds_in_flight"] >= cost["seconds_waiting"] >= 0 for cost in summary.values())
        trained.destroy()
        assert (dist.get_rank() == 0) == any("Communication of rank 0" in line for line in said)
    return {op: int(cost["calls"]) for op, cost in summary.items()}


@pytest.mark.parametrize(
    ("stage", "used"), [("0", "all_reduce"), ("1", "reduce_scatter"), ("2", "reduce_scatter"), ("3", "all_gather")]
)
def test_everything_is_logged(ranks: RankPools, stage: str, used: str) -> None:
    first, second = ranks(2).run(logged, stage)
    assert first == second and first[used] > 0 and first["small"] == 1
    if stage == "0":
        assert not {"reduce_scatter", "all_gather"} & set(first), "not the two halves of which it is made"


def off(stage: str) -> None:
    """Upstream #2861: the section, switched off, is as if it were absent."""
    without, with_section = engine(stage), engine(stage, comms_logger={"enabled": False, "verbose": True})
    try:
        for trained in (without, with_section):
            assert all(axis.observer is None for axis in trained.mesh.axes()) and trained._journal.comms is None
            step(trained)
        assert with_section._sharded.reducer._in_flight_limit == without._sharded.reducer._in_flight_limit
        first, second = (
            [(axis.name, op, t.calls, t.bytes_sent) for axis in e.mesh.axes() for op, t in axis.traffic.items()]
            for e in (without, with_section)
        )
        assert first == second
        a, b = without.module_state_dict(), with_section.module_state_dict()
        assert all(torch.equal(a[name], b[name]) for name in a)
    finally:
        without.destroy()
        with_section.destroy()


@pytest.mark.parametrize("stage", ["2", "3"])
def test_switched_off_it_changes_nothing(ranks: RankPools, stage: str) -> None:
    ranks(2).run(off, stage)
