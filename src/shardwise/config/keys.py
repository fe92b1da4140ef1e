"""The language of the tables of known keys whose capability has not landed.

Each key lists the values that ask for nothing: `{"enabled": false}` or a documented default requests exactly
what happens anyway, so it is accepted. Every other value is refused by name. A key leaves its table when
`sections.py` gains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Key:
    """A key and its inert values (null is always one). `kinds`: the JSON types that it may have at all."""

    inert: tuple[object, ...]
    kinds: tuple[type, ...]


@dataclass(frozen=True)
class Group:
    """A section.

    Args:
        keys: what it may hold.
        switch: the key (dotted, seen from the section) that turns the section on; while it is off, the other
            keys ask for nothing.
        off: the values of the switch that turn the section off.
        absent: what the switch is taken for when the section does not name it.
        honoured: `sections.py` knows further keys of it.
        open: further keys of any name are allowed; without a switch, any of them asks for something.
        request: a section that is written at all asks for something.
    """

    keys: Mapping[str, Key | Group] = field(default_factory=dict)
    switch: str | None = None
    off: tuple[object, ...] = (False,)
    absent: object = False
    honoured: bool = False
    open: bool = False
    request: bool = False


def flag(inert: bool = False, *others: bool) -> Key:
    """A boolean."""
    return Key((inert, *others), (bool,))


def integer(*inert: int) -> Key:
    """An integer."""
    return Key(inert, (int,))


def number(*inert: float) -> Key:
    """A number."""
    return Key(inert, (int, float))


def text(*inert: str) -> Key:
    """A string."""
    return Key(inert, (str,))


def items(*inert: object) -> Key:
    """A list."""
    return Key(inert, (list,))


def anything(*inert: object) -> Key:
    """Any JSON value."""
    return Key(inert, (bool, int, float, str, list, dict))


def switched(*, open: bool = False, **keys: Key | Group) -> Group:
    """A section with an `enabled` key, false by default."""
    return Group({"enabled": flag(), **keys}, switch="enabled", open=open)
