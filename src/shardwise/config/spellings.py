"""Older spellings of what is known, brought to the present one before anything is checked."""

from __future__ import annotations

from typing import cast

from shardwise.config.problems import Problems

_OLD_GATHER = "stage3_gather_fp16_weights_on_model_save"
_GATHER = "stage3_gather_16bit_weights_on_model_save"


def modernise(raw: object, problems: Problems) -> dict[str, object]:
    """Rewrite `bfloat16`, `zero_optimization: true` and deprecated keys.

    Args:
        raw: a plain object of our own; changed in place.
        problems: gets contradictions, warnings, and the section names as written.
    """
    config = cast(dict[str, object], raw)
    if "bfloat16" in config:
        if "bf16" in config:
            problems.add(("bfloat16",), 'this is another name of "bf16", which is given too; keep one of the two')
            del config["bfloat16"]
        else:
            config["bf16"] = config.pop("bfloat16")
            problems.aliases["bf16"] = "bfloat16"
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        config["zero_optimization"] = {"stage": int(zero)}
        if zero:
            problems.warnings.append('zero_optimization: true is read as {"stage": 1}; write the stage that you want')
    elif isinstance(zero, dict) and _OLD_GATHER in zero:
        _rename_gather(zero, problems)
    return config


def _rename_gather(zero: dict[str, object], problems: Problems) -> None:
    value = zero.pop(_OLD_GATHER)
    if _GATHER in zero and zero[_GATHER] != value:
        problems.add(
            ("zero_optimization", _OLD_GATHER),
            f"this is the old name of {_GATHER}, which says otherwise; keep one",
        )
        return
    zero[_GATHER] = value
    problems.warnings.append(f"zero_optimization.{_OLD_GATHER} is the old name of {_GATHER}")
