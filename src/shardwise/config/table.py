"""Take the keys that are not honoured out of a config: values that ask for nothing aside, others reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.config.keys import Group, Key, State
from shardwise.config.problems import Path, Problems, mismatch, show
from shardwise.config.table_tools import TOOLS
from shardwise.config.table_training import TRAINING

TABLE = Group({**TRAINING, **TOOLS}, honoured=True, state="not yet")


@dataclass(frozen=True)
class Reason:
    """What becomes of a key that asks for something, and why."""

    state: State = "not yet"
    why: str = ""

    def within(self, spec: Group | Key) -> Reason:
        """The same, as a key or a section in it says it."""
        return Reason(spec.state or self.state, spec.why or ("" if spec.state else self.why))


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

    def strip(
        self, raw: Json, group: Group, path: Path = (), asleep: bool = False, reason: Reason = Reason()
    ) -> tuple[Json, Json]:
        """Split an object.

        Args:
            raw: the object as written.
            group: its row of the table.
            path: where the object stands.
            asleep: a switch above is off, so that nothing in it asks for anything.
            reason: what becomes of what asks for something, by what holds the object.

        Returns:
            What is left for the honoured sections, and what is inert.
        """
        reason = reason.within(group)
        asleep = asleep or self._settle(raw, group, path, reason)
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
                self._scalar(value, spec, here, asleep, reason.within(spec))
                inert[name] = value
            elif not isinstance(value, dict):
                self._problems.add(here, mismatch(value, "an object {...}"))
            else:
                left, aside = self.strip(value, spec, here, asleep, reason)
                if spec.honoured:
                    rest[name] = left
                if aside or not spec.honoured:
                    inert[name] = aside
        return rest, inert

    def _settle(self, raw: Json, group: Group, path: Path, reason: Reason) -> bool:
        """Report a group that asks for something as a whole; return whether its keys need no further look."""
        if group.switch is not None:
            value = _state(raw, group)
            switch = (*path, *group.switch.split("."))
            if type(value) is not type(group.off[0]):
                return True  # reported as a wrong type
            if raw and not is_inert(value, group.off):
                self._report(switch, show(value), reason, group.off)
            return True
        if group.request or (group.open and raw):
            self._report(path, "this section", reason, ())
            return True
        return False

    def _scalar(self, value: object, key: Key, path: Path, asleep: bool, reason: Reason) -> None:
        if not is_kind(value, key):
            self._problems.add(path, mismatch(value, describe(key)))
        elif not asleep and reason.state != "no effect" and not is_inert(value, key.inert):
            self._report(path, show(value), reason, key.inert)

    def _report(self, path: Path, what: str, reason: Reason, inert: tuple[object, ...]) -> None:
        if reason.state == "refused":
            self._problems.add(path, f"{what} is refused: {reason.why}", "refused")
            return
        instead = f" or write {show(inert[0])}" if inert else ""
        needs = f" ({reason.why})" if reason.why else ""
        self._problems.add(
            path, f"{what} asks for what has not landed in shardwise yet{needs}; remove it{instead}", "later"
        )
