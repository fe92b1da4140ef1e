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

    Args:
        model: the section's type.
        value: what was written.
        path: where it stands.
        problems: where to report.

    Returns:
        The section; keys that are wrong are reported and have their defaults, so that checks across sections
        can still look at the others. None when nothing can be made of it.
    """
    return _build(model, _known(model, value, path, problems), path, problems)


def _known(model: type[Section], value: object, path: Path, problems: Problems) -> object:
    """Report the unknown keys of a section and of those inside it; return a copy without them.

    pydantic would find them too, but refuses some keys (a lone surrogate) in words of its own.
    """
    if not isinstance(value, dict):
        return value
    result: dict[str, object] = {}
    for key, item in value.items():
        here = (*path, key)
        field = model.model_fields.get(key)
        if field is None:
            # The arguments of a scheduler depend on its class.
            known = list(model.model_fields) if path == ("scheduler", "params") else None
            problems.add(here, unknown_key(here, known), "unknown")
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            result[key] = _known(field.annotation, item, here, problems)
        else:
            result[key] = item
    return result


def _build(model: type[S], value: object, path: Path, problems: Problems) -> S | None:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    for detail in details:
        here = (*path, *detail["loc"])
        if detail["type"] == "missing":
            name = str(detail["loc"][-1])
            problems.add(here, f"missing; {_misplaced(value, name, path) or f'write {expected(model, name)}'}")
        else:
            problems.add(here, detail["msg"])
    wrong = {detail["loc"][0] for detail in details if detail["loc"]}
    if not isinstance(value, dict) or not wrong & set(value):
        return None
    return _build(model, {key: item for key, item in value.items() if key not in wrong}, path, problems)


def _misplaced(value: object, name: str, path: Path) -> str | None:
    """Say where inside a section its missing key stands instead, one level too deep."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if isinstance(inner, dict) and name in inner:
            return f"it stands in {format_path((*path, key, name))}, move it up"
    return None
