"""What a key does, written beside the key: `shardwise explain` and the start of a run read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class When:
    """A condition on the whole configuration.

    Args:
        need: the condition in words, as in "only at stage 3".
        holds: takes the `Config`.
    """

    need: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Says:
    """One line on a key; metadata of a section's field.

    Args:
        line: what the key does: a sentence in which `{}` stands for the value, one a value, or a function of the
            value and the `Config`.
        when: without this the key has no effect in the run.
        no_effect: the key never has an effect; the line is the reason.
        secret: the value is not to be shown.
    """

    line: str | Mapping[Any, str] | Callable[[Any, Any], str]
    when: When | None = None
    no_effect: bool = False
    secret: bool = False

    def of(self, value: object, config: object) -> str:
        """The line for a value in a configuration."""
        if isinstance(self.line, str):
            return self.line.replace("{}", _number(value))
        if isinstance(self.line, Mapping):
            return self.line.get(value, self.line.get(None, ""))
        return self.line(value, config)


def _number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def world_size(config: Any) -> int:
    """The number of ranks that the batch sizes were resolved for."""
    return int(config.train_batch_size // (config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps))


def low_precision(config: Any) -> bool:
    """Whether parameters are cast to 16 bits."""
    return bool(config.fp16.enabled or config.bf16.enabled)


SEVERAL_RANKS = When("only with several ranks", lambda c: world_size(c) > 1)
WINDOWS = When("only with several micro-steps a window", lambda c: c.gradient_accumulation_steps > 1)
STAGE_3 = When("only at zero_optimization.stage 3", lambda c: c.zero_optimization.stage == 3)
SHARDED = When("only from zero_optimization.stage 1 on", lambda c: c.zero_optimization.stage > 0)
FP16 = When("only with fp16.enabled", lambda c: c.fp16.enabled)
DYNAMIC_SCALE = When("only with fp16.enabled and loss_scale 0", lambda c: c.fp16.enabled and not c.fp16.loss_scale)
BF16 = When("only with bf16.enabled", lambda c: c.bf16.enabled)
LOW_PRECISION = When("only with fp16 or bf16", low_precision)


def enabled(section: str, key: str = "enabled") -> When:
    """The section's switch is on."""
    return When(f"only with {section}.{key}", lambda c: bool(getattr(getattr(c, section), key)))
