"""`comms_logger`: what every kind of collective costs."""

from __future__ import annotations

import atexit
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shardwise.dist import Axis
from shardwise.messages import logger
from shardwise.meter import Mark, Meter
from shardwise.monitor.tables import size, table

if TYPE_CHECKING:
    from shardwise.config.sections import CommsLoggerSection

# The part of a step that wall_clock_breakdown gives to it; forward, backward and step contain it.
COMMUNICATION = "communication"

# The collectives there are, and the names that upstream has for them.
OPS = {
    "all_gather": ("all_gather_into_tensor", "all_gather_base", "all_gather_coalesced", "allgather_fn"),
    "reduce_scatter": ("reduce_scatter_tensor", "reduce_scatter_base", "reduce_scatter_fn"),
    "all_reduce": ("all_reduce_coalesced", "inference_all_reduce"),
    "all_to_all": ("all_to_all_single",),
    "small": (),
    "broadcast": ("broadcast_object_list",),
    "barrier": ("monitored_barrier",),
}


@dataclass
class Cost:
    """Of one kind of collective on one axis, on this rank.

    Attributes:
        calls: how many.
        bytes_sent: by this rank.
        seconds_in_flight: from the start until the result was waited for: the transfer takes this long at the most.
        seconds_waiting: what the computation stood still for it.
    """

    calls: int = 0
    bytes_sent: int = 0
    seconds_in_flight: float = 0.0
    seconds_waiting: float = 0.0


@dataclass
class _Note:
    axis: str
    op: str
    key: str
    sent: int
    issued: Mark
    wanted: Mark | None = None
    in_flight: float = 0.0


class CommLog:
    """Observes the collectives of an engine: for the table and the lines of ``comms_logger``, and for the time that
    ``wall_clock_breakdown`` gives to communication.

    Args:
        section: ``comms_logger``.
        meter: keeps the time.
        speaks: whether this rank prints; all of them count.
    """

    def __init__(self, section: CommsLoggerSection, meter: Meter, *, speaks: bool) -> None:
        self.enabled = section.enabled
        self._section = section
        self._meter = meter
        self._speaks = speaks
        self._said = -1
        self._calls = 0
        self.costs: dict[tuple[str, str], Cost] = {}
        self._wanted = None if section.prof_all else _known_ops(section.prof_ops, speaks and section.enabled)
        if self.enabled and speaks:
            atexit.register(self.close)

    def issued(self, axis: Axis, op: str, key: str, sent: int) -> _Note:
        """A collective starts."""
        return _Note(axis.name, op, key, sent, self._meter.watch.mark())

    def waiting(self, note: _Note) -> None:
        """Its result is wanted."""
        note.wanted = self._meter.watch.mark()

    def done(self, note: _Note) -> None:
        """Its result is there."""
        watch, now = self._meter.watch, self._meter.watch.mark()

        def in_flight(seconds: float) -> None:
            note.in_flight = seconds

        watch.measure(note.issued, now, in_flight)  # known before the next, which ends at the same moment
        watch.measure(note.issued if note.wanted is None else note.wanted, now, lambda s: self._count(note, s))

    def summary(self) -> dict[str, dict[str, dict[str, float]]]:
        """Costs so far by axis and collective, on this rank. Waits for the device."""
        self._meter.watch.wait()
        found: dict[str, dict[str, dict[str, float]]] = {}
        for (axis, op), cost in self.costs.items():
            found.setdefault(axis, {})[op] = asdict(cost)
        return found

    def say(self) -> None:
        """Print the table of the costs so far, on the rank that speaks."""
        self._meter.watch.wait()
        self._said = self._calls
        if not self._speaks:
            return
        rows = [
            (
                axis,
                op,
                f"{cost.calls:,}",
                size(cost.bytes_sent),
                f"{cost.seconds_in_flight:.3f}",
                f"{cost.seconds_waiting:.3f}",
                _speed(cost.bytes_sent, cost.seconds_in_flight),
            )
            for (axis, op), cost in sorted(self.costs.items())
        ]
        if not rows:
            logger.info("communication: there was none")
            return
        columns = ["axis", "collective", ">calls", ">sent", ">s in flight", ">s waiting", ">MB/s"]
        title = "Communication of rank 0 (MB/s: sent over time in flight, at least)"
        logger.info("communication\n\n%s", table(title, columns, rows))

    def close(self) -> None:
        """Print the table, unless it was printed and nothing has happened since."""
        atexit.unregister(self.close)
        if self.enabled and self._said != self._calls:
            self.say()

    def _count(self, note: _Note, waited: float) -> None:
        if self._meter.breakdown:
            self._meter.add(COMMUNICATION, waited)
        if not self.enabled or (self._wanted is not None and note.op not in self._wanted):
            return
        self._calls += 1
        cost = self.costs.setdefault((note.axis, note.op), Cost())
        cost.calls += 1
        cost.bytes_sent += note.sent
        cost.seconds_in_flight += note.in_flight
        cost.seconds_waiting += waited
        if self._section.verbose and self._speaks:
            what = f"{note.op} of {note.key}" if self._section.debug else note.op
            logger.info(
                "%s on axis %s | %s | %.3f ms in flight | %.3f ms waiting | %s MB/s",
                what,
                note.axis,
                size(note.sent),
                note.in_flight * 1e3,
                waited * 1e3,
                _speed(note.sent, note.in_flight),
            )


def _speed(sent: float, seconds: float) -> str:
    return f"{sent / seconds / 1e6:,.1f}" if sent and seconds else "-"


def _known_ops(names: list[str], warns: bool) -> set[str]:
    found: set[str] = set()
    for name in names:
        ops = [op for op, aliases in OPS.items() if name == op or name in aliases]
        found.update(ops)
        if not ops and warns:
            logger.warning("comms_logger.prof_ops: there is no collective %r here; there are %s", name, ", ".join(OPS))
    return found


def summary_of(log: CommLog | None) -> dict[str, Any]:
    """What ``engine.log_comm_summary()`` prints and returns."""
    if log is None or not log.enabled:
        logger.warning("comms_logger.enabled is false: communication was not logged")
        return {}
    log.say()
    return log.summary()
