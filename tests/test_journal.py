"""What an engine says and records, in runs."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise import ConfigError, Engine
from shardwise.meter import Meter
from tests.monitor.listening import Listening
from tests.ranks import RankPools
from tests.sharding.harness import SAMPLES, STAGES, At, adamw, built, config, mean_square, rank_and_size
from tests.sharding.models import Stack

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}}


def started(stage: str = "1", *, gas: int = 1, **keys: Any) -> Engine:
    keys = {"optimizer": ADAMW, **keys}
    return shardwise.initialize(model=built(Stack), config=config(stage, gas=gas, **keys))[0]


def window(engine: Engine, step: int, **backward: Any) -> list[float]:
    """One step on this rank; its losses."""
    losses = []
    for micro in range(engine.gradient_accumulation_steps()):
        loss = mean_square(engine, At(step, micro, rank_and_size()[0]))
        losses.append(loss.item())
        engine.backward(loss, **backward)
        engine.step()
    return losses


def column(folder: str, name: str) -> list[tuple[int, float]]:
    with open(Path(folder) / f"Train_Samples_{name}.csv", newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["step", name]
    return [(int(step), float(value)) for step, value in rows]


def recorded(stage: str, folder: str, deferred: bool = False) -> tuple[list[Any], list[Any]]:
    """A run of 13 steps with files; its losses and what the engine said of each step."""
    keys: dict[str, Any] = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}
    engine = started(stage, gas=2, scheduler=WARMUP, gradient_clipping=0.05, **keys)
    if deferred:
        # As on a GPU: how the step went is learnt when the next one begins.
        take = engine._take_step

        def left_open(optimizer: Any) -> Any:
            outcome = take(optimizer)
            outcome.deferred = True
            return outcome

        engine._take_step = left_open  # type: ignore[method-assign]
    losses, facts = [], []
    for step in range(13):
        small = engine.mesh.world.traffic["small"].calls
        losses.append(window(engine, step))
        assert engine.mesh.world.traffic["small"].calls - small == (engine.world_size > 1), "one for everything"
        if not deferred:
            facts.append((engine.global_samples, engine.get_global_grad_norm(), engine.get_lr()[0]))
    engine.destroy()
    return losses, facts


@pytest.mark.parametrize("stage", STAGES)
def test_files_hold_what_happened(ranks: RankPools, tmp_path: Path, stage: str) -> None:
    (first, facts), (second, _) = ranks(2).run(recorded, stage, str(tmp_path))
    job = str(tmp_path / "job")
    means = [sum(a + b) / 4 for a, b in zip(first, second, strict=True)]
    samples = [4 * SAMPLES * (i + 1) for i in range(13)]
    loss = column(job, "train_loss")
    assert [x for x, _ in loss] == samples
    assert [y for _, y in loss] == pytest.approx(means, rel=1e-12)
    # The norm before clipping, at every stage (upstream's is None at stage 0).
    assert column(job, "grad_norm") == [(x, norm) for x, norm, _ in facts] and facts[0][1] > 0.05
    assert column(job, "lr") == [(x, lr) for x, _, lr in facts]
    assert [x for x, _ in column(job, "samples_per_second")] == [samples[9]]
    assert all(y > 0 for name in ("samples_per_second", "memory_gib") for _, y in column(job, name))
    config = json.loads((tmp_path / "job" / "config.json").read_text())
    assert config["world_size"] == 2 and config["optimizer"]["params"]["lr"] == 0.01
    assert not (tmp_path / "job" / "Train_Samples_loss_scale.csv").exists()


def test_steps_that_are_settled_later_are_recorded_alike(ranks: RankPools, tmp_path: Path) -> None:
    ranks(1).run(recorded, "1", str(tmp_path / "now"))
    ranks(1).run(recorded, "1", str(tmp_path / "later"), True)
    for name in ("train_loss", "grad_norm", "lr"):
        now, later = (column(str(tmp_path / when / "job"), name) for when in ("now", "later"))
        assert later == now and len(now) == 13


def half(folder: str) -> float:
    fp16 = {"enabled": True, "initial_scale_power": 4}
    keys: dict[str, Any] = {"csv_monitor": {"enabled": True, "output_path": folder}, "fp16": fp16}
    engine, *_ = shardwise.initialize(model=nn.Linear(8, 2), config=config("0", optimizer=ADAMW, **keys))
    engine.backward(engine(torch.ones(2, 8, dtype=torch.float16)).float().square().mean())
    engine.step()
    engine.monitor.write_events([("Eval/loss", 0.5, engine.global_samples)])
    scale = engine.loss_scale
    engine.destroy()
    return scale


def test_the_loss_scale_and_values_of_the_script(ranks: RankPools, tmp_path: Path) -> None:
    (scale,) = ranks(1).run(half, str(tmp_path))
    job = tmp_path / "DeepSpeedJobName"
    assert column(str(job), "loss_scale") == [(2, scale)] and scale == 16.0
    assert (job / "Eval_loss.csv").read_text() == "step,loss\n2,0.5\n"


SCRIPT = """
    import sys, torch, shardwise
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "csv_monitor": {"enabled": True, "output_path": sys.argv[1], "job_name": "job"},
        "comms_logger": {"enabled": True},
    }
    engine, *_ = shardwise.initialize(model=torch.nn.Linear(4, 1), config=config)
    for step in range(13):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
    raise RuntimeError("the script ends here")
"""


def test_nothing_is_lost_when_the_script_raises(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)]
    alone = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=alone, timeout=60)
    assert done.returncode == 1 and "RuntimeError: the script ends here" in done.stderr
    assert [x for x, _ in column(str(tmp_path / "job"), "train_loss")] == [2 * i for i in range(1, 14)]
    assert "communication: there was none" in done.stderr


def lines(stage: str) -> list[str]:
    """A run with a line a step."""
    with Listening() as said:
        engine = started(stage, steps_per_print=1, gradient_clipping=0.25)
        for step in range(3):
            window(engine, step)
        engine.destroy()
    return [line for line in said if line.startswith("step ")]


@pytest.mark.parametrize("stage", STAGES)
def test_a_line_says_whether_the_norm_was_clipped(ranks: RankPools, stage: str) -> None:
    first, second = ranks(2).run(lines, stage)
    assert len(first) == 3 and second == []
    for i, line in enumerate(first, 1):
        found = re.fullmatch(
            rf"step {i} \| loss \d\.\d{{4}} \| norm (\d\.\d{{3}})( \(clipped to 0\.25\))? \| lr 0\.01 \| "
            r"[\d,.]+ samples/s \| [\d,]+ ms/step \| mem \d+\.\d\d GiB",
            line,
        )
        assert found is not None, line
        assert (float(found[1]) > 0.25) == (found[2] is not None), line
    assert any("clipped" in line for line in first)


def throughput() -> dict[str, str]:
    found = {}
    waited: list[bool] = []
    read = Meter.read

    def watched(self: Meter, *, wait: bool = False) -> Any:
        waited.append(wait)
        return read(self, wait=wait)

    sections: dict[str, Any] = {
        "default": {},
        "off": {"enabled": False},
        "not synchronized": {"synchronized": False},
    }
    Meter.read = watched  # type: ignore[method-assign]
    try:
        for name, section in sections.items():
            with Listening() as said:
                engine = started(steps_per_print=2, timers={"throughput": section})
                waited.clear()
                for step in range(2):
                    window(engine, step, tokens=100)
                found[name] = f"{said[-1]} waited {waited}"
                engine.destroy()
    finally:
        Meter.read = read  # type: ignore[method-assign]
    return found


def test_throughput(ranks: RankPools) -> None:
    (found,) = ranks(1).run(throughput)
    assert re.search(r"\| [\d,]+ tokens/s \|.* waited \[True\]", found["default"])
    assert "tokens/s" not in found["off"] and "samples/s" not in found["off"]
    assert "ms/step" in found["off"] and found["off"].endswith("waited [False]")
    assert "tokens/s" in found["not synchronized"] and found["not synchronized"].endswith("waited [False]")


def breakdown(folder: str, **keys: Any) -> list[str]:
    with Listening() as said:
        keys["csv_monitor"] = {"enabled": True, "output_path": folder, "job_name": "job"}
        engine = started("3", gas=2, wall_clock_breakdown=True, **keys)
        for step in range(10):
            window(engine, step)
            with torch.no_grad():
                engine(At(step, 0, 0).x)
        engine.destroy()
    return [line for line in said if line.startswith("step ")]


def test_wall_clock_breakdown(ranks: RankPools, tmp_path: Path) -> None:
    first, second = ranks(2).run(breakdown, str(tmp_path))
    assert second == [] and len(first) == 1, "a line every ten steps, though steps_per_print is absent"
    end = r"\| forward (\d+) ms \| backward (\d+) ms \| step (\d+) ms \| evaluation (\d+) ms"
    assert re.search(end + r" \| of which waiting for communication (\d+) ms$", first[0]), first[0]
    spent = {
        name: column(str(tmp_path / "job"), f"elapsed_time_ms_{name}")[0][1]
        for name in ("forward", "backward", "step", "evaluation", "communication")
    }
    assert all(value > 0 for value in spent.values())
    assert spent["communication"] < sum(spent.values()) - spent["communication"]


def memory(stage: str) -> list[str]:
    with Listening() as said:
        engine = started(stage, memory_breakdown=True)
        for step in range(2):
            window(engine, step)
        report = engine.memory_report()
        engine.destroy()
    assert report["parameters"] > 1024 or said
    return [line for line in said if line.startswith("memory after ")]


def test_memory_breakdown(ranks: RankPools) -> None:
    first, second = ranks(2).run(memory, "2")
    assert second == [] and [line.split()[2] for line in first] == ["initialize", "forward", "backward", "step"]
    sizes = [dict(re.findall(r"(\w+) +([\d.,]+ [KMG]?i?B)", line)) for line in first]
    assert list(sizes[0]) == ["parameters", "gradients", "optimizer", "rest", "process", "peak"]
    assert [s["gradients"] == "0 B" for s in sizes] == [True, True, False, True]
    assert [s["optimizer"] == "0 B" for s in sizes] == [True, True, True, False]
    assert len({s["parameters"] for s in sizes}) == 1


def dumped() -> list[str]:
    with Listening() as said:
        engine = started("3", dump_state=True, comet={"api_key": "geheim"}, scheduler=WARMUP)
        engine.destroy()
    return [line for line in said if line.startswith("state of the engine")]


def test_dump_state(ranks: RankPools) -> None:
    first, second = ranks(2).run(dumped)
    assert second == [] and len(first) == 1
    rows = [line.split() for line in first[0].splitlines()]
    assert ["model", "Stack"] in rows and ["ZeRO", "stage", "3"] in rows and ["optimizer", "AdamW"] in rows
    assert ["zero_optimization.stage", "3"] in rows and ["optimizer.params.lr", "0.01"] in rows
    assert ["comet.api_key", "***"] in rows and "geheim" not in first[0] and "\x1b" not in first[0]
    assert any(row[:2] == ["0", "first"] or (row and row[0] == "0" and "float64" in row) for row in rows), "the units"


LOUD: dict[str, Any] = {
    "steps_per_print": 1,
    "dump_state": True,
    "memory_breakdown": True,
    "bf16": {"enabled": False, "immediate_grad_update": True},
    "zero_force_ds_cpu_optimizer": False,
}


def quiet(level: str | None) -> tuple[list[str], bool]:
    logger = logging.getLogger("shardwise")
    with Listening() as said:
        engine = started(**LOUD, **({} if level is None else {"log_level": level}))
        window(engine, 0)
        silent = not said
        logger.error("an error is heard")
        engine.destroy()
        assert logger.level == logging.INFO, "put back"
    return list(said), silent


def test_the_start_can_be_silent(ranks: RankPools) -> None:
    """Upstream #2005."""
    for level in ("warning", "error"):
        assert ranks(1).run(quiet, level) == [(["an error is heard"], True)]
    ((said, silent),) = ranks(1).run(quiet, None)
    assert len(said) >= 6 and not silent


def refused() -> None:
    model = nn.Linear(2, 2)
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        with pytest.raises(ConfigError, match=r"wandb\.enabled: true needs the package(.|\n)*pip install wandb"):
            shardwise.initialize(
                model=model, config=config("3", optimizer=ADAMW, wandb={"enabled": True}, log_level="error")
            )
    finally:
        del sys.modules["wandb"]
    assert logging.getLogger("shardwise").level == logging.INFO
    assert model.weight.numel() == 4 and not model._forward_pre_hooks


def test_a_missing_package_is_said_at_initialize(ranks: RankPools) -> None:
    ranks(2).run(refused)


def cannot_write(path: str) -> str:
    model = nn.Linear(2, 2).double()
    keys: dict[str, Any] = {"csv_monitor": {"enabled": True, "output_path": path}}
    with pytest.raises(ConfigError) as error:
        shardwise.initialize(model=model, config=config("3", optimizer=ADAMW, **keys))
    assert not model._forward_pre_hooks and model.weight.isfinite().all(), "an ordinary model again"
    adamw(model.parameters()).step()
    return str(error.value)


def test_a_tracker_that_cannot_start_stops_all_ranks(ranks: RankPools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = ranks(2).run(cannot_write, str(tmp_path / "file"))
    assert first.startswith("csv_monitor.output_path: cannot write to")
    assert second == f"rank 0 could not start a tracker: {first}"
