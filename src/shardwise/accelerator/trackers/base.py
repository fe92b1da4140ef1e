"""What every tracker has, the base of those that a script writes itself, and the one that does nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from shardwise.accelerator.logger import rank_now


class GeneralTracker:
    """A place that keeps a run's values. A script derives its own from it.

    A subclass defines ``name`` (by which ``get_tracker``, ``init_kwargs`` and ``log_kwargs`` know it),
    ``requires_logging_directory`` (whether it cannot do without the Accelerator's ``logging_dir``), ``tracker`` (an
    attribute or property: the object underneath, such as wandb's run) and :meth:`log`. Its constructor takes what it
    likes if the script constructs it; one that is given as a class, or registered by
    :func:`shardwise.accelerator.trackers.register_tracker_class`, is constructed with the project's name, then the
    logging directory if it requires one, then its ``init_kwargs`` by name. The constructor should open nothing:
    :meth:`start` does.

    Attributes:
        main_process_only: False if every process shall have one of its own.

    Raises:
        NotImplementedError: the subclass lacks a name, a method; in the constructor, if it calls this one.
    """

    main_process_only: ClassVar[bool] = True

    name: str
    requires_logging_directory: bool

    if TYPE_CHECKING:  # an attribute or a property, as the subclass likes

        @property
        def tracker(self) -> Any:
            """The object underneath."""

    def __init__(self, _blank: bool = False) -> None:
        missing = [] if _blank else missing_in(self)
        if missing:
            raise NotImplementedError(
                f"{type(self).__name__} is no whole tracker: define {', '.join(missing)} in the class "
                "(see shardwise.accelerator.trackers.GeneralTracker)."
            )

    def start(self) -> None:
        """Open it. Called by ``init_trackers``, on the processes that have it."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record how the run was configured; by default nowhere. Called at most once.

        Args:
            values: the ``config`` of ``init_trackers``: by name, perhaps nested.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep some values.

        Args:
            values: by name: numbers (Python's own; those on a GPU are here already), texts, or mappings of them.
            step: where they are on the x axis.
            kwargs: those that ``log_kwargs`` has for this tracker.
        """

    def finish(self) -> None:
        """Close it; everything that was logged is kept."""


def missing_in(tracker: object) -> list[str]:
    """What a tracker, or a class of trackers, should have and has not; but `tracker` may come with ``start()``."""
    cls = tracker if isinstance(tracker, type) else type(tracker)
    here = dir(tracker)  # does not run a property, which may be of use only after start()
    missing = [f"`{name}`" for name in ("name", "requires_logging_directory") if name not in here]
    log = getattr(cls, "log", None)
    if log is None or log is GeneralTracker.log:
        missing.append("`log(values, step)`")
    return missing


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a method of a tracker: where ``main_process_only`` is True, ranks but the first return None at once.

    The trackers of ``log_with`` do not need it, because other ranks do not have them; those that a script constructs
    on every rank, and uses by itself, may.
    """

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and rank_now()[0] != 0:
            return None
        return function(self, *args, **kwargs)

    return method


class BlankTracker(GeneralTracker):
    """What ranks without a tracker get: every attribute is itself, every call returns it, and nothing happens.

    It is False in a condition.
    """

    name = "blank"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__(_blank=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy, pickle or numpy ask for is not there
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        """Nothing."""

    def __call__(self, *args: object, **kwargs: object) -> BlankTracker:  # noqa: D102
        return self

    def __getitem__(self, key: object) -> BlankTracker:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        """Nothing."""

    def __enter__(self) -> BlankTracker:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing."""

    def __bool__(self) -> bool:
        return False


class PackageTracker(GeneralTracker):
    """One of ours that needs a package.

    Attributes:
        package: the module's name.
        install: what to give pip.
    """

    package: ClassVar[str]
    install: ClassVar[str]
