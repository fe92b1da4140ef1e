"""Finds parameters that are read outside the module that owns them, while the first forward runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from .unit import Unit


class StrayParameters(TorchFunctionMode):
    """Looks at the arguments of every torch function for released parameters.

    Many models use a weight functionally (``F.linear(x, self.embedding.weight)``); at stage 3 it would be read as NaN.
    Watching costs time, so it is done in the first forward only; ``found`` then makes the unit part of the module that
    reads it.

    Args:
        units: the unit of each managed parameter, by the parameter's id.
        found: called with a unit that is needed and not there; makes it live.
    """

    def __init__(self, units: Mapping[int, Unit], found: Callable[[Unit], None]) -> None:
        super().__init__()
        self._units = units
        self._found = found

    def start(self) -> None:
        """Begin to watch."""
        self.__enter__()

    def stop(self) -> None:
        """Stop watching."""
        self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":  # shape, dtype, requires_grad... are right without the data
            for value in (*args, *kwargs.values()):
                for item in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(item, nn.Parameter):
                        unit = self._units.get(id(item))
                        if unit is not None and not unit.live:
                            self._found(unit)
        return func(*args, **kwargs)
