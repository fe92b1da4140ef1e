"""`tensorboard`: event files that TensorBoard shows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker:
    """Writes scalars to ``output_path/job_name``, and the configuration as the text ``config``.

    Args:
        output_path: folder; empty for the working directory.
        job_name: folder in it.
    """

    name = "tensorboard"

    def __init__(self, output_path: str, job_name: str) -> None:
        self.folder = os.path.join(output_path, job_name)
        self._writer: SummaryWriter | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer = SummaryWriter(self.folder)
        except OSError as error:
            raise ConfigError(f"tensorboard.output_path: cannot write to {self.folder} ({error}).") from error
        text = json.dumps(config, indent=2, default=str)
        self._writer.add_text("config", f"```json\n{text}\n```")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One scalar each."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write the event file."""
        if self._writer is not None:
            self._writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
