"""The order in which models that share a group reduce their gradients: equal on all ranks, whatever each rank used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Turns:
    """Orders the reducers of models that one backward may go through.

    Collectives of one group must be in one order on all ranks. Within a model its reducer sees to that; between models
    the order in which gradients arrive may differ, for a rank may leave parameters unused. So only the model that was
    prepared first reduces while the backward goes on. The others wait for its end, and go in the order of preparation.
    """

    def __init__(self) -> None:
        self._reducers: list[Any] = []
        self._waiting: dict[int, Callable[[], None]] = {}

    def add(self, reducer: Any) -> None:
        """Let one more reducer take turns with the others."""
        number = len(self._reducers)
        self._reducers.append(reducer)
        reducer.may_begin = lambda: number == 0 or len(self._reducers) == 1
        reducer.when_over = lambda reduce: self._over(number, reduce)

    def forget(self) -> None:
        """A backward failed: nobody waits any more."""
        self._waiting.clear()

    def _over(self, number: int, reduce: Callable[[], None]) -> None:
        self._waiting[number] = reduce
        if any(reducer.active for reducer in self._reducers):
            return  # the same backward goes through that model too, and has not ended there
        while self._waiting:
            self._waiting.pop(min(self._waiting))()
