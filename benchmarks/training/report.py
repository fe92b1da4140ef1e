"""The tables: on the terminal, as markdown, and the raw numbers as JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from .driver import LOSS_STEPS, LOSS_TOLERANCE, Pair
from .figures import Spread, Target, comparisons, counted_bytes, ratio, targets, wire_bytes
from .spec import Workload

MB = 1e6
PACKAGES = ("shardwise", "torch", "deepspeed")


@dataclass
class Run:
    """Everything a report is made of.

    Attributes:
        pairs: the contenders that ran.
        workload, ranks, steps: what they ran; ``steps`` are those timed in a round.
        notes: what the reader must know: contenders left out, rounds not run, ...
        load: running processes when the run started (1-minute average).
        command: how to repeat it.
    """

    pairs: list[Pair]
    workload: Workload
    ranks: int
    steps: int
    notes: list[str] = field(default_factory=list)
    load: float = 0.0
    command: str = ""

    @property
    def targets(self) -> list[Target]:
        """The judged targets."""
        return targets(self.pairs, self.workload, self.ranks)


@dataclass(frozen=True)
class Sheet:
    """A table in no format yet."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def sheets(run: Run) -> list[Sheet]:
    """The tables of a run."""
    return [_overview(run), _ratios(run), _targets(run)]


def print_report(run: Run, console: Console) -> None:
    """Write the tables to the terminal."""
    for sheet in sheets(run):
        table = Table(title=sheet.title, title_justify="left")
        for i, column in enumerate(sheet.columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in sheet.rows:
            style = {"met": "green", "NOT met": "red"}.get(row[-1])
            table.add_row(*row, style=style)
        console.print(table)
    for note in [*_explanations(run), *run.notes]:
        console.print(f"- {note}", markup=False, highlight=False)


def write_report(run: Run, path: Path) -> None:
    """Write ``path`` (markdown) and, beside it, the raw numbers with the suffix ``.json``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_markdown(run), encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(_raw(run), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def hardware() -> dict[str, str]:
    """The machine and the versions."""
    found = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": f"{_cpu_model()}, {os.cpu_count()} cores",
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "system": f"{platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    except FileNotFoundError:
        names = []
    return names[0] if names else platform.processor() or "unknown"


def _overview(run: Run) -> Sheet:
    alone = next((p for p in run.pairs if p.contender.library == "compute"), None)
    rows = []
    for p in run.pairs:
        seconds = Spread.of([r.seconds for r in p.rounds.values()])
        tokens = run.ranks * run.workload.batch * run.workload.length / seconds.median
        over = None if alone is None or p is alone else ratio(p, alone).median - 1
        rows.append(
            [
                p.contender.label,
                f"{seconds.median:.3f} ({seconds.low:.3f} - {seconds.high:.3f})",
                f"{tokens:.0f}",
                "-" if over is None else f"{over:+.1%}",
                f"{p.peak / MB:.0f}",
                f"{max(s['imported']['now'] for s in p.started) / MB:.0f}",
                _mb(counted_bytes(p)),
                _mb(wire_bytes(p)),
            ]
        )
    columns = ["contender", "seconds a step (quartiles)", "tokens/s", "above compute alone"]
    columns += ["peak RSS, MB", "after imports, MB", "counted sent, MB", "on the wire, MB"]
    w = run.workload
    title = (
        f"{w.parameters / MB:.1f} M parameters, fp32, {run.ranks} ranks of {w.threads} thread(s), "
        f"{w.batch * w.length} tokens a rank and step"
    )
    return Sheet(title, columns, rows)


def _ratios(run: Run) -> Sheet:
    rows = [
        [
            c.ours.contender.label,
            c.peer.contender.label,
            f"{c.ratio.median:.3f}",
            f"{c.ratio.low:.3f} - {c.ratio.high:.3f}",
            str(len(c.ours.rounds)),
        ]
        for c in comparisons(run.pairs)
    ]
    return Sheet(
        "Time of the peer over time of shardwise, formed within each round",
        ["shardwise", "peer", "median", "quartiles", "rounds"],
        rows,
    )


def _targets(run: Run) -> Sheet:
    rows = [[t.what, t.value, t.target, "met" if t.met else "NOT met"] for t in run.targets]
    return Sheet("Targets", ["what", "value", "target", ""], rows)


def _mb(value: float | None) -> str:
    return "-" if value is None else f"{value / MB:.2f}"


def _explanations(run: Run) -> list[str]:
    w, ds = run.workload, run.workload.ds_config(3)["zero_optimization"]
    losses, spread = _losses(run)
    keys = ", ".join(f"{k} {v}" for k, v in ds.items() if k != "stage")
    return [
        f"Losses of the first steps on rank 0: {losses}. All contenders agree within {spread:.1e} on every rank (at "
        f"most {LOSS_TOLERANCE:g} allowed, {LOSS_STEPS} steps; the compute alone exchanges nothing: its first step).",
        f"All: the same model, seeds and data, fused AdamW, lr {w.lr:g}, "
        + (f"gradients clipped to {w.clip:g}." if w.clip else "no clipping.")
        + " shardwise and DeepSpeed read the same ds_config (torch_adam with fused), buckets at their defaults.",
        f"Stage 3: both with {keys}, so that they release each block after its forward and gather it again for its "
        "backward, as FSDP2 does with reshard_after_forward=True ('reshard' in the tables).",
        f"A step lasts from the first rank's start to the last rank's end. Each round times {run.steps} step(s) of "
        "each contender, one contender at a time, in a new order; ratios are formed within a round.",
        "Peak RSS is the larger of the ranks' since they started (VmHWM), shared libraries included. 'Counted' is what "
        "the library's own counters say that a rank sent in a step, 'on the wire' what the loopback interface carried, "
        "TCP headers included, over ranks and steps: the least of all rounds, for other programs only add to it.",
    ]


def _losses(run: Run) -> tuple[str, float]:
    joined = [p for p in run.pairs if p.contender.stage is not None] or run.pairs
    steps = min(LOSS_STEPS, *(len(p.losses[0]) for p in joined)) if joined else 0
    spread = 0.0
    for rank in range(run.ranks):
        for step in range(steps):
            found = [p.losses[rank][step] for p in (run.pairs if step == 0 else joined)]
            spread = max(spread, max(found) - min(found))
    return ", ".join(f"{joined[0].losses[0][s]:.5f}" for s in range(steps)), spread


def _markdown(run: Run) -> str:
    lines = ["# Training, side by side", ""]
    lines += [f"- {k}: {v}" for k, v in hardware().items()]
    lines += [f"- load average at the start: {run.load:.2f}", f"- command: `{run.command}`", ""]
    for sheet in sheets(run):
        lines += [f"## {sheet.title}", "", "| " + " | ".join(sheet.columns) + " |"]
        lines.append("|" + "|".join(["---"] + ["---:"] * (len(sheet.columns) - 1)) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in sheet.rows]
        lines.append("")
    lines += ["## Notes", ""]
    lines += [f"- {note}" for note in [*_explanations(run), *run.notes]]
    return "\n".join(lines) + "\n"


def _raw(run: Run) -> dict[str, Any]:
    return {
        "hardware": hardware(),
        "command": run.command,
        "load": run.load,
        "ranks": run.ranks,
        "steps_a_round": run.steps,
        "workload": run.workload.as_dict(),
        "parameters": run.workload.parameters,
        "notes": run.notes,
        "targets": [asdict(t) for t in run.targets],
        "contenders": {
            p.contender.name: {
                "started": p.started,
                "memory": p.memory,
                "losses": p.losses,
                "rounds": {i: asdict(r) for i, r in p.rounds.items()},
            }
            for p in run.pairs
        },
    }


def command_line() -> str:
    """The command as typed, without where the machine keeps things."""
    return " ".join(["python benchmarks/train.py", *sys.argv[1:]])
