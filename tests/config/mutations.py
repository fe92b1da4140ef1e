"""Random edits of a config, as people make them: typo, wrong type, negative, huge, in the wrong place."""

from __future__ import annotations

import copy
import random
import string
from dataclasses import dataclass
from typing import Any

KINDS = ("typo", "wrong type", "negative", "huge", "misplaced")

# Below these, any key is allowed as long as the section is off.
OPEN_SECTIONS = ("amp",)


@dataclass
class Edit:
    """An edited config; `path` is where the edited key stands now, `value` what it holds."""

    kind: str
    config: dict[str, Any]
    path: tuple[str, ...]
    value: Any


def paths(config: Any, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every key, sections included."""
    found = []
    for key, value in config.items():
        found.append((*above, key))
        if isinstance(value, dict):
            found += paths(value, (*above, key))
    return found


def at(config: Any, path: tuple[str, ...]) -> Any:
    """The value at a path."""
    for part in path:
        config = config[part]
    return config


def mutate(config: dict[str, Any], kind: str, rng: random.Random) -> Edit:
    """Edit one key of a copy of the config."""
    config = copy.deepcopy(config)
    path = rng.choice([path for path in paths(config) if path[0] not in OPEN_SECTIONS])
    if kind in ("negative", "huge"):
        path = rng.choice([path for path in paths(config) if _is_number(at(config, path))])
    section, key = at(config, path[:-1]), path[-1]
    if kind == "typo":
        typo = _typo(key, rng)
        while typo in section:
            typo = _typo(key, rng)
        section[typo] = section.pop(key)
        path = (*path[:-1], typo)
    elif kind == "wrong type":
        section[key] = _of_another_type(section[key], rng)
    elif kind == "negative":
        section[key] = -section[key] or -1
    elif kind == "huge":
        section[key] = rng.choice([float("inf"), float("-inf"), 1e300, 10**400, 2**63, 2**70, 1e19])
    else:
        value = section.pop(key)
        homes = [(), *(path for path in paths(config) if isinstance(at(config, path), dict))]
        homes = [home for home in homes if home != path[:-1] and home[:1] not in (("amp",), path)]
        home = rng.choice(homes)
        at(config, home)[key] = value
        path = (*home, key)
    return Edit(kind, config, path, at(config, path))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _of_another_type(value: Any, rng: random.Random) -> Any:
    others: list[Any] = [True, "text", "auto", 7, 0.5, [], [1], {}, {"enabled": True}, "", "1"]
    numeric = _is_number(value)
    return rng.choice(
        [other for other in others if type(other) is not type(value) and not (numeric and _is_number(other))]
    )


def _typo(key: str, rng: random.Random) -> str:
    letters = list(key)
    where = rng.randrange(len(letters))
    kind = rng.randrange(5)
    if kind == 0:
        letters.insert(where, rng.choice(string.ascii_lowercase))
    elif kind == 1 and len(letters) > 1:
        del letters[where]
    elif kind == 2 and len(letters) > 1:
        other = (where + 1) % len(letters)
        letters[where], letters[other] = letters[other], letters[where]
    elif kind == 3:
        letters[where] = rng.choice(string.ascii_lowercase + "-")
    else:
        letters[where] = letters[where].upper()
    return key + "_" if "".join(letters) == key else "".join(letters)
