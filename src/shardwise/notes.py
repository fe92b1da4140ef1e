"""What a configuration does not do, or was filled with: said once, at the start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.config import Config


def notes(config: Config) -> list[str]:
    """Sentences about keys that were filled in or that have no effect here."""
    found = [f'{path} is "auto": {value!r}' for path, value in config.filled.items()]
    inert = ", ".join(path for path, _ in _leaves(config.no_effect))
    if inert:
        found.append(f"no effect (the capability has not landed, and the value asks for nothing): {inert}")
    zero = config.zero_optimization
    if config.bf16.immediate_grad_update:
        found.append("no effect: bf16.immediate_grad_update (windows of several micro-steps always add up in fp32)")
    if not zero.ignore_unused_parameters:
        found.append("no effect: zero_optimization.ignore_unused_parameters (unused parameters are never stepped)")
    if zero.stage3_gather_16bit_weights_on_model_save:
        found.append(
            "no effect: zero_optimization.stage3_gather_16bit_weights_on_model_save (state_dict() is always whole)"
        )
    return found


def _leaves(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        here = f"{path}.{key}" if path else key
        if isinstance(item, Mapping) and item:
            yield from _leaves(item, here)
        else:
            yield here, item
