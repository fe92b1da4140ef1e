"""`memory_breakdown`: what holds how much memory at the points of the first step."""

from __future__ import annotations

import sys

import psutil
import torch

from shardwise.messages import logger
from shardwise.meter import on_gpu
from shardwise.monitor.tables import size
from shardwise.optim.sharded import ShardedOptimizer
from shardwise.sharding import ShardedModel


class MemoryNotes:
    """Says, once for each point, how much this rank's model state and everything else take.

    On a GPU the total is what tensors occupy, so that the rest is activations, gathered parameters and buffers. On a
    CPU it is what the process occupies: the rest is also Python and its libraries.

    Args:
        sharded, optimizer: whose state is counted.
    """

    def __init__(self, sharded: ShardedModel, optimizer: ShardedOptimizer | None) -> None:
        self._sharded = sharded
        self._optimizer = optimizer
        self._seen: set[str] = set()

    def note(self, point: str) -> None:
        """Say it, the first time that this point is reached."""
        if point in self._seen:
            return
        self._seen.add(point)
        held = {
            "parameters": sum(u.nbytes for u in self._sharded.units),
            "gradients": sum(g.nbytes for g in self._sharded.grads),
            "optimizer": 0 if self._optimizer is None else self._optimizer.state_bytes(),
        }
        total, peak = occupied(self._sharded.device)
        where = "GPU" if on_gpu(self._sharded.device) else "process"
        columns = [f"{name} {size(count):>10}" for name, count in held.items()]
        columns.append(f"rest {size(max(total - sum(held.values()), 0)):>10}")
        columns += [f"{where} {size(total):>10}", f"peak {size(peak):>10}"]
        logger.info("memory after %-10s | %s", point, " | ".join(columns))


def occupied(device: torch.device) -> tuple[int, int]:
    """Bytes now and at the most: of tensors on a GPU, of the process on a CPU."""
    if on_gpu(device):
        return int(torch.cuda.memory_allocated(device)), int(torch.cuda.max_memory_allocated(device))
    now = int(psutil.Process().memory_info().rss)
    if sys.platform == "win32":
        return now, int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return now, max(now, peak if sys.platform == "darwin" else peak * 1024)  # bytes there, KiB here
