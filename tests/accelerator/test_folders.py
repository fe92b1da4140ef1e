"""What lies in a checkpoint's folder, and what is left of it when a save is interrupted."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwise import ShardwiseError
from shardwise.accelerator import files
from shardwise.accelerator.files import read_value, write_value
from tests.accelerator.loops import accelerating
from tests.accelerator.test_checkpoints import filled
from tests.ranks import RankPools


class Tricky(dict[str, Any]):
    made = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        Tricky.made += 1


def test_a_file_makes_no_objects_of_classes(tmp_path: Path) -> None:
    """A constructor may do anything, and a file may come from a stranger."""
    write_value(tmp_path / "value.safetensors", {"a": Tricky({"b": [1, (2, torch.ones(1))]})})
    Tricky.made = 0
    found = read_value(tmp_path / "value.safetensors")
    assert Tricky.made == 0 and type(found["a"]) is dict and found["a"]["b"][1][0] == 2


def test_a_save_that_was_interrupted_between_two_folders_loses_no_file_of_somebody(tmp_path: Path) -> None:
    with accelerating(cpu=True) as accelerator:
        filled(accelerator)
        place = tmp_path / "state"
        accelerator.save_state(place)
        (place / "notes.txt").write_text("mine")
        # As left by a kill after the renames, before the old folder was emptied.
        shutil.copytree(place, tmp_path / ".state.old")
        (place / "notes.txt").unlink()
        accelerator.save_state(place)
        assert (place / "notes.txt").read_text() == "mine"
        # And by one between the renames: only the old folder is there.
        place.rename(tmp_path / ".state.old")
        accelerator.load_state(place)
        assert (place / "notes.txt").read_text() == "mine"


def fills_the_disk(place: str) -> list[str]:
    """The second save finds no space, on the main process alone."""
    with accelerating(cpu=True) as accelerator:
        filled(accelerator)
        accelerator.save_state(place)
        real, main = files.save_file, accelerator.is_main_process

        def save(tensors: Any, path: Any, **more: Any) -> None:
            if main and "model" in str(path):
                raise OSError(errno.ENOSPC, "No space left on device")
            real(tensors, path, **more)

        with patch.object(files, "save_file", save), pytest.raises(ShardwiseError) as caught:
            accelerator.save_state(place)
        accelerator.wait_for_everyone()
        left = sorted(path.name for path in Path(place).parent.iterdir())
        accelerator.load_state(place)  # the old one
        return [str(caught.value), *left]


def test_a_full_disk_is_told_on_all_processes_and_loses_nothing(ranks: RankPools, tmp_path: Path) -> None:
    for said, *left in ranks(2).run(fills_the_disk, str(tmp_path / "state")):
        assert "model.safetensors" in said and "No space left" in said
        assert left == ["state"]
