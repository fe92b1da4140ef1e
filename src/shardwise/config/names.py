"""What to say about a key that is not known: the key that was probably meant, or where it belongs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import lru_cache

from pydantic import BaseModel

from shardwise.config.keys import Group
from shardwise.config.problems import Path, format_path
from shardwise.config.sections import (
    BATCH_KEYS,
    COMMON_OPTIMIZER_PARAMS,
    SCHEDULER_PARAMS,
    SECTIONS,
    TopLevel,
)
from shardwise.config.table import TABLE

# Spellings that appear in documentation or configs, but that no code ever read.
RENAMED = {
    "zero_optimization.grad_hooks": "there is no such setting; remove it",
    "aio.thread_count": 'write "intra_op_parallelism"',
    "elasticity.prefer_large_batch": 'write "prefer_larger_batch"',
    "activation_checkpointing.partitioned_activations": 'write "partition_activations"',
    "optimizer.params.decoupled_weight_decay": 'write "adam_w_mode": true',
}

_FP16_ONLY = (
    "auto_cast",
    "loss_scale",
    "loss_scale_window",
    "initial_scale_power",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)


@lru_cache(maxsize=1)
def known_keys() -> Mapping[Path, tuple[str, ...]]:
    """Every section's path (the top level is the empty path) and the keys that it may hold."""
    found: dict[Path, set[str]] = {(): {*TopLevel.model_fields, *BATCH_KEYS, *SECTIONS}}
    for name, model in SECTIONS.items():
        _add_model(found, (name,), model)
    _add_group(found, (), TABLE)
    found[("optimizer", "params")] = set(COMMON_OPTIMIZER_PARAMS)
    found[("scheduler", "params")] = {name for model in SCHEDULER_PARAMS.values() for name in model.model_fields}
    return {path: tuple(sorted(keys)) for path, keys in found.items()}


def _add_model(found: dict[Path, set[str]], path: Path, model: type[BaseModel]) -> None:
    found.setdefault(path, set()).update(model.model_fields)
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            _add_model(found, (*path, name), field.annotation)


def _add_group(found: dict[Path, set[str]], path: Path, group: Group) -> None:
    found.setdefault(path, set()).update(group.keys)
    for name, spec in group.keys.items():
        if isinstance(spec, Group):
            _add_group(found, (*path, name), spec)


def unknown_key(path: Path, known: Iterable[str] | None = None) -> str:
    """Explain an unknown key.

    Args:
        path: where the key stands, the key last.
        known: the keys that its section takes; default: what `known_keys` says about the section.
    """
    section, key = path[:-1], str(path[-1])
    hint = RENAMED.get(format_path(path))
    if hint:
        return f"unknown key; {hint}"
    if section == ("bf16",) and key in _FP16_ONLY:
        return "unknown key; loss scaling is for fp16 only, bf16 has the range of fp32 and needs none: remove it"
    names = list(known_keys().get(section, ()) if known is None else known)
    if key in known_keys().get(section, ()):
        return f"unknown key for this {format_path(section[:1])}.type, which takes {', '.join(sorted(names))}"
    elsewhere = [other for other, keys in known_keys().items() if key in keys and other != section]
    if elsewhere and not difflib.get_close_matches(key, names, n=1, cutoff=0.9):
        return f"unknown key here; {_belongs(elsewhere, key)}"
    close = difflib.get_close_matches(key, names, n=1) or [
        name for name in names if name.lower().replace("_", "") == key.lower().replace("_", "").replace("-", "")
    ]
    if close:
        return f'unknown key; did you mean "{close[0]}"?'
    return f"unknown key; {_far_match(section, key) or _choices(section, names)}"


def _belongs(sections: list[Path], key: str) -> str:
    sections = sorted(sections, key=lambda path: (len(path), path))
    if () in sections:
        return f'"{key}" belongs at the top level of the config'
    names = [format_path(path) for path in sections]
    more = f" and {len(names) - 3} other sections" if len(names) > 3 else ""
    return f'"{key}" belongs in {" or ".join(names[:3])}{more}'


def _far_match(section: Path, key: str) -> str | None:
    everywhere = {name for keys in known_keys().values() for name in keys if len(name) > 5}
    close = difflib.get_close_matches(key, sorted(everywhere), n=1, cutoff=0.8)
    if not close:
        return None
    places = [other for other, keys in known_keys().items() if close[0] in keys and other != section]
    return f'did you mean "{close[0]}"? {_belongs(places, close[0])}' if places else None


def _choices(section: Path, names: list[str]) -> str:
    where = f"in {format_path(section)}" if section else "at the top level"
    if not names or len(names) > 12:
        return f"nothing like it is known {where}; remove it"
    return f"known {where}: {', '.join(sorted(names))}"


def close_name(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean "..."?` when one of the names is close, whatever its case."""
    by_lower = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=1)
    return f'; did you mean "{by_lower[close[0]]}"?' if close else ""
