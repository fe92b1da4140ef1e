"""A second optimizer over parameters that an engine manages."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.errors import ShardingError
from shardwise.optim.sharded import ShardedOptimizer


def refuse_foreign_steps(owner: nn.Module, own: ShardedOptimizer | None, managed: Mapping[int, str]) -> Any:
    """Make any other optimizer that holds one of the parameters raise when it steps.

    It would step nothing, silently: the gradients are taken away by the engine as they arrive.

    Args:
        owner: the engine; with it the watch ends.
        own: the engine's optimizer; the one inside it may step while this one does.
        managed: names of the parameters by id.

    Returns:
        A handle; ``remove()`` ends the watch.
    """
    engine = weakref.ref(owner)
    wrapper = None if own is None else weakref.ref(own)

    def check(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        mine = None if wrapper is None else wrapper()
        if engine() is None or (mine is not None and optimizer is mine.optimizer and mine.stepping):
            return
        if mine is not None and optimizer is mine.optimizer:
            raise ShardingError(
                f"{type(optimizer).__name__} steps through `engine.step()`; by itself it sees no gradients."
            )
        held = [managed[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in managed]
        if held:
            raise ShardingError(
                f"{type(optimizer).__name__} holds {held[0]} (and {len(held) - 1} more), which a shardwise engine "
                "manages: it would see no gradients. Step through the engine, or destroy() it first."
            )

    handle = register_optimizer_step_pre_hook(check)
    weakref.finalize(owner, handle.remove)
    return handle
