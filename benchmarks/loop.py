"""What an `Accelerator` adds to a bare torch loop: one process, a tiny model, where nothing else takes time.

    make bench-loop [ARGS="--rounds N --steps N --write"]

Three loops with the same model, data and optimizer take turns: bare torch, Hugging Face Accelerate, shardwise. In each
round the bare loop's time a step is taken from the others'; the ratio of what is left is formed within the round. Four
ways to write the loop are measured. --write puts the table into benchmarks/results/loop.md.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TARGET = 0.5


@dataclass(frozen=True)
class Way:
    """How the loop is written."""

    name: str
    accumulate: int = 0  # micro-batches of a window in `with accumulate`, or 0 for a loop without it
    clips: bool = False
    precision: str = "no"


WAYS = (
    Way("backward, step, schedule, zero_grad"),
    Way("the same in accumulate(), windows of 1", 1),
    Way("accumulate(), windows of 4, clipping", 4, True),
    Way("accumulate(), windows of 4, clipping, bf16", 4, True, "bf16"),
)


def parts(samples: int) -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = TensorDataset(torch.randn(samples, 8), torch.randn(samples, 1))
    return model, optimizer, schedule, DataLoader(data, batch_size=4)


def bare(way: Way, steps: int) -> Callable[[], float]:
    """The loop that one would write without a library. Gives the last loss."""
    model, optimizer, schedule, loader = parts(4 * steps)
    every = max(1, way.accumulate)

    def loop() -> float:
        for number, (x, y) in enumerate(loader, 1):
            if way.precision == "bf16":
                with torch.autocast("cpu", torch.bfloat16):
                    out = model(x)
                loss = nn.functional.mse_loss(out.float(), y)
            else:
                loss = nn.functional.mse_loss(model(x), y)
            (loss / every if every > 1 else loss).backward()
            if number % every == 0 or number == steps:
                if way.clips:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return float(loss.detach())

    return loop


def accelerated(library: ModuleType, way: Way, steps: int) -> Callable[[], float]:
    """The same by `Accelerator` of one of the libraries."""
    model, optimizer, schedule, loader = parts(4 * steps)
    accelerator = library.Accelerator(
        cpu=True, gradient_accumulation_steps=max(1, way.accumulate), mixed_precision=way.precision
    )
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        if way.clips and accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss

    def loop() -> float:
        for x, y in loader:
            if way.accumulate:
                with accelerator.accumulate(model):
                    loss = step(x, y)
            else:
                loss = step(x, y)
        return float(loss.detach())

    return loop


def measure(way: Way, rounds: int, steps: int) -> dict[str, Any]:
    if (Path(sys.prefix) / "peer").is_dir():
        sys.path.append(str(Path(sys.prefix) / "peer"))
    peer, ours = importlib.import_module("accelerate"), importlib.import_module("shardwise")
    importlib.import_module("accelerate.state").AcceleratorState._reset_state(True)
    loops = {"bare": bare(way, steps), "peer": accelerated(peer, way, steps), "ours": accelerated(ours, way, steps)}
    losses = {name: loop() for name, loop in loops.items()}  # also warms up
    times: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds):
        names = list(loops)
        for name in names[number % 3 :] + names[: number % 3]:
            started = time.perf_counter()
            loops[name]()
            times[name].append((time.perf_counter() - started) / steps * 1e6)
    added = {n: [t - b for t, b in zip(times[n], times["bare"], strict=True)] for n in ("peer", "ours")}
    ratios = [o / p for o, p in zip(added["ours"], added["peer"], strict=True)]
    return {
        "way": way.name,
        "bare": statistics.median(times["bare"]),
        "peer": statistics.median(added["peer"]),
        "ours": statistics.median(added["ours"]),
        "ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4),
        "losses": losses,
    }


def table(rows: list[dict[str, Any]], rounds: int, steps: int) -> str:
    theirs = importlib.import_module("accelerate").__version__
    lines = [
        "# What an Accelerator adds to a loop",
        "",
        f"- date: {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        f"- CPU: {psutil.cpu_count()} cores, load average at the start {os.getloadavg()[0]:.2f}",
        f"- Python {platform.python_version()}, torch {torch.__version__}, accelerate {theirs}, "
        f"shardwise {version('shardwise')}",
        f"- {rounds} rounds of {steps} steps, in turns; medians; command: `make bench-loop ARGS=--write`",
        "",
        "| loop | bare torch, µs a step | Accelerate adds | shardwise adds | ours / theirs (quartiles) | <= half |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        low, _, high = row["quartiles"]
        met = "yes" if row["ratio"] <= TARGET else "**NO**"
        lines.append(
            f"| {row['way']} | {row['bare']:.0f} | {row['peer']:.1f} | {row['ours']:.1f} | "
            f"{row['ratio']:.2f} ({low:.2f} - {high:.2f}) | {met} |"
        )
    same = all(len({round(v, 6) for v in row["losses"].values()}) == 1 for row in rows)
    lines += ["", f"The three loops end with the same loss: {'yes' if same else 'NO'}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    text = table([measure(way, args.rounds, args.steps) for way in WAYS], args.rounds, args.steps)
    print(text)
    if args.write:
        (Path(__file__).parent / "results" / "loop.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
