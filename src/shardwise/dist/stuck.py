"""Who is missing: turns a failed or timed-out wait into an error that names ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shardwise import _torch
from shardwise.errors import CommError

if TYPE_CHECKING:
    from shardwise.dist.comm import Axis

# How long a rank whose wait failed listens, at least and at most, for the others' waits to fail too before it says
# who did not arrive.
GRACE_S = 2.0
LONGEST_GRACE_S = 30.0
# How a wait ended, as written in the store: by the timeout, or because another process closed its connection.
GAVE_UP, LOST = "gave_up", "lost"


def explain_failure(axis: Axis, what: str, peer: int, error: RuntimeError) -> CommError:
    """Build the error for a collective that did not complete.

    Every rank whose wait ends in an error writes what it waited for into the store of the process group; whoever
    wrote nothing did not arrive.
    """
    text = str(error)
    me = axis.ranks[axis.position]
    axis.failed = True
    untold = _tell(axis, GAVE_UP if _is_timeout(text) else LOST, what)
    if not _is_timeout(text):
        lost = f"rank {peer}" if peer >= 0 else "another rank"
        # A rank that gave up waiting closes its connections too; it says so, and who it missed, in the store.
        # One that only lost a connection is as much a victim as this one.
        gave_up = {r: w for r, (how, w) in _notes(axis, GRACE_S / 2).items() if how == GAVE_UP}
        if gave_up:
            told = "; ".join(f"rank {r} gave up waiting in `{w}`" for r, w in sorted(gave_up.items()))
            quiet = [r for r in axis.ranks if r not in gave_up and r != me]
            missing = f" Not heard from: {_ranks(quiet)}." if quiet else ""
            return CommError(f"rank {me} was in `{what}` when {told}.{missing} The ranks ran different calls.")
        return CommError(
            f"rank {me} lost its connection to {lost} in `{what}`: that process failed, and its own error says why; or it "
            "ended earlier, because its loop was shorter, or because this call is made by one rank only. "
            f"({_first_line(text)})"
        )
    seconds = axis.timeout.total_seconds()
    where = untold or _where_others_are(axis, what)
    return CommError(
        f"rank {me} waited {seconds:g} s in `{what}` on axis `{axis.name}`. {where} "
        "All ranks must make the same calls in the same order: look for one inside of `if is_main_process`, and for "
        "loops of different lengths. If a rank is only slow, raise the timeout (`communication_timeout` in a ds_config, "
        "InitProcessGroupKwargs(timeout=) of an Accelerator)."
    )


def _tell(axis: Axis, how: str, what: str) -> str:
    """Write this rank's note; returns why that was not possible, or nothing."""
    try:
        _torch.default_store().set(_key(axis, axis.ranks[axis.position]), f"{how} {what}")
    except RuntimeError as error:
        return f"The other ranks could not be told ({_first_line(str(error))})."
    return ""


def _where_others_are(axis: Axis, what: str) -> str:
    me = axis.ranks[axis.position]
    # A rank that came to its wait later gives up later, by as much: it is heard for as long again, within reason.
    waiting = _notes(axis, patience=min(max(GRACE_S, axis.timeout.total_seconds()), LONGEST_GRACE_S))
    absent = [r for r in axis.ranks if r not in waiting and r != me]
    parts = []
    if absent:
        parts.append(f"Did not arrive: {_ranks(absent)}.")
    for rank, (_, other) in sorted(waiting.items()):
        if other != what:
            parts.append(f"Rank {rank} waits in `{other}` instead.")
    return " ".join(parts) or "All ranks wait in the same call: the network is down or too slow."


def _notes(axis: Axis, patience: float) -> dict[int, tuple[str, str]]:
    """How and where the other ranks' waits ended, by rank; waits up to ``patience`` seconds to hear from all."""
    others = [r for r in axis.ranks if r != axis.ranks[axis.position]]
    found: dict[int, tuple[str, str]] = {}
    deadline = time.monotonic() + patience
    try:
        store = _torch.default_store()
        while len(found) < len(others):
            for rank in others:
                if rank not in found and store.check([_key(axis, rank)]):
                    how, what = store.get(_key(axis, rank)).decode().split(" ", 1)
                    found[rank] = (how, what)
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
