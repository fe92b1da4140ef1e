"""``csv``: all values in one file of comma-separated values. It needs no package."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any, TextIO

from shardwise.accelerator.trackers.base import GeneralTracker
from shardwise.accelerator.trackers.values import Skipped, flat, is_simple
from shardwise.errors import ConfigError
from shardwise.monitor.tracker import without_secrets

STEP = "step"


class CsvTracker(GeneralTracker):
    """Writes ``logging_dir/run_name/metrics.csv``: a row for each call of ``log``, a column for each name.

    The first column is the step. A name that is new gets a column to the right of the others; rows that have no
    value of it are empty there. A file that is there already (a resumed run) is continued. ``config.json`` beside it
    has the configuration. Every row is handed to the operating system at once.

    Args:
        run_name: folder in ``logging_dir``; the project's name.
        logging_dir: folder.
        filename: of the values.
    """

    name = "csv"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], *, filename: str = "metrics.csv") -> None:
        super().__init__()
        self.path = Path(logging_dir) / run_name / filename
        self._file: TextIO | None = None
        self._columns: list[str] = [STEP]
        self._skipped = Skipped(self.name, "numbers, texts and dictionaries of them")

    def start(self) -> None:
        """Open the file.

        Raises:
            ConfigError: it is there and not of this tracker.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size:
            with open(self.path, newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file), [])
            if self._columns[:1] != [STEP]:
                raise ConfigError(f"csv: {self.path} does not begin with the column `{STEP}`; move it away.")
            with open(self.path, "rb+") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # it was cut off in the middle of a row
                    file.write(b"\n")
            self._open()
        else:
            self._open()
            self._write([STEP])

    @property
    def tracker(self) -> Path:
        """The file's path."""
        return self.path

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write ``config.json``."""
        text = json.dumps(without_secrets(values), indent=2, default=str)
        (self.path.parent / "config.json").write_text(text + "\n", encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """One row; nested names as ``outer/inner``.

        Args:
            values: by name. One called ``step`` is the row's step if there is no other.
            step: of the row.
            kwargs: none.

        Raises:
            ConfigError: there are ``kwargs``.
        """
        if kwargs:
            raise ConfigError(f"log_kwargs['csv']: it takes no arguments, but there are {', '.join(kwargs)}.")
        row: dict[str, Any] = {}
        for name, value in flat(values):
            if is_simple(value):
                row[name] = value
            else:
                self._skipped.say(name, value)
        if step is None:
            step = row.pop(STEP, None)
        elif STEP in row:
            own = row.pop(STEP)
            if own != step:
                row[f"values/{STEP}"] = own
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen(new)
        self._write([step, *(row.get(name) for name in self._columns[1:])])

    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        self._file = open(self.path, "a", newline="", encoding="utf-8")  # noqa: SIM115  closed in finish()

    def _write(self, cells: list[Any]) -> None:
        if self._file is None:
            raise ConfigError("csv: the file is closed; call init_trackers before log, and end_training after it.")
        csv.writer(self._file, lineterminator="\n").writerow(cells)
        self._file.flush()

    def _widen(self, names: list[str]) -> None:
        """Give the file more columns: beside it, then in its place, so that nothing is lost if this process ends."""
        self.finish()
        self._columns = [*self._columns, *names]
        beside = self.path.with_name(self.path.name + ".new")
        with (
            open(self.path, newline="", encoding="utf-8") as old,
            open(beside, "w", newline="", encoding="utf-8") as new,
        ):
            writer = csv.writer(new, lineterminator="\n")
            writer.writerow(self._columns)
            rows = csv.reader(old)
            next(rows)
            writer.writerows(row + [""] * (len(self._columns) - len(row)) for row in rows)
        os.replace(beside, self.path)
        self._open()
