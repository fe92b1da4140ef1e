"""Gradients of embeddings that touch few rows: only those rows travel (``sparse_gradients``)."""

from __future__ import annotations

import torch
from torch import nn

from shardwise import _torch
from shardwise.sharding.unit import REDUCE, REPLICATE, Unit


def row_parameters(model: nn.Module) -> set[int]:
    """The ids of the weights of which a micro-batch uses few rows: those of embeddings."""
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}


def sum_rows(unit: Unit, wire: torch.Tensor) -> bool:
    """Sum a unit's gradient over all ranks by exchanging the rows that are not zero.

    Waits for the device once, to learn how many rows there are.

    Args:
        unit: a unit of one embedding weight (rows x width).
        wire: the unit's gradient; holds the sum over all ranks afterwards.

    Returns:
        False, with nothing done, where the rows would be more bytes than the whole; all ranks decide alike.
    """
    world, slot = unit.mesh.world, unit.slots[0]
    if _torch.is_fake(wire) or slot.numel == 0:
        return False
    table = wire[slot.offset : slot.end].view(slot.shape[0], -1)
    mine = (table != 0).any(dim=1).nonzero().reshape(-1)
    counts = torch.zeros(world.size, dtype=torch.float64, device=wire.device)
    counts[world.position] = mine.numel()
    world.sum_small(counts, f"rows of {unit.name}")
    sizes = [int(n) for n in counts.tolist()]
    most, width = max(sizes), table.shape[1]
    row_bytes = width * wire.element_size() + mine.element_size()
    # Each rank sends its rows to every other. Reduce-scattering the whole would send it once but for one part, and
    # all-reducing it twice.
    passes = 1 if unit.policy.shard_optimizer else 2
    if most * row_bytes * world.size >= passes * table.numel() * wire.element_size():
        return False
    indices = torch.zeros(world.size * most, dtype=mine.dtype, device=wire.device)
    values = torch.zeros(world.size * most, width, dtype=wire.dtype, device=wire.device)
    first = world.position * most
    indices[first : first + mine.numel()] = mine
    values[first : first + mine.numel()] = table[mine]
    handles = [
        world.all_gather(indices, world.slice_of(indices), unit.name, unit.tag(REPLICATE)),
        world.all_gather(values.view(-1), world.slice_of(values.view(-1)), unit.name, unit.tag(REDUCE)),
    ]
    for handle in handles:
        handle.wait()
    table.zero_()
    for rank, size in enumerate(sizes):  # in the order of the ranks, so that all get the same bits
        table.index_add_(0, indices[rank * most : rank * most + size], values[rank * most : rank * most + size])
    return True
