"""The batch identity: train_batch_size = micro-batch x accumulation x world size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.config.fields import MAX_INT
from shardwise.config.problems import Problems

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
GAS = "gradient_accumulation_steps"

_SEARCH = 100_000


@dataclass(frozen=True)
class Batch:
    """A batch that fits: `train` samples a step = `micro` a forward x `gas` forwards x the ranks."""

    train: int
    micro: int
    gas: int


def resolve(given: Mapping[str, int], world_size: int, problems: Problems) -> Batch | None:
    """Complete the three batch keys.

    Args:
        given: the keys that the user wrote, each >= 1.
        world_size: number of data-parallel ranks.
        problems: where to report numbers that do not fit, with what would fit.

    Returns:
        The three numbers, or None when there is none that fits.
    """
    train, micro, gas = given.get(TRAIN), given.get(MICRO), given.get(GAS)
    if train is None:
        if micro is None:
            _nothing_given(gas, problems)
            return None
        gas = gas or 1
        train = micro * gas * world_size
        if train > MAX_INT:
            problems.add((MICRO,), f"{micro} x {gas} ({GAS}) x {world_size} (world size) is above 2^63; lower it")
            return None
        return Batch(train, micro, gas)
    if micro is not None and gas is not None:
        if train != micro * gas * world_size:
            _contradiction(train, micro, gas, world_size, problems)
            return None
        return Batch(train, micro, gas)
    known, name = (gas or 1, GAS) if micro is None else (micro, MICRO)
    if train % (known * world_size):
        _indivisible(train, known, name if name in given else None, world_size, problems)
        return None
    other = train // (known * world_size)
    return Batch(train, other, known) if micro is None else Batch(train, known, other)


def _nothing_given(gas: int | None, problems: Problems) -> None:
    alone = f"{GAS} {gas} alone does not give the batch size" if gas else "no batch size is given"
    problems.add(
        (TRAIN,),
        f"{alone}; write {MICRO} (samples a rank sees in one forward), "
        f"or {TRAIN} (samples of one optimizer step over all ranks)",
    )


def _contradiction(train: int, micro: int, gas: int, world_size: int, problems: Problems) -> None:
    product = micro * gas * world_size
    fits = [f"{TRAIN} {product}"]
    if train % (gas * world_size) == 0:
        fits.append(f"{MICRO} {train // (gas * world_size)}")
    if train % (micro * world_size) == 0:
        fits.append(f"{GAS} {train // (micro * world_size)}")
    if train % (micro * gas) == 0:
        fits.append(f"{train // (micro * gas)} ranks")
    problems.add(
        (TRAIN,),
        f"{train} is not {micro} ({MICRO}) x {gas} ({GAS}) x {world_size} (world size) = {product}; "
        f"what fits: {', or '.join(fits)}; or leave one of the three out",
    )


def _indivisible(train: int, known: int, name: str | None, world_size: int, problems: Problems) -> None:
    unit = known * world_size
    parts = f"{known} ({name}) x {world_size} (world size) = {unit}" if name else f"{world_size} (world size)"
    below, above = train // unit * unit, (train // unit + 1) * unit
    fits = [f"{TRAIN} {value}" for value in (below, above) if value]
    if name and train % world_size == 0:
        smaller = _largest_divisor(train // world_size, known)
        if smaller:
            fits.append(f"{name} {smaller}")
    problems.add((TRAIN,), f"{train} is no multiple of {parts}; what fits: {', or '.join(fits)}")


def _largest_divisor(number: int, limit: int) -> int | None:
    start = min(number, limit)
    for value in range(start, max(0, start - _SEARCH), -1):
        if number % value == 0:
            return value
    return None
