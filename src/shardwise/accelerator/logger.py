"""Python's loggers among several processes: by default only the first one speaks."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from shardwise.errors import ConfigError
from shardwise.messages import LEVELS
from shardwise.optim.kwargs import did_you_mean

if TYPE_CHECKING:
    Adapter = logging.LoggerAdapter[logging.Logger]
else:
    Adapter = logging.LoggerAdapter

# Where upstream's scripts set the level.
LEVEL_VARIABLE = "ACCELERATE_LOG_LEVEL"


class Group(Protocol):
    """What a message in the order of the ranks needs: :class:`shardwise.accelerator.process.Processes` has it."""

    @property
    def process_index(self) -> int:
        """This process's rank."""

    @property
    def num_processes(self) -> int:
        """How many there are."""

    def wait_for_everyone(self) -> None:
        """Return when all processes have called this."""


def rank_now() -> tuple[int, int]:
    """This process's rank, and how many there are: from the process group, or else from torchrun's variables.

    It can be asked at any time: no group is joined for it.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class MultiProcessAdapter(Adapter):
    """A logger whose methods take two keyword arguments more.

    ``main_process_only`` (default True): whether only rank 0 speaks. ``in_order`` (default False): all ranks speak,
    one after the other; this is a collective, so that all of them must call it, whatever their level. While there is
    no process group there is nothing to wait with, and they speak as they come. What several ranks say begins with
    ``[RANK i]``.

    Args:
        logger: whom to tell.
        processes: for ``in_order``; without it, those of the program.
    """

    def __init__(self, logger: logging.Logger, processes: Group | None = None) -> None:
        super().__init__(logger, {})
        self._processes = processes
        self._said: set[tuple[str, str]] = set()

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Say it, where it is to be said."""
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        rank, size = rank_now()
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the call site is outside this method
        speaks = self.isEnabledFor(level) and (in_order or not main_process_only or rank == 0)
        options: MutableMapping[str, Any] = kwargs
        if speaks:
            msg, options = self.process(msg, kwargs)
            if size > 1 and (in_order or not main_process_only):
                msg = f"[RANK {rank}] {msg}"
        group = self._group() if in_order else None
        if group is None:
            if speaks:
                self.logger.log(level, msg, *args, **options)
            return
        # A rank with another level says nothing, but its part in the turns is waited for.
        for turn in range(group.num_processes):
            if speaks and turn == group.process_index:
                self.logger.log(level, msg, *args, **options)
            group.wait_for_everyone()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """The message as it is; ``extra`` is the caller's."""
        return msg, kwargs

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Warn, unless this logger has given the same warning before."""
        said = (str(msg), repr(args))
        if said not in self._said:
            self._said.add(said)
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            self.log(logging.WARNING, msg, *args, **kwargs)

    def _group(self) -> Group | None:
        if self._processes is not None:
            return self._processes
        if not (dist.is_available() and dist.is_initialized()):
            return None
        from shardwise.accelerator.current import current_processes

        return current_processes()


def get_logger(name: str, log_level: str | int | None = None, *, processes: Group | None = None) -> MultiProcessAdapter:
    """A logger for a program of several processes. No Accelerator is needed, neither now nor when something is said.

    Args:
        name: of the logger, usually ``__name__``.
        log_level: say what is at least so important: ``"debug"``, ``"info"`` ... in any case, or logging's number. By
            default what ``ACCELERATE_LOG_LEVEL`` says, or else what is set for the logger. Only this logger's level is
            set; upstream sets the root's as well.
        processes: for messages in the order of the ranks; by default those of the program.

    Raises:
        ConfigError: there is no such level.
    """
    logger = logging.getLogger(name)
    given = os.environ.get(LEVEL_VARIABLE) if log_level is None else log_level
    if isinstance(given, str):
        if given.lower() not in LEVELS:
            where = LEVEL_VARIABLE if log_level is None else "log_level"
            raise ConfigError(
                f"{where}: there is no level {given!r}{did_you_mean(given, LEVELS)} There are {', '.join(LEVELS)}."
            )
        given = LEVELS[given.lower()]
    if given is not None:
        logger.setLevel(given)
    return MultiProcessAdapter(logger, processes)
