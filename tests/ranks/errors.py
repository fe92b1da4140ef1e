"""What a test sees when something went wrong on a rank."""

from __future__ import annotations


class RemoteError(Exception):
    """Stands for an exception that could not be pickled; its text is the original's ``Type: message``."""


class RankError(Exception):
    """A function raised on a rank. ``str()`` holds every rank's traceback, the first to fail first.

    ``exceptions``: rank -> the exception that it raised. ``leaks``: what the ranks left behind besides.
    """

    def __init__(
        self,
        text: str,
        exceptions: dict[int, BaseException] | None = None,
        leaks: list[str] | None = None,
    ) -> None:
        super().__init__(text)
        self.exceptions = exceptions or {}
        self.leaks = leaks or []


class RankTimeout(RankError):
    """The function did not end in time. ``str()`` holds the Python stack of every rank."""


class RankDied(RankError):
    """A rank's process ended while it ran the function. ``exit_codes``: rank -> exit code, -9 for SIGKILL."""

    def __init__(
        self, text: str, exceptions: dict[int, BaseException], exit_codes: dict[int, int | None]
    ) -> None:
        super().__init__(text, exceptions)
        self.exit_codes = exit_codes


class RankLeak(RankError):
    """The function returned on every rank, but left something behind. ``leaks``: one sentence each."""
