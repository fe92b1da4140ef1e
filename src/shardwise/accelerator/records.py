"""Trackers, progress bars and profiles."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.accelerator.base import Base
from shardwise.accelerator.progress import Bars
from shardwise.accelerator.settings import ProfileKwargs


class Records(Base):
    """The methods by which a run is watched."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._bars = Bars(self.processes)

    @property
    def trackers(self) -> list[Any]:
        """Those that were started."""
        return self._tracking.trackers

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Start the trackers of ``log_with``.

        Args:
            project_name: of the run.
            config: hyper-parameters, recorded once.
            init_kwargs: by tracker: ``{"wandb": {"tags": [...]}}``.
        """
        self._tracking.init_trackers(project_name, config, init_kwargs)

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Give values to all trackers.

        Args:
            values: numbers, 0-d tensors or text, by name.
            step: of the run.
            log_kwargs: by tracker.
        """
        self._tracking.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name, or (``unwrap``) the object of its library."""
        return self._tracking.get_tracker(name, unwrap)

    def progress(self, iterable: Iterable[Any], **options: Any) -> Any:
        """The iterable, with a bar on the main process: ``for batch in accelerator.progress(loader):``."""
        return self._bars.over(iterable, **options)

    def end_training(self) -> None:
        """Finish the trackers, and end the process group. All processes must call this."""
        try:
            self._tracking.end()
        finally:
            for engine in [*self._engines, *self._evaluated]:
                engine.destroy()
            for record in self._plain.values():
                if record.replicas is not None:
                    record.replicas.close()
            self.processes.destroy_process_group()

    @contextlib.contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """``torch.profiler`` around the block."""
        handler = profile_handler or self.handlers.get(ProfileKwargs, ProfileKwargs())
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            folder = Path(handler.output_trace_dir)
            os.makedirs(folder, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{self.processes.process_index}.json"))
            self.processes.wait_for_everyone()
