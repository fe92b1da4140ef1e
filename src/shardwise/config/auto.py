""" "auto": filled from what the caller knows, left to the batch identity, or refused; never quietly false."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.config.fields import Section, expected
from shardwise.config.keys import Group, Key
from shardwise.config.loading import plain
from shardwise.config.problems import Path, Problems, format_path, show
from shardwise.config.sections import BATCH_KEYS, SCHEDULER_PARAMS, SECTIONS, TopLevel, ZeroSection
from shardwise.config.table import TABLE, describe
from shardwise.errors import ConfigError

# The keys whose default is right for every model, if not the fastest.
DEFAULTED: dict[str, object] = {
    "gradient_clipping": TopLevel.model_fields["gradient_clipping"].default,
    **{
        f"zero_optimization.{name}": ZeroSection.model_fields[name].default
        for name in (
            "reduce_bucket_size",
            "allgather_bucket_size",
            "sub_group_size",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
        )
    },
}


def of_width(hidden: int) -> dict[str, object]:
    """What "auto" bucket sizes become for a model of this width: the sizes that Hugging Face's integration fills in."""
    return {
        "zero_optimization.reduce_bucket_size": hidden**2,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * hidden**2),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden,
    }


class Auto:
    """The "auto" values of one config.

    Args:
        given: what to fill in, by JSON path (`{"bf16.enabled": True}`).
        problems: where to report.
    """

    def __init__(self, given: Mapping[str, object] | None, problems: Problems) -> None:
        self._problems = problems
        self._given = {_present_name(path): value for path, value in (given or {}).items()}
        self._open: list[Path] = []
        self.filled: dict[str, object] = {}
        self.batch: list[str] = []
        """The batch keys that were "auto" and have to come out of the batch identity."""

    def fill(self, value: object, path: Path = ()) -> object:
        """Return a copy of a config with every "auto" replaced that can be."""
        if isinstance(value, dict):
            return self._fill_object(value, path)
        if isinstance(value, list):
            return [self._fill_one(item, (*path, index)) for index, item in enumerate(value)]
        return value

    def _fill_object(self, value: dict[str, object], path: Path) -> dict[str, object]:
        result: dict[str, object] = {}
        for key, item in value.items():
            here = (*path, key)
            if item != "auto" or self._given.get(format_path(here)) is not None:
                result[key] = self._fill_one(item, here)
            elif path == () and key in BATCH_KEYS:
                self.batch.append(key)
            elif format_path(here) in DEFAULTED:
                self.filled[format_path(here)] = DEFAULTED[format_path(here)]
            else:
                result[key] = self._fill_one(item, here)
        return result

    def _fill_one(self, item: object, path: Path) -> object:
        if item != "auto":
            return self.fill(item, path)
        given = self._given.get(format_path(path))
        if given is not None and given != "auto":
            self.filled[format_path(path)] = value = plain(given, path, self._problems)
            return value
        if not _own_value(path):
            self._open.append(path)
        return item

    def report(self) -> None:
        """Report what is still "auto", instead of what else was found wrong with the word."""
        for path in self._open:
            above = (self._problems.found.get(path[:end]) for end in range(len(path) + 1))
            if any(problem is not None and problem.kind == "unknown" for problem in above):
                continue
            self._problems.found.pop(path, None)
            name = format_path(path)
            self._problems.add(
                path,
                f'"auto" was left without a value; write {_expected(path)}, or fill it in: --auto {name}=VALUE on the '
                f"command line, auto={{{show(name)}: VALUE}} in Python",
            )


def _present_name(path: object) -> str:
    if not isinstance(path, str):
        raise ConfigError(f'auto: its keys are JSON paths such as "bf16.enabled", got {path!r}')
    return "bf16." + path.removeprefix("bfloat16.") if path.startswith("bfloat16.") else path


def _table_key(path: Path) -> Key | Group | None:
    spec: Key | Group | None = TABLE
    for part in path:
        spec = spec.keys.get(str(part)) if isinstance(spec, Group) else None
    return spec


def _own_value(path: Path) -> bool:
    """Whether "auto" is a value of this key in its own right."""
    spec = _table_key(path)
    return isinstance(spec, Key) and "auto" in spec.inert


def _expected(path: Path) -> str:
    if len(path) == 1 and path[0] in SECTIONS:
        return "an object {...}"
    model: type[Section] | None = TopLevel if len(path) == 1 else SECTIONS.get(str(path[0]))
    if model is not None and len(path) <= 2 and path[-1] in model.model_fields:
        return expected(model, str(path[-1]))
    if path[:2] == ("scheduler", "params") and len(path) == 3:
        for params in SCHEDULER_PARAMS.values():
            if path[2] in params.model_fields:
                return expected(params, str(path[2]))
    spec = _table_key(path)
    if isinstance(spec, Key):
        return show(spec.inert[0]) if spec.inert else describe(spec)
    return "a value"
