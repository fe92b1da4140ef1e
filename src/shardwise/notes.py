"""What a configuration does not do, or was filled with: said once, at the start."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.config.explain import Row


def notes(config: Config) -> list[str]:
    """Sentences about keys that were filled in, and about written keys that have no effect in this run."""
    from shardwise.config.explain import explain  # with pydantic: not at import time

    rows = explain(config)
    found = [f'{path} is "auto": {value!r}' for path, value in config.filled.items()]
    by_reason: dict[str, list[str]] = defaultdict(list)
    off = {row.key.rpartition(".")[0] for row in rows if _is_switched_off(row)}
    for row in rows:
        if row.state == "no effect" and row.origin == "file" and row.key.rpartition(".")[0] not in off:
            by_reason[row.line].append(row.key)
    return found + [f"no effect here: {', '.join(keys)} ({reason})" for reason, keys in by_reason.items()]


def _is_switched_off(row: Row) -> bool:
    """Whether the row is the switch of a section, and written as off: what else the section holds surprises nobody."""
    return row.origin == "file" and row.value is False and row.key.endswith((".enabled", ".enable"))
