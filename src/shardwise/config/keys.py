"""The language of the tables of known keys that are not honoured: refused, without effect, or not yet there.

A key that is refused or not yet there lists the values that ask for nothing: `{"enabled": false}` or a documented
default requests exactly what happens anyway, so it is accepted. Every other value is refused by name. Of a key without
effect every value is accepted, and reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

State = Literal["no effect", "refused", "not yet"]


@dataclass(frozen=True)
class Key:
    """A key.

    Args:
        inert: the values that ask for nothing, the default first; null is always one.
        kinds: the JSON types that it may have at all.
        state: what becomes of other values; None: as the section that holds it.
        why: the reason and, where there is one, what to write instead.
    """

    inert: tuple[object, ...]
    kinds: tuple[type, ...]
    state: State | None = None
    why: str = ""


@dataclass(frozen=True)
class Group:
    """A section.

    Args:
        keys: what it may hold.
        switch: the key (dotted, seen from the section) that turns the section on; while it is off, the other
            keys ask for nothing.
        off: the values of the switch that turn the section off.
        absent: what the switch is taken for when the section does not name it.
        honoured: the pydantic sections know further keys of it.
        open: further keys of any name are allowed; without a switch, any of them asks for something.
        request: a section that is written at all asks for something.
        state: what becomes of its keys, where they do not say so themselves.
        why: the reason and, where there is one, what to write instead.
    """

    keys: Mapping[str, Key | Group] = field(default_factory=dict)
    switch: str | None = None
    off: tuple[object, ...] = (False,)
    absent: object = False
    honoured: bool = False
    open: bool = False
    request: bool = False
    state: State | None = None
    why: str = ""


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


def without_effect(key: Key, why: str) -> Key:
    """A key any value of which changes nothing, and why."""
    return replace(key, state="no effect", why=why)


def refused_key(key: Key, why: str) -> Key:
    """A key whose values are refused, and why."""
    return replace(key, state="refused", why=why)


def refused(group: Group, why: str) -> Group:
    """A section that is refused, and why."""
    return replace(group, state="refused", why=why)


def not_yet(group: Group, why: str) -> Group:
    """A section that has not landed, and what lands it."""
    return replace(group, state="not yet", why=why)
