"""The trackers by name, and what ``log_with`` means."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shardwise.accelerator.trackers.base import GeneralTracker, PackageTracker, missing_in
from shardwise.accelerator.trackers.comet_ml import CometMLTracker
from shardwise.accelerator.trackers.csv_file import CsvTracker
from shardwise.accelerator.trackers.mlflow import MLflowTracker
from shardwise.accelerator.trackers.tensorboard import TensorBoardTracker
from shardwise.accelerator.trackers.trackio import TrackioTracker
from shardwise.accelerator.trackers.wandb import WandBTracker
from shardwise.errors import ConfigError
from shardwise.messages import logger
from shardwise.optim.kwargs import did_you_mean

OURS: tuple[type[GeneralTracker], ...] = (
    TensorBoardTracker,
    WandBTracker,
    MLflowTracker,
    CometMLTracker,
    TrackioTracker,
    CsvTracker,
)
BUILT_IN = {str(cls.name): cls for cls in OURS}
ALIASES = {"comet": "comet_ml"}
# Those that upstream has and shardwise has not.
NOT_SUPPORTED = ("aim", "clearml", "dvclive", "swanlab")
ALL = "all"

# What scripts have registered: a name must be known before there is an Accelerator, so that no object can hold it.
_registered: dict[str, type[GeneralTracker]] = {}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Make a tracker of the script's own known by its name, for ``log_with``.

    Args:
        tracker_class: with ``name`` and ``requires_logging_directory`` as attributes of the class; for how it is
            constructed see :class:`GeneralTracker`. One whose name is taken replaces the other, which is said.

    Raises:
        ConfigError: it is no subclass of GeneralTracker, or lacks something.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ConfigError(f"register_tracker_class: give a subclass of GeneralTracker, not {tracker_class!r}.")
    name = _name_of(tracker_class, "register_tracker_class")
    if name == ALL or name in ALIASES:
        raise ConfigError(f"register_tracker_class: the name {name!r} has a meaning in log_with; choose another.")
    if known_classes().get(name, tracker_class) is not tracker_class:
        logger.warning("register_tracker_class: %s takes the place of the tracker %r", tracker_class.__name__, name)
    _registered[name] = tracker_class


def known_classes() -> dict[str, type[GeneralTracker]]:
    """The trackers that can be asked for by name."""
    return {**BUILT_IN, **_registered}


def is_installed(package: str) -> bool:
    """Whether it can be imported. A folder without code is no package: wandb leaves ``./wandb`` in working folders."""
    if package in sys.modules:
        return sys.modules[package] is not None
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


@dataclass(frozen=True)
class Choice:
    """One tracker of ``log_with``.

    Attributes:
        name: its name.
        made: the class that makes it; None if the script has made it.
        given: the one that the script has made.
    """

    name: str
    made: type[GeneralTracker] | None = None
    given: Any = None

    @property
    def everywhere(self) -> bool:
        """Whether every process has one."""
        return not getattr(self.given if self.made is None else self.made, "main_process_only", True)

    def build(self, project: str, logging_dir: str | os.PathLike[str] | None, kwargs: dict[str, Any]) -> Any:
        """The tracker, not started."""
        if self.made is None:
            return self.given
        where = [logging_dir] if self.made.requires_logging_directory else []
        construct: Any = self.made
        return construct(project, *where, **kwargs)


def choices(log_with: Any, logging_dir: str | os.PathLike[str] | None) -> list[Choice]:
    """The trackers that ``log_with`` asks for, each once.

    Args:
        log_with: a name, a tracker, a class of trackers, or several of these; None for none.
        logging_dir: for those that write files.

    Raises:
        ConfigError: there is no such tracker, its package is not installed, or it needs a folder.
    """
    if log_with is None:
        return []
    asked = list(log_with) if isinstance(log_with, list | tuple | set | frozenset) else [log_with]
    found: list[Choice] = []
    for item in asked:
        item = item.value if isinstance(item, Enum) else item
        if item == ALL:
            found += _all(logging_dir)
        else:
            found.append(_choice(item, logging_dir))
    return [c for i, c in enumerate(found) if c.made is None or c.made not in (e.made for e in found[:i])]


def known_name(name: str) -> str:
    """The name, or what it is an alias of."""
    return ALIASES.get(name, name)


def check_names(names: Iterable[str], chosen: Iterable[Choice], what: str) -> None:
    """Refuse names that no tracker has. Those of trackers that were not chosen are right: a script may have them all.

    Raises:
        ConfigError: there is no such tracker.
    """
    known = {*known_classes(), *ALIASES, *NOT_SUPPORTED, *(choice.name for choice in chosen)}
    for name in names:
        if name not in known:
            raise ConfigError(f"{what}: there is no tracker {name!r}{did_you_mean(str(name), known)}")


def _choice(item: Any, logging_dir: str | os.PathLike[str] | None) -> Choice:
    if isinstance(item, str):
        cls = _class(known_name(item))
        _require_package(cls)
        choice = Choice(known_name(item), made=cls)
    elif isinstance(item, type):
        choice = Choice(_name_of(item, "log_with"), made=item)
    else:
        missing = missing_in(item)
        if missing:
            raise ConfigError(
                f"log_with: {type(item).__name__} is no tracker: it lacks {', '.join(missing)}. Give the name of one "
                f"({', '.join(known_classes())}), or one that is derived from GeneralTracker."
            )
        choice = Choice(str(item.name), given=item)
    if choice.made is not None and choice.made.requires_logging_directory and logging_dir is None:
        raise ConfigError(
            f"log_with: {choice.name!r} writes files and needs to know where: give `project_dir`, or a "
            "ProjectConfiguration with a `logging_dir`."
        )
    return choice


def _class(name: str) -> type[GeneralTracker]:
    known = known_classes()
    if name in known:
        return known[name]
    names = ", ".join([*known, ALL])
    if name in NOT_SUPPORTED:
        raise ConfigError(
            f"log_with: {name!r} is not supported. There are {names}; a tracker of your own, derived from "
            "shardwise.accelerator.trackers.GeneralTracker, may be given instead of a name."
        )
    raise ConfigError(
        f"log_with: there is no tracker {name!r}{did_you_mean(name, [*known, *ALIASES, ALL])} There are {names}."
    )


def _require_package(cls: type[GeneralTracker]) -> None:
    if issubclass(cls, PackageTracker) and not is_installed(cls.package):
        raise ConfigError(
            f"log_with: {cls.name!r} needs the package `{cls.package}`, which is not installed; run\n"
            f"    pip install {cls.install}\n"
            "or take it out of log_with."
        )


def _all(logging_dir: str | os.PathLike[str] | None) -> list[Choice]:
    """Those that can be used here."""
    usable = [
        cls for cls in known_classes().values() if not issubclass(cls, PackageTracker) or is_installed(cls.package)
    ]
    homeless = [str(cls.name) for cls in usable if cls.requires_logging_directory and logging_dir is None]
    found = [Choice(str(cls.name), made=cls) for cls in usable if str(cls.name) not in homeless]
    if not found:
        raise ConfigError(
            f'log_with: of "all" there is none that can be used: {", ".join(homeless)} need `project_dir`, and the '
            "packages of the others are not installed."
        )
    if homeless:
        logger.info('log_with: "all" is without %s, which need `project_dir`', ", ".join(homeless))
    return found


def _name_of(cls: type, what: str) -> str:
    missing = missing_in(cls)
    if missing:
        raise ConfigError(f"{what}: the class {cls.__name__} lacks {', '.join(missing)}.")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{what}: `name` of the class {cls.__name__} must be a text.")
    if not isinstance(getattr(cls, "requires_logging_directory", None), bool):
        raise ConfigError(f"{what}: `requires_logging_directory` of the class {cls.__name__} must be True or False.")
    return name
