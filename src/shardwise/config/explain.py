"""What a configuration means: a row a key, with its value, where that came from, its state and what it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.config.config import Config
from shardwise.config.fields import Section
from shardwise.config.keys import Group, Key
from shardwise.config.says import Says
from shardwise.config.sections import BATCH_KEYS, BATCH_SAYS, SCHEDULER_PARAMS, SECTIONS, TopLevel
from shardwise.config.table import TABLE, Reason

Origin = Literal["file", "default", "auto", "derived"]
KeyState = Literal["honoured", "no effect", "refused", "not yet"]

SECRET = "(not shown)"

_ARGUMENTS = {
    "lr": "the learning rate of every group that names none",
    "betas": "decay of the running means",
    "eps": "added to the denominator",
    "weight_decay": "how far each step shrinks the weights",
    "momentum": "decay of the running mean of the gradient",
    "adam_w_mode": "whether weight decay acts on the weights (AdamW) or on the gradient",
    "bias_correction": "whether the running means are corrected for their start at zero",
    "max_coeff": "the largest ratio of the norms of a parameter and of its direction",
    "min_coeff": "the smallest ratio of the norms of a parameter and of its direction",
    "eps_inside_sqrt": "whether eps is added under the root",
    "muon_lr": "the learning rate of hidden matrices",
    "adam_lr": "the learning rate of what is no hidden matrix",
    "ns_method": "the iteration that makes a matrix orthogonal",
    "max_grad_norm": "gradients are scaled down to this norm, as by gradient_clipping",
    "total_num_steps": "optimizer steps of the whole schedule",
    "warmup_num_steps": "optimizer steps of the warm-up",
    "warmup_min_lr": "the rate that the warm-up starts from",
    "warmup_max_lr": "the rate that the warm-up ends at, whatever the optimizer's lr",
    "warmup_type": "the shape of the warm-up",
    "last_batch_iteration": "the step that the schedule goes on from",
}
_ARGUMENTS_WITHOUT_EFFECT = {
    "torch_adam": "there is one Adam here, torch's",
    "fp32_optimizer_states": "the state has the dtype of the weights that are stepped",
}
CLIPPING = "gradient_clipping"


@dataclass(frozen=True)
class Row:
    """One key.

    Attributes:
        key: its JSON path.
        value: what is in force.
        origin: where the value came from; ``derived``: from other keys (the batch sizes from each other).
        state: what becomes of it in this run.
        line: what it does, or why it does nothing.
    """

    key: str
    value: Any
    origin: Origin
    state: KeyState
    line: str


def explain(config: Config) -> list[Row]:
    """A row for every key that shardwise knows, those of the arguments of optimizer and scheduler included."""
    rows = [_batch_row(config, key) for key in BATCH_KEYS]
    rows += _section_rows(config, TopLevel, config, "")
    for name in SECTIONS:
        section = getattr(config, name)
        if section is not None:
            rows += _section_rows(config, type(section), section, f"{name}.")
        if name in ("optimizer", "scheduler") and section is not None:
            rows += _argument_rows(config, name, section.type, section.params)
    rows += _table_rows(config, TABLE, "", config.no_effect, Reason())
    return rows


def _origin(config: Config, key: str) -> Origin:
    if key in config.filled:
        return "auto"
    # A list is written whole, an object key by key.
    if key in config.written or any(path.startswith((f"{key}[", f"{key}.")) for path in config.written):
        return "file"
    if key == CLIPPING and clipped_by_the_optimizer(config):
        return "derived"
    return "default"


def clipped_by_the_optimizer(config: Config) -> bool:
    """Whether the norm that gradients are clipped to is written among the optimizer's arguments only."""
    given = config.optimizer.params.get("max_grad_norm") if config.optimizer is not None else None
    return bool(given) and CLIPPING not in config.written


def _batch_row(config: Config, key: str) -> Row:
    origin = _origin(config, key)
    return Row(
        key,
        getattr(config, key),
        "derived" if origin == "default" else origin,
        "honoured",
        BATCH_SAYS[key].of(0, config),
    )


def _section_rows(config: Config, model: type[Section], section: Any, prefix: str) -> Iterator[Row]:
    for name, field in model.model_fields.items():
        value, key = getattr(section, name), prefix + name
        if isinstance(value, Section):
            yield from _section_rows(config, type(value), value, f"{key}.")
            continue
        says = next((data for data in field.metadata if isinstance(data, Says)), None)
        if says is not None:
            yield _row(config, key, value, says)


def _row(config: Config, key: str, value: Any, says: Says) -> Row:
    shown = SECRET if says.secret and value is not None else value
    line = says.of(shown, config)
    origin = _origin(config, key)
    if says.no_effect:
        return Row(key, shown, origin, "no effect", line)
    if says.when is not None and not says.when.holds(config):
        return Row(key, shown, origin, "no effect", says.when.need)
    return Row(key, shown, origin, "honoured", line)


def _argument_rows(config: Config, section: str, kind: str, params: Mapping[str, Any]) -> Iterator[Row]:
    model = SCHEDULER_PARAMS.get(kind) if section == "scheduler" else None
    defaults = {n: f.default for n, f in model.model_fields.items() if not f.is_required()} if model else {}
    for name, value in {**defaults, **params}.items():
        key = f"{section}.params.{name}"
        why = _without_effect(kind, name, value) if section == "optimizer" else None
        line = _ARGUMENTS.get(name, f"an argument of {kind}")
        if name == "warmup_max_lr" and value is None:
            line = "the warm-up ends at the optimizer's lr"
        yield Row(key, value, _origin(config, key), "no effect" if why else "honoured", why or line)


def _without_effect(kind: str, name: str, value: Any) -> str | None:
    if name == "adam_w_mode" and value is False and kind == "AdamW":
        return "AdamW is AdamW, as upstream; write type Adam"
    return _ARGUMENTS_WITHOUT_EFFECT.get(name)


def _table_rows(config: Config, group: Group, prefix: str, values: Any, reason: Reason) -> Iterator[Row]:
    reason = reason.within(group)
    for name, spec in group.keys.items():
        key = prefix + name
        value = values.get(name) if isinstance(values, Mapping) else None
        if isinstance(spec, Group) and (spec.keys or not value):
            if spec.keys:
                yield from _table_rows(config, spec, f"{key}.", value, reason)
            else:
                yield _table_row(config, key, None, reason.within(spec), ())
            continue
        inner = reason.within(spec)
        inert = spec.inert if isinstance(spec, Key) else ()
        default = inert[0] if inert else None
        yield _table_row(config, key, default if value is None else value, inner, inert)


def _table_row(config: Config, key: str, value: Any, reason: Reason, inert: tuple[object, ...]) -> Row:
    origin = _origin(config, key)
    if reason.state == "no effect" or origin != "default":
        # A value that asks for something would have been an error.
        why = reason.why if reason.state == "no effect" else "asks for nothing"
        return Row(key, value, origin, "no effect", why)
    why = f"has not landed: {reason.why}" if reason.state == "not yet" else reason.why
    return Row(key, value, origin, reason.state, why)
