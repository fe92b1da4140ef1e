"""Text from one rank to all, for errors that every rank should understand."""

from __future__ import annotations

import torch

from shardwise.dist.comm import Axis


def broadcast_text(axis: Axis, text: str, position: int, device: torch.device, key: str) -> str:
    """What the rank at ``position`` of the axis gives; what the others give is not used. All ranks must call this."""
    if axis.size == 1:
        return text
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    length = torch.tensor([len(raw) if axis.position == position else 0], dtype=torch.float64, device=device)
    axis.sum_small(length, f"length of {key}")
    into = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if axis.position == position and raw:
        into.copy_(torch.frombuffer(raw, dtype=torch.uint8))
    axis.broadcast(into, position, key)
    return bytes(into.cpu().tolist()).decode("utf-8", "surrogatepass")


def from_first(axis: Axis, text: str, device: torch.device, key: str) -> str:
    """What the first rank of the axis gives. All ranks must call this."""
    return broadcast_text(axis, text, 0, device, key)
