"""The trackers of one Accelerator: started, told, finished."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from shardwise.accelerator.trackers.base import BlankTracker
from shardwise.accelerator.trackers.registry import Choice, check_names, choices, known_name
from shardwise.accelerator.trackers.values import on_host
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.messages import logger

Kwargs = Mapping[str, Mapping[str, Any]]


class Place(Protocol):
    """Which process this is: :class:`shardwise.accelerator.process.Processes` says it."""

    @property
    def is_main_process(self) -> bool:
        """Whether it is the first of all."""


class Tracking:
    """Keeps the trackers of ``log_with``.

    They are on the first process only, except those whose ``main_process_only`` is False. Nothing here is a
    collective: where there is no tracker, every method returns at once.

    Args:
        log_with: names (``tensorboard``, ``wandb``, ``mlflow``, ``comet_ml``, ``trackio``, ``csv``, a registered one,
            or ``all`` for those that can be used here), trackers, or classes of them; one or several. None for none.
        logging_dir: folder for those that write files.
        processes: which process this is.

    Attributes:
        trackers: those that are started on this process.

    Raises:
        ConfigError: there is no such tracker, its package is not installed, or it needs a folder; on every process.
    """

    def __init__(self, log_with: Any, logging_dir: str | os.PathLike[str] | None, processes: Place) -> None:
        self.trackers: list[Any] = []
        self._choices = choices(log_with, logging_dir)
        self._logging_dir = logging_dir
        self._main = processes.is_main_process
        self._project: str | None = None
        self._open: dict[int, Any] = {}
        self._recorded: set[int] = set()
        self._warned = False

    @property
    def names(self) -> list[str]:
        """What was asked for, on every process."""
        return [choice.name for choice in self._choices]

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Kwargs | None = None
    ) -> None:
        """Start the trackers, and record how the run is configured.

        Called again it starts nothing twice, and the configuration that a tracker has is not recorded again.

        Args:
            project_name: what the services call project or experiment; folder in ``logging_dir`` for others.
            config: hyperparameters by name; may be nested.
            init_kwargs: by a tracker's name, more arguments of its constructor.

        Raises:
            ConfigError: an argument is wrong, another project's trackers are open, or one cannot be started.
        """
        given = _by_tracker(init_kwargs, self._choices, "init_kwargs")
        project = os.fspath(project_name)
        if self._project not in (None, project):
            raise ConfigError(
                f"init_trackers: the trackers of the project {self._project!r} are open; call end_training before "
                f"those of {project!r} are started."
            )
        for choice in self._choices:
            if choice.made is None and given.get(choice.name):
                raise ConfigError(
                    f"init_kwargs[{choice.name!r}]: this tracker was constructed by the script; give them to its "
                    "constructor."
                )
        record = None if config is None else on_host(config, "config")
        self._project = project
        for i, choice in enumerate(self._choices):
            if i not in self._open and (self._main or choice.everywhere):
                self._start(i, choice, project, given.get(choice.name, {}))
        for i, tracker in self._open.items():
            store = getattr(tracker, "store_init_configuration", None)
            if record is not None and store is not None and i not in self._recorded:
                self._recorded.add(i)
                store(dict(record))

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Kwargs | None = None) -> None:
        """Give values to all trackers.

        Args:
            values: by name: numbers, tensors or arrays of one element, texts, mappings of these; other things go to
                the trackers as they are. Tensors on a GPU are waited for.
            step: where they are on the x axis.
            log_kwargs: by a tracker's name, more arguments of its ``log``.

        Raises:
            ConfigError: an argument is wrong. What a tracker raises is raised.
        """
        if not self._open:
            self._warn_of_nothing()
            return
        given = _by_tracker(log_kwargs, self._choices, "log_kwargs") if log_kwargs else {}
        here = on_host(values)
        if step is not None:
            step = on_host({"step": step})["step"]
        for tracker in self.trackers:
            tracker.log(dict(here), step=step, **given.get(tracker.name, {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker.

        Args:
            name: its name.
            unwrap: the object underneath instead, such as wandb's run.

        Returns:
            The tracker; on processes that have none, and where none was asked for, one that does nothing whatever it
            is told.

        Raises:
            ConfigError: there is none of this name, or it is not started; on every process.
        """
        if not self._choices:
            return BlankTracker()
        wanted = known_name(name)
        if wanted not in self.names:
            raise ConfigError(f"get_tracker: there is no tracker {name!r}; log_with has {', '.join(self.names)}.")
        if self._project is None:
            raise ConfigError(f"get_tracker: {name!r} is not started; call init_trackers before, end_training after.")
        for tracker in self.trackers:
            if tracker.name == wanted:
                return tracker.tracker if unwrap else tracker
        return BlankTracker()

    def end(self) -> None:
        """Finish all trackers; then others may be started. Does nothing the second time.

        Raises:
            ShardwiseError: some could not be finished; the others are.
        """
        failed: list[tuple[str, Exception]] = []
        for tracker in self.trackers:
            finish = getattr(tracker, "finish", None)
            try:
                if finish is not None:
                    finish()
            except Exception as error:  # whatever its package raises; raised below
                failed.append((tracker.name, error))
        self.trackers.clear()
        self._open.clear()
        self._recorded.clear()
        self._project = None
        if failed:
            said = "\n".join(f"{name}: could not be finished ({type(e).__name__}: {e})" for name, e in failed)
            raise ShardwiseError(said) from failed[0][1]

    def _start(self, i: int, choice: Choice, project: str, kwargs: Mapping[str, Any]) -> None:
        try:
            tracker = choice.build(project, self._logging_dir, dict(kwargs))
            start = getattr(tracker, "start", None)
            if start is not None:
                start()
        except ShardwiseError:
            raise
        except Exception as error:  # of its package's own kinds: no login, no network, an unknown argument
            what = f" with init_kwargs {sorted(kwargs)}" if kwargs else ""
            raise ConfigError(f"{choice.name}: cannot be started{what} ({type(error).__name__}: {error}).") from error
        if "tracker" not in dir(tracker):
            raise ConfigError(
                f"{choice.name}: {type(tracker).__name__} has no `tracker`: the object underneath, as an attribute or "
                "property."
            )
        self._open[i] = tracker
        self.trackers.append(tracker)

    def _warn_of_nothing(self) -> None:
        expected = self._choices if self._main else [choice for choice in self._choices if choice.everywhere]
        if expected and not self._warned:
            self._warned = True
            names = ", ".join(choice.name for choice in expected)
            logger.warning("log: nothing is recorded: %s not started; call init_trackers before", names)


def _by_tracker(given: Kwargs | None, chosen: list[Choice], what: str) -> dict[str, Mapping[str, Any]]:
    """Arguments by a tracker's proper name."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what}: give a dictionary by the trackers' names, not {type(given).__name__}.")
    if chosen:
        check_names(given, chosen, what)
    for name, kwargs in given.items():
        if not isinstance(kwargs, Mapping):
            raise ConfigError(f"{what}[{name!r}]: give a dictionary of arguments, not {type(kwargs).__name__}.")
    return {known_name(name): kwargs for name, kwargs in given.items()}
