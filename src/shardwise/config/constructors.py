"""`optimizer` and `scheduler`: is there such a class, and does it take these arguments?"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from shardwise.config.fields import Flag, Integer, Number, Section, Text, refuse
from shardwise.config.names import close_name, unknown_key
from shardwise.config.optimizers import OURS, REFUSED, check_uncorrected, extra_checks, refusal
from shardwise.config.problems import Path, Problems, mismatch, show
from shardwise.config.sections import SCHEDULER_PARAMS, OptimizerSection, SchedulerSection
from shardwise.config.validate import validate

# Names that upstream takes in any case.
ANY_CASE = {name.lower(): name for name in ("Adam", "AdamW", "SGD", "Adagrad", *OURS)}

_UNFIT_OPTIMIZERS = {
    "LBFGS": "it evaluates the loss several times a step, which an engine step cannot do",
    "SparseAdam": "it takes sparse gradients only",
}
_UNFIT_SCHEDULERS = {
    "LambdaLR": "it takes a function",
    "MultiplicativeLR": "it takes a function",
    "ChainedScheduler": "it takes scheduler objects",
    "SequentialLR": "it takes scheduler objects",
}

_NON_NEGATIVE = (
    "alpha",
    "eps",
    "initial_accumulator_value",
    "lambd",
    "lr",
    "lr_decay",
    "momentum",
    "momentum_decay",
    "rho",
    "weight_decay",
)


def check_optimizer(section: OptimizerSection, problems: Problems) -> OptimizerSection:
    """Check the optimizer's name and arguments; return the section with its type in the class's spelling."""
    name = ANY_CASE.get(section.type.lower(), section.type)
    path: Path = ("optimizer", "type")
    here: Path = ("optimizer", "params")
    reason = refusal(name)
    if reason is not None:
        problems.add(path, f"{show(name)} {reason}", "refused")
        return section
    if name in OURS:
        checks = dict(OURS[name])
    else:
        classes = _torch_optimizers()
        if name not in classes or name in _UNFIT_OPTIMIZERS:
            others = (*OURS, *REFUSED)
            problems.add(path, _no_such(name, classes, others, _UNFIT_OPTIMIZERS, "a torch.optim class"))
            return section
        checks = _checks(classes[name], skip=("params",))
    checks.update(extra_checks(name))
    if name in ("Adam", "AdamW"):
        checks.pop("decoupled_weight_decay", None)  # adam_w_mode says it
        check_uncorrected(section.params, problems)
    checked = _check_params(section.params, checks, list(checks), here, problems)
    return section.model_copy(update={"type": name, "params": checked})


def check_scheduler(section: SchedulerSection, problems: Problems) -> SchedulerSection:
    """Check the scheduler's name and arguments; return the section with integers as integers."""
    path: Path = ("scheduler", "type")
    here: Path = ("scheduler", "params")
    model = SCHEDULER_PARAMS.get(section.type)
    if model is not None:
        return section.model_copy(update={"params": _check_model(section.params, model, here, problems)})
    classes = _torch_schedulers()
    if section.type not in classes or section.type in _UNFIT_SCHEDULERS:
        what = f"one of {', '.join(SCHEDULER_PARAMS)} or a torch.optim.lr_scheduler class"
        problems.add(path, _no_such(section.type, classes, SCHEDULER_PARAMS, _UNFIT_SCHEDULERS, what))
        return section
    checks = _checks(classes[section.type], skip=("optimizer",))
    checked = _check_params(section.params, checks, list(checks), here, problems)
    for name in _required(classes[section.type], skip=("optimizer",)):
        if checked.get(name) is None:
            problems.add((*here, name), f"missing; {section.type} needs it")
    return section.model_copy(update={"params": checked})


def _no_such(name: str, classes: Mapping[str, object], others: object, unfit: Mapping[str, str], what: str) -> str:
    if name in classes and name in unfit:
        return f"{show(name)} cannot be used from a config: {unfit[name]}; expected another of {what}"
    names = [*classes, *others] if isinstance(others, (tuple, dict)) else list(classes)
    return f"{show(name)} is unknown; expected {what}{close_name(name, names)}"


def _torch_optimizers() -> dict[str, type]:
    import torch

    base = torch.optim.Optimizer
    found = {name: each for name, each in vars(torch.optim).items() if isinstance(each, type)}
    return {name: each for name, each in found.items() if issubclass(each, base) and each is not base}


def _torch_schedulers() -> dict[str, type]:
    from torch.optim import lr_scheduler

    base = lr_scheduler.LRScheduler
    found = {name: each for name, each in vars(lr_scheduler).items() if isinstance(each, type)}
    return {
        name: each
        for name, each in found.items()
        if issubclass(each, base) and each is not base and not name.startswith("_")
    }


def _arguments(cls: type, skip: tuple[str, ...]) -> list[inspect.Parameter]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(cls).parameters.values()
    return [each for each in parameters if each.kind in named and each.name not in skip]


def _required(cls: type, skip: tuple[str, ...]) -> list[str]:
    return [each.name for each in _arguments(cls, skip) if each.default is inspect.Parameter.empty]


Check = Callable[[object], Any]


def _checks(cls: type, skip: tuple[str, ...]) -> dict[str, Check]:
    return {each.name: _check_of(each) for each in _arguments(cls, skip)}


def _check_of(argument: inspect.Parameter) -> Check:
    """Derive from an argument's default and annotation what it takes."""
    default, hint = argument.default, str(argument.annotation)
    if isinstance(default, bool):
        return Flag()
    if isinstance(default, tuple):
        low, below = (0, 1) if argument.name == "betas" else (None, None)
        return _Numbers(default, low, below)
    check = _check_of_hint(argument, hint)
    return _OrNull(check) if default is None else check


def _check_of_hint(argument: inspect.Parameter, hint: str) -> Check:
    required = argument.default is inspect.Parameter.empty
    if "Callable" in hint:
        return _refuse_function
    if "bool" in hint:
        return Flag()
    if "Literal[" in hint:
        return Text({choice.lower(): choice for choice in re.findall(r"'(\w+)'", hint)})
    if "str" in hint:
        return Text()
    if "Iterable[int]" in hint:
        return _OneOrMore(Integer(0), one=False)
    if "float" not in hint and "int" in hint:
        if argument.name == "last_epoch":
            return Integer(0, also=(-1,))
        step = required or argument.default is None or argument.name.startswith(("step_size", "T_"))
        return Integer(1 if step else 0)
    number = Number(low=0 if argument.name in _NON_NEGATIVE else None)
    return _OneOrMore(number) if "list[float]" in hint else number


class _OrNull:
    def __init__(self, check: Check) -> None:
        self._check = check

    def __call__(self, value: object) -> object:
        return None if value is None else self._check(value)


class _OneOrMore:
    """A number, or a list of numbers (one a parameter group)."""

    def __init__(self, check: Check, one: bool = True) -> None:
        self._check = check
        self._one = one

    def __call__(self, value: object) -> object:
        if isinstance(value, list) and value:
            return [self._check(item) for item in value]
        if not self._one:
            raise refuse(mismatch(value, "a list of numbers"))
        return self._check(value)


class _Numbers:
    """A list of as many numbers as the default has (null where the default is None)."""

    def __init__(self, default: tuple[object, ...], low: float | None, below: float | None) -> None:
        number = Number(low=low, below=below)
        self._checks: list[Check] = [_OrNull(number) if each is None else number for each in default]
        bounds = ", each from 0 up to but not 1" if below == 1 else ""
        self.what = f"a list of {len(default)} numbers{bounds}"

    def __call__(self, value: object) -> object:
        if not isinstance(value, list) or len(value) != len(self._checks):
            raise refuse(mismatch(value, self.what))
        try:
            return [check(item) for check, item in zip(self._checks, value, strict=True)]
        except PydanticCustomError as error:
            raise refuse(f"{show(value)} does not fit: {error.message()}; expected {self.what}") from None


def _refuse_function(value: object) -> object:
    if value is None:
        return None
    raise refuse(f"{show(value)} stands for a Python function, which a config cannot hold; remove it")


def _check_params(
    params: Mapping[str, object],
    checks: Mapping[str, Check],
    known: list[str],
    path: Path,
    problems: Problems,
) -> dict[str, object]:
    result: dict[str, object] = {}
    for name, value in params.items():
        here = (*path, name)
        check = checks.get(name)
        if check is None:
            problems.add(here, unknown_key(here, known), "unknown")
            continue
        if value is None and not isinstance(check, _OrNull):
            continue  # null is absent
        try:
            result[name] = check(value)
        except PydanticCustomError as error:
            problems.add(here, error.message())
    return result


def _check_model(
    params: Mapping[str, object], model: type[Section], path: Path, problems: Problems
) -> dict[str, object]:
    checked = validate(model, dict(params), path, problems)
    if checked is None:
        return dict(params)
    return {name: getattr(checked, name) for name in params if name in model.model_fields}
