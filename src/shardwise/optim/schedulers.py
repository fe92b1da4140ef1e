"""Learning-rate schedulers by their ds_config names."""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from shardwise.errors import ConfigError
from shardwise.optim.cycles import LRRangeTest, OneCycle
from shardwise.optim.kwargs import NamedSection, checked_kwargs, constructed, did_you_mean
from shardwise.optim.schedule import Schedule
from shardwise.optim.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "LRRangeTest",
    "OneCycle",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_scheduler",
]

_OURS: dict[str, type[LRScheduler]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
# Their arguments are functions or other schedulers.
_NOT_IN_JSON = frozenset({"LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"})


def build_scheduler(section: NamedSection, optimizer: Optimizer) -> LRScheduler:
    """The scheduler that a ds_config's ``scheduler`` section names, over ``optimizer``.

    Its constructor sets the rate of the first optimizer step; call ``step()`` after each optimizer step that
    was applied, and not after a skipped one.

    Args:
        section: ``type`` is one of ours (``LRRangeTest``, ``OneCycle``, ``WarmupLR``, ``WarmupDecayLR``,
            ``WarmupCosineLR``) or a class of ``torch.optim.lr_scheduler``; ``params`` are its keywords.
        optimizer: the optimizer whose rates it sets.

    Raises:
        ConfigError: an unknown name, or arguments that the class does not take, with their JSON path.
    """
    cls = _scheduler_class(section.type)
    kwargs = checked_kwargs(cls, section.params, "scheduler.params", unwritable=("scale_fn", "verbose"))
    return cast(LRScheduler, constructed(cls, optimizer, kwargs, "scheduler.params"))


def _scheduler_class(name: str | None) -> type[LRScheduler]:
    if name in _NOT_IN_JSON:
        raise ConfigError(
            f"scheduler.type: {name} takes Python objects, which JSON cannot hold; build it and pass it to "
            "initialize(lr_scheduler=...)."
        )
    known: dict[str, type[LRScheduler]] = {**_torch_schedulers(), **_OURS}
    if name not in known:
        raise ConfigError(
            f"scheduler.type: no scheduler is called {name!r}{did_you_mean(str(name), known)} Known: "
            f"{', '.join([*_OURS, *sorted(known.keys() - _OURS.keys())])}."
        )
    return known[name]


def _torch_schedulers() -> dict[str, Any]:
    return {
        name: getattr(lr_scheduler, name)
        for name in lr_scheduler.__all__
        if name not in _NOT_IN_JSON and name != "LRScheduler" and inspect.isclass(getattr(lr_scheduler, name))
    }
