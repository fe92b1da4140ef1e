"""Finds parameters that are read where nobody expected it, by looking at the arguments of torch functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.sharding.unit import Unit

# Attributes that hand out the data; all others (shape, dtype, requires_grad, ...) are right without it.
_DATA_ATTRIBUTES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


class StrayParameters(TorchFunctionMode):
    """While active, calls ``found`` with the unit of any released parameter that a torch function is given.

    Many models use a weight functionally (``F.linear(x, self.embedding.weight)``); at stage 3 it would be read as NaN.
    Watching costs time, so it is done for a forward only once.

    Args:
        unit_of: the unit of a parameter, or None.
        found: called with a unit that is needed and not there; makes it live.
    """

    def __init__(self, unit_of: Callable[[nn.Parameter], Unit | None], found: Callable[[Unit], None]) -> None:
        super().__init__()
        self._unit_of = unit_of
        self._found = found

    def start(self) -> None:
        """Begin to watch."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop watching."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _reads_data(func):
            for value in (*args, *kwargs.values()):
                for item in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(item, nn.Parameter):
                        unit = self._unit_of(item)
                        if unit is not None and not unit.live:
                            self._found(unit)
        return func(*args, **kwargs)


def _reads_data(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _DATA_ATTRIBUTES
    return name not in ("__set__", "size", "dim", "numel", "stride", "is_floating_point", "requires_grad_", "__hash__")
