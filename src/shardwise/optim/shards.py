"""This rank's pieces of a model as tensors that an optimizer can step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.optim.chunks import GPU_NUMEL
from shardwise.sharding import Piece, ShardedModel, Unit
from shardwise.sharding.gradient import UnitGradient


@dataclass(frozen=True)
class Window:
    """What a step is taken from.

    Attributes:
        grads: the reduced gradients, by unit id.
        scale: a 0-d tensor that they are multiplied with (unscaling, clipping), or None.
        used: by parameter id, whether any rank had a gradient for it.
    """

    grads: Mapping[int, UnitGradient]
    scale: torch.Tensor | None
    used: Mapping[int, bool]


class Shards:
    """A tensor for each piece of a parameter in this rank's shards: a view of the master weights, or of the shard.

    Attributes:
        pieces: by unit id.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self.pieces: dict[int, list[tuple[Piece, nn.Parameter]]] = {}
        for unit in model.units:
            source = unit.master if unit.master is not None else unit.shard
            self.pieces[id(unit)] = [
                (piece, nn.Parameter(piece.view(source), requires_grad=source.is_floating_point()))
                for piece in unit.pieces()
            ]

    def of(self, units: list[Unit]) -> list[tuple[Piece, nn.Parameter]]:
        """The pieces of some units, in order."""
        return [pair for unit in units for pair in self.pieces[id(unit)]]

    def bind(self, units: list[Unit], window: Window) -> None:
        """Give the pieces of used parameters their gradients, scaled, in the dtype of the weights."""
        for unit in units:
            grad = window.grads.get(id(unit))
            if grad is None or grad.total is None:
                continue
            total = grad.total
            stepped = unit.master if unit.master is not None else unit.shard
            if total.dtype != stepped.dtype:
                total = total.to(stepped.dtype)
            if window.scale is not None:
                _scale_(total, window.scale)
            for piece, tensor in self.pieces[id(unit)]:
                if window.used.get(id(piece.slot.param), False):
                    tensor.grad = piece.view(total)

    def land(self, units: list[Unit], window: Window) -> list[Any]:
        """After a step: drop the gradients, round the masters into the shards, start to publish these."""
        for unit in units:
            for _, tensor in self.pieces[id(unit)]:
                tensor.grad = None
            if unit.master is not None:
                unit.shard.copy_(unit.master)
        return self._model.publish([u for u in units if id(u) in window.grads])

    def follow_master(self, unit: Unit) -> None:
        """A frozen unit got a master copy: its pieces now live there."""
        if unit.master is not None:
            for piece, tensor in self.pieces[id(unit)]:
                tensor.data = piece.view(unit.master)


def _scale_(total: torch.Tensor, scale: torch.Tensor) -> None:
    """Multiply in place by a 0-d factor, in the factor's own precision: rounded to 16 bits first, it would change the
    norm of all gradients alike."""
    if total.device.type == "cpu" or total.dtype.itemsize > 2:
        total.mul_(scale)  # on a CPU, torch computes in fp32 with a 0-d factor
        return
    for part in torch.split(total, GPU_NUMEL):
        part.copy_(part.float() * scale)
