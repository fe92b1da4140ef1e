"""The environment for a while, and a bar on one process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.utils.small import parse_flag_from_env, str_to_bool


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables (in upper case) for the time of a block."""
    before = {key.upper(): os.environ.get(key.upper()) for key in kwargs}
    os.environ.update({key.upper(): str(value) for key, value in kwargs.items()})
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextmanager
def clear_environment() -> Iterator[None]:
    """An environment without variables for the time of a block."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def tqdm(iterable: Iterable[Any], *_: Any, main_process_only: bool = True, **options: Any) -> Any:
    """A progress bar on the main process; see ``Accelerator.progress``.

    Args:
        iterable: what is looped over.
        main_process_only: only True: several processes' bars would overwrite each other.
        options: ``total`` and ``desc``.
    """
    from shardwise.accelerator.current import current_processes
    from shardwise.accelerator.progress import progress

    total, description = options.get("total"), options.get("desc") or ""
    return progress(iterable, processes=current_processes(), total=total, description=description)


__all__ = ["clear_environment", "parse_flag_from_env", "patch_environment", "str_to_bool", "tqdm"]
