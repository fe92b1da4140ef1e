"""What the ranks agree on before a step: the gradient norm, whether it is finite, and which parameters were used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise import _torch
from shardwise.sharding.model import ShardedModel

# Squares are summed in rows of this many elements and the rows in float64: one float32 sum over 15 million elements
# was measured to be wrong in the fourth digit.
ROW = 8192


@dataclass
class Agreement:
    """The outcome of :func:`agree`, equal on all ranks.

    Attributes:
        squares: sum of the squares of all gradients as they were reduced (scaled), a 0-d tensor on the device.
        tokens: what the ranks gave as ``tokens``, summed, a 0-d tensor on the device.
        loss: mean of what the ranks gave as ``losses``, a 0-d tensor on the device; NaN if nobody gave any.
        used: by parameter id, whether any rank had a gradient for it in the window.
    """

    squares: torch.Tensor
    tokens: torch.Tensor
    loss: torch.Tensor
    used: dict[int, bool]


def agree(model: ShardedModel, tokens: float, losses: Sequence[torch.Tensor] = ()) -> Agreement:
    """Sum squares, tokens, losses and use flags over the ranks, in one small collective.

    The flags are read back (which waits for the device) only where this rank did not use every parameter itself.
    """
    flags = [(slot.param, used) for g in model.grads for slot, used in zip(g.unit.slots, g.used, strict=True)]
    mine = [used for _, used in flags]
    wanted = [param.requires_grad for param, _ in flags]  # equal on all ranks
    device = model.device
    dtype = torch.float64 if any(u.dtype == torch.float64 for u in model.units) else torch.float32
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for grad in model.grads:
        if grad.total is not None:
            squares = squares + sum_of_squares(grad.total)
    # Replicas hold the same slice, and stage 0 the same everything: each counts once.
    copies = model.mesh.replicate.size if model.policy.shard_optimizer else model.mesh.world.size
    loss = torch.zeros_like(squares)
    if losses:
        loss = torch.stack([x.detach().reshape(()).to(device, torch.float64) for x in losses]).sum()
    counts = [torch.full_like(squares, count) for count in (tokens, len(losses))]
    head = torch.stack([squares / copies, loss, *counts])
    if mine == wanted:
        used = torch.ones(len(mine), dtype=torch.float64, device=device)
    else:
        used = torch.tensor(mine, dtype=torch.float64, device=device)
    message = torch.cat([head, used])
    model.mesh.world.sum_small(message, "gradient norm")
    # A parameter that this rank used was used; only about others do the other ranks know more.
    anyone = wanted if mine == wanted else [w and v > 0 for w, v in zip(wanted, message[4:].tolist(), strict=True)]
    return Agreement(
        squares=message[0].to(dtype),
        tokens=message[2].to(dtype),
        loss=message[1] / message[3],
        used={id(param): any_used for (param, _), any_used in zip(flags, anyone, strict=True)},
    )


def sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of a flat tensor, as a float64 scalar on its device."""
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    body = flat.numel() // ROW * ROW
    rows: torch.Tensor = torch.linalg.vector_norm(flat[:body].view(-1, ROW), dim=1, dtype=wide).double()
    rest: torch.Tensor = torch.linalg.vector_norm(flat[body:], dtype=wide).double()
    return rows.square().sum() + rest.square()


def not_finite_units(model: ShardedModel) -> list[str]:
    """Names of the units whose gradient is not finite on any rank. Collective; for the rare step that is skipped."""
    bad = [g.total is not None and not bool(torch.isfinite(sum_of_squares(g.total))) for g in model.grads]
    flags = torch.tensor(bad, dtype=torch.float32, device=model.device)
    model.mesh.world.sum_small(flags, "units that are not finite")
    return [g.unit.name for g, flag in zip(model.grads, flags.tolist(), strict=True) if flag]


def is_finite(value: torch.Tensor) -> bool:
    """Whether a 0-d tensor is finite; a dry run's always is. Waits for the device."""
    return True if _torch.is_fake(value) else bool(torch.isfinite(value).item())
