"""Take the keys whose capability has not landed out of a config: inert values aside, others reported."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.config.keys import Group, Key
from shardwise.config.later_tools import TOOLS
from shardwise.config.later_training import TRAINING
from shardwise.config.problems import Path, Problems, mismatch, show

LATER = Group({**TRAINING, **TOOLS}, honoured=True)

_KIND_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list [...]",
    dict: "an object {...}",
}

Json = dict[str, object]


def describe(key: Key) -> str:
    """Say in words which type a key takes."""
    if float in key.kinds and str in key.kinds:
        return "a value"
    return "a number" if float in key.kinds else " or ".join(_KIND_NAMES[kind] for kind in key.kinds)


def is_kind(value: object, key: Key) -> bool:
    """Whether a value has a type that the key may have."""
    if isinstance(value, bool):
        return bool in key.kinds
    if isinstance(value, float) and value.is_integer() and int in key.kinds:
        return True
    return isinstance(value, tuple(kind for kind in key.kinds if kind is not bool))


def is_inert(value: object, inert: tuple[object, ...]) -> bool:
    """Whether a value is one of those that ask for nothing; `0` is not `false`."""
    return any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in inert)


def _state(raw: Json, group: Group) -> object:
    value: object = raw
    for part in (group.switch or "").split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return group.absent if value is None else value


class Stripper:
    """One walk over a config beside a table.

    Args:
        problems: where to report.
        unknown: explains a key that the table does not have.
    """

    def __init__(self, problems: Problems, unknown: Callable[[Path], str]) -> None:
        self._problems = problems
        self._unknown = unknown

    def strip(self, raw: Json, group: Group, path: Path = (), asleep: bool = False) -> tuple[Json, Json]:
        """Split an object.

        Args:
            raw: the object as written.
            group: its row of the table.
            path: where the object stands.
            asleep: a switch above is off, so that nothing in it asks for anything.

        Returns:
            What is left for the honoured sections, and what is inert.
        """
        asleep = asleep or self._settle(raw, group, path)
        rest: Json = {}
        inert: Json = {}
        for name, value in raw.items():
            here = (*path, name)
            spec = group.keys.get(name)
            if spec is None and group.honoured:
                rest[name] = value
            elif spec is None and group.open:
                inert[name] = value
            elif spec is None:
                self._problems.add(here, self._unknown(here), "unknown")
            elif value is None:
                continue
            elif isinstance(spec, Key):
                self._scalar(value, spec, here, asleep)
                inert[name] = value
            elif not isinstance(value, dict):
                self._problems.add(here, mismatch(value, "an object {...}"))
            else:
                left, aside = self.strip(value, spec, here, asleep)
                if spec.honoured:
                    rest[name] = left
                if aside or not spec.honoured:
                    inert[name] = aside
        return rest, inert

    def _settle(self, raw: Json, group: Group, path: Path) -> bool:
        """Report a group that asks for something as a whole; return whether its keys need no further look."""
        if group.switch is not None:
            value = _state(raw, group)
            switch = (*path, *group.switch.split("."))
            if type(value) is not type(group.off[0]):
                return True  # reported as a wrong type
            if raw and not is_inert(value, group.off):
                self._later(switch, value, group.off)
            return True
        if group.request or (group.open and raw):
            self._problems.add(path, "this capability has not landed in shardwise yet; remove it", "later")
            return True
        return False

    def _scalar(self, value: object, key: Key, path: Path, asleep: bool) -> None:
        if not is_kind(value, key):
            self._problems.add(path, mismatch(value, describe(key)))
        elif not asleep and not is_inert(value, key.inert):
            self._later(path, value, key.inert)

    def _later(self, path: Path, value: object, inert: tuple[object, ...]) -> None:
        instead = f" or write {show(inert[0])}" if inert else ""
        self._problems.add(
            path,
            f"{show(value)} asks for what has not landed in shardwise yet; remove the key{instead}",
            "later",
        )
