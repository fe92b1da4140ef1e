"""`csv_monitor`: one file of comma-separated values for each name."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from shardwise.errors import ConfigError


class CsvTracker:
    """Writes ``output_path/job_name/Train_Samples_train_loss.csv`` and so on, with upstream's names and header.

    A file that is there already (a resumed run) is continued, without a second header. ``config.json`` beside them
    holds the configuration.

    Args:
        output_path: folder; empty for the working directory.
        job_name: folder in it.
    """

    name = "csv_monitor"

    def __init__(self, output_path: str, job_name: str) -> None:
        self.folder = Path(output_path) / job_name
        self._files: dict[str, TextIO] = {}

    def start(self, config: Mapping[str, Any]) -> None:
        """Make the folder and write the configuration."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(config, indent=2, default=str)
            (self.folder / "config.json").write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"csv_monitor.output_path: cannot write to {self.folder} ({error}).") from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One row in the file of each name."""
        for name, value in values.items():
            csv.writer(self._file(name), lineterminator="\n").writerow([step, value])

    def flush(self) -> None:
        """Hand the rows to the operating system."""
        for file in self._files.values():
            file.flush()

    def finish(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, name: str) -> TextIO:
        if name not in self._files:
            path = self.folder / (name.replace("/", "_").replace(" ", "_") + ".csv")
            file = open(path, "a", newline="", encoding="utf-8")  # noqa: SIM115  closed in finish()
            self._files[name] = file
            if file.tell() == 0:
                csv.writer(file, lineterminator="\n").writerow(["step", name.rsplit("/", 1)[-1]])
        return self._files[name]
