"""All ranks must have been given the same configuration: what differs is said, before it can end in a hang."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch

from shardwise import _torch
from shardwise.dist import Axis
from shardwise.dist.words import from_first
from shardwise.errors import ConfigError
from shardwise.monitor.tracker import leaves

if TYPE_CHECKING:
    from shardwise.config import Config


def require_same_config(config: Config, world: Axis, device: torch.device) -> None:
    """Compare the configuration with the first rank's. All ranks must call this, and all raise or none.

    Raises:
        ConfigError: a rank has another configuration; it names the keys, the others name it.
    """
    if world.size == 1:
        return
    text = json.dumps(config.as_dict(), sort_keys=True)
    # 48 bits are exact in the float64 that travels.
    mine = float(int.from_bytes(hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()[:6], "big"))
    seen = torch.zeros(world.size, dtype=torch.float64, device=device)
    if _torch.is_fake(seen):
        return  # a dry run: there are no other ranks
    seen[world.position] = mine
    world.sum_small(seen, "configuration")
    others = [world.ranks[i] for i, digest in enumerate(seen.tolist()) if digest != seen[0].item()]
    if not others:
        return
    first = json.loads(from_first(world, text, device, "the first rank's configuration"))
    me = world.ranks[world.position]
    if me not in others:
        raise ConfigError(
            f"rank {others[0]} was given another configuration than rank {world.ranks[0]}; see its error."
        )
    theirs, ours = dict(leaves(first)), dict(leaves(json.loads(text)))
    differ = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
    raise ConfigError(
        f"rank {me} was given another configuration than rank {world.ranks[0]}: {', '.join(differ[:10])}. Give all "
        "ranks the same; what only one rank does (writing logs) it does by itself."
    )
