"""Older spellings of what is known, brought to the present one before anything is checked."""

from __future__ import annotations

from typing import cast

from shardwise.config.problems import Problems, mismatch

_OLD_GATHER = "stage3_gather_fp16_weights_on_model_save"
_OLD_PIN = "cpu_offload_use_pin_memory"
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
    elif isinstance(zero, dict):
        if _OLD_GATHER in zero:
            _rename_gather(zero, problems)
        _rename_offload(zero, problems)
    return config


def _rename_offload(zero: dict[str, object], problems: Problems) -> None:
    """`cpu_offload: true` and its kind were sections of their own before 2021."""
    pinned = zero.pop(_OLD_PIN, None)
    if pinned is not None:
        problems.warnings.append(f"zero_optimization.{_OLD_PIN} is the old name of offload_optimizer.pin_memory")
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if old not in zero:
            continue
        value = zero.pop(old)
        if value is None:
            continue
        if not isinstance(value, bool):
            problems.add(("zero_optimization", old), mismatch(value, "true or false"))
            continue
        device = "cpu" if value else "none"
        problems.warnings.append(f'zero_optimization.{old} is the old name of {new}: {{"device": "{device}"}}')
        if new not in zero:
            problems.renamed["zero_optimization", new, "device"] = ("zero_optimization", old)
        section = zero.setdefault(new, {})
        if isinstance(section, dict) and section.setdefault("device", device) != device:
            problems.add(("zero_optimization", old), f"this is the old name of {new}.device, which says otherwise")
        elif isinstance(section, dict) and pinned is not None:
            section.setdefault("pin_memory", pinned)


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
