"""The order in which units are used, learnt in one iteration and relied on in the next."""

from __future__ import annotations

from shardwise.sharding.unit import Unit


class Trace:
    """Records the sequence of gathers of an iteration and predicts it in the next.

    A prediction that fails costs only speed: nothing is predicted until an iteration was recorded anew.
    """

    def __init__(self) -> None:
        self._known: list[Unit] = []
        self._now: list[Unit] = []
        self._position: int | None = None

    def start(self) -> None:
        """A new iteration begins; the one that was recorded last becomes the prediction."""
        if self._now:
            self._known = self._now
        self._now = []
        self._position = 0 if self._known else None

    def note(self, unit: Unit) -> None:
        """The unit is needed now."""
        self._now.append(unit)
        if self._position is None:
            return
        if self._position < len(self._known) and self._known[self._position] is unit:
            self._position += 1
        else:
            self._position = None

    def coming(self, numel: int) -> list[Unit]:
        """The units that are needed next, up to ``numel`` elements in all."""
        found: list[Unit] = []
        if self._position is None:
            return found
        for unit in self._known[self._position :]:
            numel -= unit.numel
            if numel < 0:
                break
            if unit not in found:
                found.append(unit)
        return found

    def reuse_distance(self, unit: Unit) -> int | None:
        """Elements that are gathered before the unit is needed again; None when that is not foreseen."""
        if self._position is None:
            return None
        between = 0
        for other in self._known[self._position :]:
            if other is unit:
                return between
            between += other.numel
        return None
