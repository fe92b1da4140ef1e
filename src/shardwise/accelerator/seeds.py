"""Random numbers: the same seed for every generator of a process, and the same state on all processes."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from shardwise.accelerator.current import current_processes
from shardwise.accelerator.kinds import RNGType
from shardwise.accelerator.operations import broadcast
from shardwise.accelerator.process import Processes
from shardwise.errors import ConfigError

# numpy takes no other seeds.
SEEDS = 2**32


def set_seed(
    seed: int, device_specific: bool = False, deterministic: bool = False, *, processes: Processes | None = None
) -> None:
    """Seed Python's ``random``, numpy and torch (on the CPU and on all devices).

    Args:
        seed: from 0 to 2**32 - 1.
        device_specific: add the number of the process, so that each draws others.
        deterministic: let torch use deterministic algorithms only (``torch.use_deterministic_algorithms``); it then
            raises where it has none.
        processes: among whom, for ``device_specific``; by default those of the program.

    Raises:
        ConfigError: no whole number, or one out of range; nothing was seeded then.
    """
    try:
        seed = operator.index(seed)
    except TypeError as error:
        raise ConfigError(f"seed: {seed!r}; expected a whole number.") from error
    if device_specific:
        seed += (processes or current_processes()).process_index
    if not 0 <= seed < SEEDS:
        raise ConfigError(f"seed: {seed}; expected 0 to {SEEDS - 1} (with `device_specific`, on every process).")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # seeds the devices too
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(
    rng_types: Iterable[str | RNGType],
    generator: torch.Generator | None = None,
    *,
    processes: Processes | None = None,
) -> None:
    """Give every process the main process's random states. All processes must call this.

    Args:
        rng_types: whose: ``"torch"`` (CPU), ``"generator"`` (the given one), ``"cuda"`` or another kind of device.
        generator: for ``"generator"``.
        processes: among whom; by default those of the program.

    Raises:
        ConfigError: an unknown type, a device that this machine has not got, or no generator.
    """
    kinds = [_kind(name) for name in rng_types]  # all are known to be right before any is changed
    states = [_access(kind, generator) for kind in kinds]
    for read, write in states:
        write(broadcast(read(), processes=processes))


def synchronize_rng_state(
    rng_type: str | RNGType | None = None,
    generator: torch.Generator | None = None,
    *,
    processes: Processes | None = None,
) -> None:
    """:func:`synchronize_rng_states` of one type."""
    if rng_type is None:
        raise ConfigError(f"rng_type: expected one of {', '.join(kind.value for kind in RNGType)}.")
    synchronize_rng_states([rng_type], generator, processes=processes)


def _kind(name: str | RNGType) -> RNGType:
    try:
        return RNGType(name)
    except ValueError as error:
        known = ", ".join(kind.value for kind in RNGType)
        raise ConfigError(f"rng_types: `{name}` is not known; expected {known}.") from error


def _access(kind: RNGType, generator: torch.Generator | None) -> tuple[Callable[[], torch.Tensor], Callable[..., Any]]:
    """How the state is read and written. It is a tensor of bytes on the CPU."""
    if kind is RNGType.GENERATOR:
        if generator is None:
            raise ConfigError('rng_types: "generator" needs the argument `generator`, whose state is to be the same.')
        return generator.get_state, generator.set_state
    if kind is RNGType.TORCH:
        return torch.get_rng_state, torch.set_rng_state
    device = getattr(torch, kind.value, None)
    if device is None or not device.is_available():
        raise ConfigError(f'rng_types: "{kind.value}", but torch finds no such device on this machine.')
    return device.get_rng_state, device.set_rng_state
