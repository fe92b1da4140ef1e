"""``tensorboard``: event files that TensorBoard shows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardwise.accelerator.trackers.base import PackageTracker
from shardwise.accelerator.trackers.values import Skipped, parameters
from shardwise.monitor.tracker import without_secrets

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker(PackageTracker):
    """Writes to ``logging_dir/run_name``.

    The configuration becomes the run's hyperparameters and the text ``config``, in the same event file; upstream
    makes a run of its own of it.

    Args:
        run_name: folder in ``logging_dir``; the project's name.
        logging_dir: folder.
        kwargs: of torch's ``SummaryWriter``.
    """

    name = "tensorboard"
    requires_logging_directory = True
    package = "tensorboard"
    install = "tensorboard"

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = os.path.join(logging_dir, run_name)
        self.init_kwargs = kwargs
        self.writer: SummaryWriter
        self._skipped = Skipped(self.name, "numbers, texts and dictionaries of them")

    def start(self) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(self.logging_dir, **self.init_kwargs)

    @property
    def tracker(self) -> SummaryWriter:
        """torch's ``SummaryWriter``."""
        return self.writer

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record hyperparameters. What is no number or text is written as text; nested names as ``outer/inner``."""
        from torch.utils.tensorboard.summary import hparams

        shown = without_secrets(values)
        known = {name: value for name, value in parameters(shown).items() if value is not None}
        file: Any = self.writer.file_writer
        for summary in hparams(known, {}):  # type: ignore[no-untyped-call]
            file.add_summary(summary)
        self.writer.add_text("config", f"```json\n{json.dumps(shown, indent=2, default=str)}\n```")
        self.writer.flush()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers by ``add_scalar``, texts by ``add_text``, dictionaries of numbers by ``add_scalars``.

        Args:
            values: by name.
            step: of the values.
            kwargs: of these methods.
        """
        for name, value in values.items():
            self._add(name, value, step, kwargs)
        self.writer.flush()

    def _add(self, name: str, value: Any, step: int | None, kwargs: dict[str, Any]) -> None:
        if isinstance(value, int | float):
            self.writer.add_scalar(name, value, global_step=step, **kwargs)
        elif isinstance(value, str):
            self.writer.add_text(name, value, global_step=step, **kwargs)
        elif isinstance(value, Mapping) and all(isinstance(part, int | float) for part in value.values()):
            self.writer.add_scalars(name, dict(value), global_step=step, **kwargs)
        elif isinstance(value, Mapping):
            for key, part in value.items():
                self._add(f"{name}/{key}", part, step, kwargs)
        else:
            self._skipped.say(name, value)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: by name, arrays or tensors ``[n, channels, height, width]``, or as ``dataformats`` says.
            step: of the images.
            kwargs: of ``SummaryWriter.add_images``.
        """
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)

    def finish(self) -> None:
        """Close the event file."""
        self.writer.close()
