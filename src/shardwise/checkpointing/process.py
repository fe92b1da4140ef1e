"""What `configure` and Megatron's random generators leave behind for the rest of the process.

Everything else in shardwise belongs to an engine. These calls have none: a script makes them once, and `checkpoint`,
called deep inside a model and again by autograd's threads, has to know of them. So there is one object, and this is
all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.checkpointing.recompute import Checkpointer
from shardwise.checkpointing.rng import RngTracker


@dataclass
class Process:
    """The state of `shardwise.checkpointing`.

    Attributes:
        rng: the named generators of `get_cuda_rng_tracker`.
        configured: what `configure` asked for, until the process ends; None before.
    """

    rng: RngTracker = field(default_factory=RngTracker)
    configured: Checkpointer | None = None


PROCESS = Process()
