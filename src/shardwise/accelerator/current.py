"""What the free functions read when no :class:`Processes` is given. The only process-wide thing of the Accelerate face.

Scripts call ``gather(x)`` or ``set_seed(1)`` without an object. Those functions take ``processes=None`` and ask here.
Classes are given their processes; of what is here they read nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

from shardwise.accelerator.process import Processes


class _Current:
    """The processes that were set or made last, and the newest accelerator for as long as somebody holds it."""

    def __init__(self) -> None:
        self.processes: Processes | None = None
        self.made_here = False
        self.accelerator: weakref.ref[Any] | None = None


_current = _Current()


def current_processes() -> Processes:
    """The processes that were set last; made on the first call when none were.

    Those that were made here are made again after torch's default group was started, destroyed or replaced.
    """
    found = _current.processes
    if found is None or (_current.made_here and not found.alive):
        found = Processes()
        _current.processes, _current.made_here = found, True
    return found


def set_current_processes(processes: Processes) -> None:
    """Let the free functions use these from now on."""
    _current.processes, _current.made_here = processes, False


def current_accelerator() -> Any:
    """The newest ``Accelerator``, or None when there is none any more."""
    return _current.accelerator() if _current.accelerator is not None else None


def set_current_accelerator(accelerator: Any) -> None:
    """Note the newest ``Accelerator``. It is not kept alive."""
    _current.accelerator = weakref.ref(accelerator)


def forget() -> None:
    """Forget both, as at the start of the program."""
    _current.processes, _current.made_here, _current.accelerator = None, False, None


def reset() -> None:
    """Part with the newest accelerator: what it is asked from now on raises an error. Then :func:`forget`."""
    accelerator = current_accelerator()
    if accelerator is not None:
        accelerator.state.close()
    forget()
