"""Who is missing: turns a failed or timed-out wait into an error that names ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shardwise import _torch
from shardwise.errors import CommError

if TYPE_CHECKING:
    from shardwise.dist.comm import Axis

# How long a rank that gave up listens for others that gave up too before it says who did not.
GRACE_S = 2.0


def explain_failure(axis: Axis, what: str, peer: int, error: RuntimeError) -> CommError:
    """Build the error for a collective that did not complete.

    Every rank that gives up writes what it waited for into the store of the process group; whoever wrote nothing
    did not arrive.
    """
    text = str(error)
    me = axis.ranks[axis.position]
    axis.failed = True
    if not _is_timeout(text):
        lost = f"rank {peer}" if peer >= 0 else "another rank"
        # A rank that gave up waiting closes its connections too; it says so, and who it missed, in the store.
        gave_up = _notes(axis, patience=GRACE_S / 2)
        if gave_up:
            told = "; ".join(f"rank {r} gave up waiting in `{w}`" for r, w in sorted(gave_up.items()))
            quiet = [r for r in axis.ranks if r not in gave_up and r != me]
            missing = f" Not heard from: {_ranks(quiet)}." if quiet else ""
            return CommError(f"rank {me} was in `{what}` when {told}.{missing} The ranks ran different calls.")
        return CommError(
            f"rank {me} lost its connection to {lost} in `{what}`: that process ended or failed. "
            f"Its own error says why. ({_first_line(text)})"
        )
    seconds = axis.timeout.total_seconds()
    where = _where_others_are(axis, what)
    return CommError(
        f"rank {me} waited {seconds:g} s in `{what}` on axis `{axis.name}`. {where} "
        "All ranks must run the same modules in the same order; raise `communication_timeout` if a rank is only slow."
    )


def _where_others_are(axis: Axis, what: str) -> str:
    me = axis.ranks[axis.position]
    try:
        _torch.default_store().set(_key(axis, me), what)
    except RuntimeError as error:
        return f"The other ranks could not be told ({_first_line(str(error))})."
    waiting = _notes(axis, patience=GRACE_S)
    absent = [r for r in axis.ranks if r not in waiting and r != me]
    parts = []
    if absent:
        parts.append(f"Did not arrive: {_ranks(absent)}.")
    for rank, other in sorted(waiting.items()):
        if other != what:
            parts.append(f"Rank {rank} waits in `{other}` instead.")
    return " ".join(parts) or "All ranks wait in the same call: the network is down or too slow."


def _notes(axis: Axis, patience: float) -> dict[int, str]:
    """What the other ranks wrote when they gave up, by rank; waits up to ``patience`` seconds for all of them."""
    others = [r for r in axis.ranks if r != axis.ranks[axis.position]]
    found: dict[int, str] = {}
    deadline = time.monotonic() + patience
    try:
        store = _torch.default_store()
        while len(found) < len(others):
            for rank in others:
                if rank not in found and store.check([_key(axis, rank)]):
                    found[rank] = store.get(_key(axis, rank)).decode()
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    except RuntimeError:
        return found  # the process that kept the store is gone: what was read is all there is
    return found


def _key(axis: Axis, rank: int) -> str:
    return f"shardwise/stuck/{axis.name}/{rank}"


def _is_timeout(text: str) -> bool:
    lowered = text.lower()
    return "timed out" in lowered or "timeout" in lowered


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else "no message"
