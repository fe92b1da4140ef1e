"""Whole parameters for a moment: reading and editing what is sharded, from outside the training step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardingError
from shardwise.sharding.unit import Unit

# Where a parameter keeps its unit. Upstream's scripts look for attributes of the same kind (`ds_id`).
_ATTRIBUTE = "_shardwise_unit"


def unit_of(param: nn.Parameter) -> Unit | None:
    """The unit that holds a parameter, or None."""
    return getattr(param, _ATTRIBUTE, None)


def is_managed(param: nn.Parameter) -> bool:
    """Whether an engine holds the parameter (``zero.Init`` alone does not count)."""
    unit = unit_of(param)
    return unit is not None and not unit.provisional


def mark(unit: Unit) -> None:
    """Remember on each parameter which unit holds it."""
    for slot in unit.slots:
        setattr(slot.param, _ATTRIBUTE, unit)


def unmark(unit: Unit) -> None:
    """Forget it again."""
    for slot in unit.slots:
        if unit_of(slot.param) is unit:
            delattr(slot.param, _ATTRIBUTE)


def take_over(params: list[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """Gather those parameters that ``zero.Init`` sharded, so that they can be cut anew.

    Returns:
        The others: ordinary parameters, on whose values the ranks must still agree.
    """
    ordinary = []
    for name, param in params:
        unit = unit_of(param)
        if unit is None:
            ordinary.append((name, param))
            continue
        unit.on_take_over()
        unit.finish_gather()
    return ordinary


# Where a module keeps the parameters of others that it reads.
_EXTERNAL = "_shardwise_external"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say before ``initialize`` that a module's forward reads a parameter that another module owns.

    Stage 3 then gathers it for both. Rarely needed: such reads are found in the first forward, and again after a step
    that was not finite.
    """
    if not isinstance(parameter, nn.Parameter):
        raise ShardingError(f"register_external_parameter expects a parameter, got {type(parameter).__name__}.")
    module.__dict__.setdefault(_EXTERNAL, []).append(parameter)


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """What :func:`register_external_parameter` noted on a module."""
    return list(module.__dict__.get(_EXTERNAL, []))


@contextmanager
def pinned(units: Iterable[Unit]) -> Iterator[None]:
    """Keep units whole while the block runs, whatever modules use and release them. All ranks must enter."""
    chosen = list(units)
    were_live = [u.live for u in chosen]
    held: list[Unit] = []
    for unit in chosen:
        unit.start_gather()
    try:
        for unit in chosen:
            unit.finish_gather()
            unit.pins += 1
            held.append(unit)
        yield
    finally:
        for unit, was_live in zip(held, were_live, strict=False):
            unit.pins -= 1
            if not was_live:
                unit.release()


class GatheredParameters:
    """A context in which the given parameters are whole on every rank.

    Args:
        params: a parameter, or an iterable of parameters (or of ``(name, parameter)`` pairs), or a module.
        modifier_rank: the rank whose edits are kept and given to all. With None the parameters are read only: an
            edit raises at the end of the block, because it would be lost.
        fwd_module: accepted for scripts written for upstream; parameters that a module reads although another owns
            them are found by themselves.
        enabled: False makes this do nothing.

    Raises:
        ShardingError: something else than parameters was given, or an edit would be lost.
    """

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[Any],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._modifier_rank = modifier_rank
        chosen = list(_parameters(params)) if enabled else []
        units = {id(u): u for p in chosen if (u := unit_of(p)) is not None}
        self._units = list(units.values())
        self._pins = pinned(self._units)
        self._prints: list[int] = []

    def __enter__(self) -> None:
        self._pins.__enter__()
        if self._modifier_rank is None:
            self._prints = [_fingerprint(u.flat) for u in self._units]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._keep_edits() if self._modifier_rank is not None else self._refuse_edits()
        finally:
            self._pins.__exit__(None, None, None)

    def _keep_edits(self) -> None:
        for unit in self._units:
            world = unit.mesh.world
            rank = self._modifier_rank or 0
            if rank not in world.ranks:
                raise ShardingError(f"modifier_rank={rank} is not one of the {world.size} ranks.")
            with torch.no_grad():
                world.broadcast(unit.flat, world.ranks.index(rank), unit.name)
                unit.adopt()
                unit.refresh_master()

    def _refuse_edits(self) -> None:
        changed = [_fingerprint(u.flat) != p for u, p in zip(self._units, self._prints, strict=True)]
        if not self._units:
            return
        # A rank that edits raises on all of them: otherwise the others would wait for it in the next gather.
        unit = self._units[0]
        flags = torch.tensor([float(c) for c in changed], device=unit.device)
        unit.mesh.world.max_small(flags, "edits without modifier_rank")
        edited = [u.name for u, flag in zip(self._units, flags.tolist(), strict=True) if flag]
        if edited:
            raise ShardingError(
                f"parameters in {', '.join(edited)} were edited inside GatheredParameters without `modifier_rank`; the "
                "edit would be lost. Name the rank whose edit counts: GatheredParameters(params, modifier_rank=0)."
            )


def _parameters(params: Any) -> Iterator[nn.Parameter]:
    if isinstance(params, nn.Parameter):
        yield params
    elif isinstance(params, nn.Module):
        yield from params.parameters()
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor | str | bytes):
        for item in params:
            param = item[1] if isinstance(item, tuple) and len(item) == 2 else item
            if not isinstance(param, nn.Parameter):
                raise ShardingError(f"GatheredParameters expects parameters, got {type(param).__name__}.")
            yield param
    else:
        raise ShardingError(f"GatheredParameters expects parameters, got {type(params).__name__}.")


def _fingerprint(flat: torch.Tensor) -> int:
    """A number that changes when any element of the buffer changes, or moves within it."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    words = flat.detach().view(bits)
    chunk = 1 << 20
    weights = torch.arange(1, 2 * chunk, 2, dtype=torch.int64, device=flat.device)
    value = 0
    for part in torch.split(words, chunk):
        mixed = (part.to(torch.int64) * weights[: part.numel()]).sum().item()
        value = (value * 1_000_003 + int(mixed)) & 0xFFFFFFFFFFFFFFFF
    return value
