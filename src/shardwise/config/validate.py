"""Run a pydantic model over one section; report in our words, and go on with what is good."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from shardwise.config.fields import Section, expected
from shardwise.config.names import unknown_key
from shardwise.config.problems import Path, Problems, format_path

S = TypeVar("S", bound=Section)


def validate(model: type[S], value: object, path: Path, problems: Problems) -> S | None:
    """Validate one section.

    Returns:
        The section; keys that are wrong are reported and have their defaults, so that checks across sections
        can still look at the others. None when nothing can be made of it.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    for detail in details:
        here = (*path, *detail["loc"])
        if detail["type"] == "extra_forbidden":
            # A nested section's keys are known by its own path.
            known = list(model.model_fields) if path == ("scheduler", "params") else None
            problems.add(here, unknown_key(here, known), "unknown")
        elif detail["type"] == "missing":
            name = str(detail["loc"][-1])
            problems.add(
                here, f"missing; {_misplaced(value, name, path) or f'write {expected(model, name)}'}"
            )
        else:
            problems.add(here, detail["msg"])
    wrong = {detail["loc"][0] for detail in details if detail["loc"]}
    if not isinstance(value, dict) or not wrong & set(value):
        return None
    return validate(model, {key: item for key, item in value.items() if key not in wrong}, path, problems)


def _misplaced(value: object, name: str, path: Path) -> str | None:
    """Say where inside a section its missing key stands instead, one level too deep."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if isinstance(inner, dict) and name in inner:
            return f"it stands in {format_path((*path, key, name))}, move it up"
    return None
