"""Training speed, memory and traffic of shardwise beside DeepSpeed, FSDP2, DDP and the compute alone.

    python benchmarks/train.py            about 9 minutes on 2 cores; writes benchmarks/results/train.md and .json
    python benchmarks/train.py --quick    a tiny model, to see that everything runs; writes nothing

Every contender has processes of its own; those of two stages at a time, and of the compute alone, are alive together.
One contender computes at a time, round after round, in a new order each, so that a slow minute of the machine hits all
of them alike. Ratios are formed within a round.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from training.driver import BenchmarkError, Pair, check_losses, check_memory, order_of_round, stop, work_folder
from training.figures import wire_bytes
from training.report import Run, command_line, print_report, write_report
from training.spec import CONTENDERS, QUICK, Contender, Workload

RESULTS = Path(__file__).resolve().parent / "results" / "train.md"
FEWEST_ROUNDS = 3


def choose(names: str, notes: list[str]) -> list[Contender]:
    """The contenders that ``--contenders`` names (also by library, or by ``stage-N``), without what is missing."""
    wanted = [n for n in names.split(",") if n]
    chosen = [
        c for c in CONTENDERS if not wanted or {c.name, c.library, f"stage-{c.stage}"} & {n.strip() for n in wanted}
    ]
    known = {x for c in CONTENDERS for x in (c.name, c.library, f"stage-{c.stage}")} - {"stage-None"}
    unknown = [n for n in wanted if n.strip() not in known]
    if unknown:
        raise BenchmarkError(f"--contenders: {', '.join(unknown)} not known; there are {', '.join(sorted(known))}.")
    if importlib.util.find_spec("deepspeed") is None and any(c.library == "deepspeed" for c in chosen):
        chosen = [c for c in chosen if c.library != "deepspeed"]
        notes.append("DeepSpeed is not installed, so its rows are left out: `make bench` installs it.")
    return chosen


def fields(chosen: list[Contender], together: int) -> list[list[Contender]]:
    """Who is alive together: the contenders of ``together`` stages, so that all of them fit into memory."""
    stages = sorted({c.stage for c in chosen if c.stage is not None})
    cut = [stages[i : i + together] for i in range(0, len(stages), together)] or [[]]
    return [[c for c in chosen if c.stage in part] for part in cut]


class Race:
    """Starts the contenders, warms them up and times them, and shows how far it is.

    Args:
        run: what is run, and where everything found is kept.
        rounds: timed rounds of each field.
        warmup: steps of each contender before.
        bar: the progress bar.
    """

    def __init__(self, run: Run, rounds: int, warmup: int, bar: Progress) -> None:
        self.run, self.rounds, self.warmup, self.bar = run, rounds, warmup, bar
        self.chance = random.Random(0)
        self.number = 0
        self.task = bar.add_task("")

    def all_fields(self, chosen: list[Contender], together: int, minutes: float) -> None:
        """Time everything. The compute alone is alive throughout: it is compared with all. Ends all processes."""
        begun = time.monotonic()
        parts = fields(chosen, together)
        alone = [c for c in chosen if c.stage is None]
        timed = sum(len(part) + len(alone) for part in parts) * self.rounds * self.run.steps
        self.bar.update(self.task, total=timed + len(chosen) * (self.warmup + 2))
        with work_folder() as folder:
            base = self.start(alone, folder)
            try:
                for i, part in enumerate(parts):
                    field = self.start(part, folder)
                    self.take_rounds(base + field, begun + 60 * minutes * (i + 1) / len(parts))
                    stop(field)
            finally:
                stop(self.run.pairs)

    def start(self, contenders: list[Contender], folder: str) -> list[Pair]:
        """Start contenders one after the other, and let each take its first steps, which build caches and traces."""
        pairs = []
        for contender in contenders:
            self.show(f"starting {contender.label}")
            check_memory(self.run.pairs, self.run.ranks)
            try:
                pair = Pair.start(contender, self.run.workload, self.run.ranks, Path(folder))
            except BenchmarkError as error:
                # A peer that does not run here is a row less; shardwise must run.
                if contender.library == "shardwise":
                    raise
                self.run.notes.append(f"Left out: {error}")
                continue
            self.run.pairs.append(pair)
            pairs.append(pair)
            built, right = pair.started[0]["parameters"], self.run.workload.parameters
            if built != right:
                raise BenchmarkError(f"{contender.label}: the model has {built} parameters instead of {right}.")
            pair.run(self.warmup)
            check_losses(self.run.pairs)
            self.show(advance=self.warmup + 2)
        return pairs

    def take_rounds(self, pairs: list[Pair], deadline: float) -> None:
        """The timed rounds of a field; fewer than asked for if they would not end in time."""
        for done in range(1, self.rounds + 1):
            begun = time.monotonic()
            for pair in order_of_round(pairs, self.chance):
                self.show(f"round {self.number + 1}: {pair.contender.label}")
                pair.rounds[self.number] = pair.run(self.run.steps)
                self.show(advance=self.run.steps)
            self.number += 1
            now = time.monotonic()
            if FEWEST_ROUNDS <= done < self.rounds and 2 * now - begun > deadline:
                who = f"stages {sorted({p.contender.stage for p in pairs if p.contender.stage is not None})}"
                self.run.notes.append(f"{who}: {done} of {self.rounds} rounds; another would not have ended in time.")
                break
        check_losses(self.run.pairs)

    def show(self, text: str | None = None, advance: int = 0) -> None:
        """Redraw the progress bar."""
        self.bar.update(self.task, description=text, advance=advance, refresh=True)


def note_late_senders(run: Run) -> None:
    """A step that goes on in the background after it has returned would be timed too short."""
    for pair in run.pairs:
        late, wire = min(r.late for r in pair.rounds.values()), wire_bytes(pair) or 0.0
        if late > 0.01 * wire + 10_000:
            run.notes.append(f"{pair.contender.label} still sent {late / 1e6:.2f} MB a step after its step had ended.")


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each contender.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps that each contender takes in a round.")] = 1,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before the first round, not timed.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Processes of each contender.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each process.")] = 1,
    clip: Annotated[float, typer.Option(min=0, help="Gradient clipping, for all; 0: none.")] = 0.0,
    contenders: Annotated[str, typer.Option(help="Names, libraries or stage-N, by commas; default: all.")] = "",
    together: Annotated[int, typer.Option(min=1, help="Stages alive together: fewer need less memory.")] = 2,
    minutes: Annotated[float, typer.Option(min=0.1, help="Rounds are left out to end within this.")] = 9.2,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, 2 rounds; no files unless --out.")] = False,
    out: Annotated[Path | None, typer.Option(help="The markdown file; the raw numbers go beside it.")] = None,
) -> None:
    """Run the contenders side by side, print the tables and write them down."""
    console = Console()
    workload = replace(QUICK if quick else Workload(), threads=threads, clip=clip)
    rounds = min(rounds, 2) if quick else rounds
    run = Run([], workload, ranks, steps, load=os.getloadavg()[0], command=command_line())
    if run.load > 0.5:
        run.notes.append(f"The machine was busy (load average {run.load:.2f}): the times are not to be trusted.")
    if quick:
        run.notes.append("--quick: a tiny model. Its times and its memory say nothing about the targets.")
    try:
        columns = (TextColumn("{task.description:<44}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        # Without a refresh thread: the driver sleeps while a contender computes.
        quiet = not console.is_terminal
        with Progress(*columns, console=console, auto_refresh=False, transient=True, disable=quiet) as bar:
            Race(run, rounds, warmup, bar).all_fields(choose(contenders, run.notes), together, minutes)
    except BenchmarkError as error:
        console.print(f"[red]benchmark failed:[/] {error}", highlight=False)
        raise typer.Exit(1) from None
    note_late_senders(run)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160
    print_report(run, console)
    path = out if out is not None else (None if quick else RESULTS)
    if path is not None:
        write_report(run, path)
        console.print(f"written: {os.path.relpath(path)} and {os.path.relpath(path.with_suffix('.json'))}")


if __name__ == "__main__":
    if sys.platform == "win32":
        sys.exit("benchmarks/train.py needs POSIX pipes")
    typer.run(main)
