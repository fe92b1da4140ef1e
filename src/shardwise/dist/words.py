"""Text from one rank to all, for errors that every rank should understand."""

from __future__ import annotations

import torch

from shardwise.dist.comm import Axis


def from_first(axis: Axis, text: str, device: torch.device, key: str) -> str:
    """What the first rank of the axis gives; what the others give is not used. All ranks must call this."""
    if axis.size == 1:
        return text
    raw = torch.frombuffer(bytearray(text.encode("utf-8", "backslashreplace") or b"\0"), dtype=torch.uint8)
    length = torch.tensor([float(raw.numel()) if axis.position == 0 else 0.0], dtype=torch.float64, device=device)
    axis.sum_small(length, f"length of {key}")
    into = raw.to(device) if axis.position == 0 else torch.zeros(int(length), dtype=torch.uint8, device=device)
    axis.broadcast(into, 0, key)
    return bytes(into.cpu().tolist()).decode("utf-8").strip("\0")
