"""Keyword arguments from JSON, checked against a constructor's signature before it is called."""

from __future__ import annotations

import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from shardwise.errors import ConfigError

_SEQUENCES = frozenset({"tuple", "list", "Sequence", "Iterable", "Collection"})


class NamedSection(Protocol):
    """A config section that names a class and gives its keyword arguments (``optimizer``, ``scheduler``)."""

    @property
    def type(self) -> str | None:
        """Name of the class."""

    @property
    def params(self) -> Mapping[str, Any]:
        """Keyword arguments of its constructor."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: ``"; did you mean 'x'?"``, or ``"."`` if none is near."""
    by_fold = {candidate.casefold(): candidate for candidate in known}
    close = difflib.get_close_matches(name.casefold(), by_fold, n=1, cutoff=0.6)
    return f"; did you mean {by_fold[close[0]]!r}?" if close else "."


def checked_kwargs(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    path: str,
    *,
    also_known: Iterable[str] = (),
    unwritable: Iterable[str] = (),
) -> dict[str, Any]:
    """Check ``given`` against the parameters of ``function`` and return it with JSON's types converted.

    The first parameter (``params`` or ``optimizer``) is filled by the caller and is not a key. A whole number
    written as a float (``1e3``) becomes an int where an int is expected; a list becomes a tuple likewise.

    Args:
        function: the class or function that will be called.
        given: keyword arguments as read from JSON.
        path: JSON path of the section, for the messages (``"optimizer.params"``).
        also_known: names that the caller takes out itself, for the "did you mean" hint.
        unwritable: parameters of ``function`` that JSON cannot express; they count as unknown.

    Raises:
        ConfigError: an unknown name, a missing required one, or a wrong type, all in one message.
    """
    parameters = dict(list(inspect.signature(function).parameters.items())[1:])
    for name in unwritable:
        parameters.pop(name, None)
    known = sorted({*parameters, *also_known})
    result: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in given.items():
        if name not in parameters:
            problems.append(
                f"{path}.{name}: {function.__name__} has no parameter {name!r}{did_you_mean(name, known)}"
                f" It takes: {', '.join(known)}."
            )
            continue
        try:
            result[name] = _converted(value, parameters[name])
        except TypeError as error:
            problems.append(f"{path}.{name}: expected {error}, got {value!r}.")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in given:
            problems.append(f"{path}.{name}: {function.__name__} needs it; add it to {path}.")
    if problems:
        raise ConfigError("\n".join(problems))
    return result


def constructed(function: Callable[..., Any], first: object, kwargs: Mapping[str, Any], path: str) -> Any:
    """Call ``function(first, **kwargs)``; what it says of a bad value becomes a ConfigError with the path."""
    try:
        return function(first, **kwargs)
    except ConfigError as error:
        raise ConfigError(f"{path}.{error}") from error
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"{path}: {function.__name__} refused these values: {error}") from error


def _converted(value: Any, parameter: inspect.Parameter) -> Any:
    """``value`` as the parameter's annotation and default ask. Raises TypeError naming what was expected."""
    kinds = _kinds(parameter)
    if value is None:
        if parameter.default is None or "None" in kinds:
            return None
        raise TypeError("a value, not null")
    if isinstance(value, bool) or kinds == {"bool"}:
        if isinstance(value, bool) and "bool" in kinds:
            return value
        raise TypeError(_wording(kinds))
    if isinstance(value, str):
        if "str" in kinds:
            return value
        raise TypeError(_wording(kinds))
    if isinstance(value, (int, float)):
        return _number(value, kinds)
    if isinstance(value, (list, tuple)):
        return _sequence(value, kinds, parameter.default)
    raise TypeError(_wording(kinds))


def _kinds(parameter: inspect.Parameter) -> set[str]:
    """Plain names of the types a parameter takes: its annotation's, or those of its default."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        annotation = type(parameter.default)
    if isinstance(annotation, str):
        members: Iterable[Any] = annotation.split("|")
    elif isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        members = typing.get_args(annotation)
    else:
        members = (annotation,)
    kinds = set()
    for member in members:
        text = member if isinstance(member, str) else str(getattr(member, "__name__", member))
        text = text.strip().split("[")[0].split(".")[-1]
        kinds.add({"NoneType": "None", "Literal": "str"}.get(text, text))
    return kinds


def _number(value: int | float, kinds: set[str]) -> int | float:
    if not kinds & {"int", "float"}:
        raise TypeError(_wording(kinds))
    if not math.isfinite(value):
        raise TypeError("a finite number")
    if "float" in kinds:
        return value
    if value != int(value):
        raise TypeError("a whole number")
    return int(value)


def _sequence(value: Sequence[Any], kinds: set[str], default: object) -> Sequence[Any]:
    if not kinds & _SEQUENCES:
        raise TypeError(_wording(kinds))
    optional = isinstance(default, tuple) and None in default
    for item in value:
        if item is None and optional:
            continue
        if isinstance(item, bool) or not isinstance(item, (int, float)) or not math.isfinite(item):
            raise TypeError("a list of finite numbers")
    if isinstance(default, tuple):
        if len(value) != len(default):
            raise TypeError(f"a list of {len(default)} numbers")
        return tuple(None if item is None else float(item) for item in value)
    return tuple(value) if "tuple" in kinds else list(value)


def _wording(kinds: set[str]) -> str:
    words = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a string"}
    found = [word for kind, word in words.items() if kind in kinds]
    if kinds & _SEQUENCES:
        found.append("a list of numbers")
    return " or ".join(found) if found else "something that JSON cannot express"
