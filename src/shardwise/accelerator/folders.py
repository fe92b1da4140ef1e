"""Folders of checkpoints: written aside and put in place when they are whole; only then the old one goes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

MANIFEST = "shardwise_state.json"
NAMED = re.compile(r"checkpoint_(\d+)")
KINDS = "model|optimizer|optimizer_rank|scheduler|loader|custom_checkpoint|scaler|random_states"
OURS = re.compile(rf"({KINDS})[_\d]*\.safetensors")


def begin(final: Path) -> Path:
    """An empty folder beside the one that is to be written."""
    recover(final)
    aside = _aside(final)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def commit(final: Path) -> None:
    """Put the folder that was begun in place. What else is in a folder that it takes the place of stays there."""
    aside = _aside(final)
    if not final.exists():
        aside.rename(final)
    elif _in_use(final):
        _move_in(aside, final)
    else:
        final.rename(_old(final))
        aside.rename(final)
        _clear(final)


def give_up(final: Path) -> None:
    """After a save that failed: nothing of it stays, where the space may be what was missing."""
    with contextlib.suppress(OSError):  # the error to see is the one of the save
        recover(final)
        if final.exists() or not (_aside(final) / MANIFEST).is_file():
            shutil.rmtree(_aside(final), ignore_errors=True)


def recover(final: Path) -> None:
    """Finish a :func:`commit` that was interrupted: the new folder if it is whole, else the old one, is in place."""
    if not final.exists() and (_aside(final) / MANIFEST).is_file():
        _aside(final).rename(final)
    elif not final.exists() and _old(final).is_dir():
        _old(final).rename(final)
    _clear(final)


def automatic(folder: Path) -> list[Path]:
    """The checkpoints with automatic names, by number."""
    found = [p for p in folder.iterdir() if NAMED.fullmatch(p.name)] if folder.is_dir() else []
    return sorted(found, key=lambda p: int(p.name.rpartition("_")[2]))


def numbered(name: str, i: int) -> str:
    """The file of the i-th object of its kind."""
    return f"{name}.safetensors" if i == 0 else f"{name}_{i}.safetensors"


def aside_name(final: Path) -> str:
    """The name of the folder in which a checkpoint is written before it is put in place."""
    return _aside(final).name


def _aside(final: Path) -> Path:
    final = final.absolute()
    return final.with_name(f".{final.name}.partial")


def _old(final: Path) -> Path:
    final = final.absolute()
    return final.with_name(f".{final.name}.old")


def _clear(final: Path) -> None:
    """Remove the folder that the present one took the place of, after what is not ours in it was taken over."""
    old = _old(final)
    if not old.is_dir() or not final.is_dir():
        return
    for item in old.iterdir():
        if not _ours(item) and not (final / item.name).exists():
            item.rename(final / item.name)
    shutil.rmtree(old)


def _ours(item: Path) -> bool:
    return item.name == MANIFEST or OURS.fullmatch(item.name) is not None


def _in_use(final: Path) -> bool:
    """Whether this process stands in the folder, which can then not be put aside."""
    here, there = Path.cwd(), final.resolve()
    return there == here or there in here.parents


def _move_in(aside: Path, final: Path) -> None:
    (final / MANIFEST).unlink(missing_ok=True)  # not whole from here on
    for item in final.iterdir():
        if _ours(item):
            item.unlink()
    for item in sorted(aside.iterdir(), key=lambda p: p.name == MANIFEST):
        os.replace(item, final / item.name) if item.is_file() else shutil.move(item, final / item.name)
    aside.rmdir()
