"""From rounds to figures: medians and quartiles, ratios formed within a round, and the targets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .driver import Pair
from .spec import BYTES_TOLERANCE, FASTER_THAN, LARGEST_OVERHEAD, Workload, expected_bytes


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The quartiles of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high)


@dataclass(frozen=True)
class Comparison:
    """How long a peer took for a step over how long shardwise took, round by round."""

    ours: Pair
    peer: Pair
    ratio: Spread


@dataclass(frozen=True)
class Target:
    """A number to reach: what, the value, the target, and whether it was met."""

    what: str
    value: str
    target: str
    met: bool


def ratio(above: Pair, below: Pair) -> Spread:
    """Time of ``above`` over time of ``below``, formed within each round."""
    return Spread.of([above.rounds[i].seconds / below.rounds[i].seconds for i in above.rounds if i in below.rounds])


def comparisons(pairs: Sequence[Pair]) -> list[Comparison]:
    """shardwise with every peer of the same stage, and with the compute alone."""
    found = []
    for ours in (p for p in pairs if p.contender.library == "shardwise"):
        for peer in pairs:
            same = peer.contender.stage in (None, ours.contender.stage)
            if same and peer.contender.library != "shardwise":
                found.append(Comparison(ours, peer, ratio(peer, ours)))
    return found


def targets(pairs: Sequence[Pair], w: Workload, ranks: int) -> list[Target]:
    """Every target that the contenders which ran allow to judge."""
    return [*_speed(pairs), *_memory(pairs), *_bytes(pairs, w, ranks)]


def wire_bytes(pair: Pair) -> float | None:
    """Bytes on the wire a rank and step: the least of the rounds, for what other programs send only adds to it."""
    found = [r.wire for r in pair.rounds.values() if r.wire is not None]
    return min(found, default=None)


def counted_bytes(pair: Pair) -> float | None:
    """Bytes that the library itself counted, a rank and step."""
    found = [r.counted for r in pair.rounds.values() if r.counted is not None]
    return statistics.median(found) if found else None


def _speed(pairs: Sequence[Pair]) -> list[Target]:
    found = []
    for c in comparisons(pairs):
        stage = c.ours.contender.stage or 0
        least = FASTER_THAN.get((c.peer.contender.library, stage))
        if least is not None:
            what = f"throughput of stage {stage} over {c.peer.contender.label}"
            found.append(Target(what, f"{c.ratio.median:.2f}x", f">= {least:g}x", c.ratio.median >= least))
        elif c.peer.contender.library == "compute":
            over, most = ratio(c.ours, c.peer).median - 1, LARGEST_OVERHEAD[stage]
            what = f"time of stage {stage} above the compute alone"
            found.append(Target(what, f"{over:+.1%}", f"<= {most:.0%}", over <= most))
    return found


def _memory(pairs: Sequence[Pair]) -> list[Target]:
    found = []
    for ours in (p for p in pairs if p.contender.library == "shardwise"):
        peers = [p for p in pairs if p.contender.stage == ours.contender.stage and p is not ours]
        if peers:
            best = min(peers, key=lambda p: p.peak)
            found.append(
                Target(
                    f"peak RSS of stage {ours.contender.stage}",
                    f"{ours.peak / 1e6:.0f} MB",
                    f"<= {best.peak / 1e6:.0f} MB ({best.contender.label})",
                    ours.peak <= best.peak,
                )
            )
    return found


def _bytes(pairs: Sequence[Pair], w: Workload, ranks: int) -> list[Target]:
    found = []
    for ours in (p for p in pairs if p.contender.library == "shardwise"):
        counted, expected = counted_bytes(ours), expected_bytes(w, ours.contender.stage or 0, ranks)
        if counted is not None and expected:
            off = counted / expected - 1
            formula = "3Ψ(N-1)/N" if ours.contender.stage == 3 else "2Ψ(N-1)/N"
            found.append(
                Target(
                    f"bytes a rank sends in a step, stage {ours.contender.stage}",
                    f"{counted / 1e6:.2f} MB ({off:+.2%})",
                    f"{formula} = {expected / 1e6:.2f} MB, within {BYTES_TOLERANCE:.0%}",
                    abs(off) <= BYTES_TOLERANCE,
                )
            )
    return found
