"""Where the values of tensors come from when a model is spread: memory, a state dict, a folder, an index."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.big_models.checkpoint import SafetensorsFiles
from shardwise.big_models.device_map import shown
from shardwise.big_models.stored import InMemory, Stored, from_index, index_entry, read_index, write, write_index
from shardwise.big_models.tensors import ModelTensor
from shardwise.errors import ConfigError, ShardingError


class Sources:
    """Finds, for each tensor that leaves its device, the place where its values lie from now on.

    Args:
        folder: where values are written that go to the disk and are in no file yet. An ``index.json`` there says where
            the values of tensors lie that the model itself has not.
        index: the same, from memory; it comes before everything else.
        state_dict: values by name, before the model's own.

    Raises:
        ConfigError: the folder's index cannot be read.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        state_dict: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._folder = Path(folder) if folder is not None else None
        self._index = dict(index or {})
        self._old = read_index(self._folder) if self._folder is not None else {}
        self._state = state_dict or {}
        self._files = SafetensorsFiles()
        self._written: dict[str, dict[str, str]] = {}
        self._lost: list[str] = []
        self._nowhere: list[str] = []

    def in_memory(self, tensor: ModelTensor) -> Stored | None:
        """The values of a tensor that is kept in the CPU's memory. None if there are none: :meth:`check` raises."""
        value = self._value(tensor)
        if value is not None:
            return InMemory(value.detach().to("cpu"))
        return self._listed(tensor, {**self._old, **self._index}, required=True)

    def on_disk(self, tensor: ModelTensor) -> Stored | None:
        """The values of a tensor that is kept on the disk; None, and :meth:`check` raises, if there are none."""
        if listed := self._listed(tensor, self._index):
            return listed
        value = self._value(tensor)
        if value is None:
            return self._listed(tensor, self._old, required=True)
        if self._folder is None:
            self._nowhere.append(tensor.name)
            return None
        # Written even when the folder has an older file of that name: the model's own values count.
        entry = index_entry(write(self._folder, tensor.name, value), value.dtype)
        self._written.update({owner.name: entry for owner in tensor.owners})
        return from_index(self._written, tensor.name, self._files)

    def resident(self, tensor: ModelTensor) -> torch.Tensor | None:
        """The values of a tensor that stays on a device; None, and :meth:`check` raises, if there are none."""
        value = self._value(tensor)
        if value is not None:
            return value
        listed = self._listed(tensor, {**self._old, **self._index}, required=True)
        return None if listed is None else listed.view()

    def check(self) -> None:
        """See to it that everything was found, and note in the folder what was written there.

        Raises:
            ConfigError: something has to be written and there is no folder.
            ShardingError: the model has tensors without values, and nothing else has them.
        """
        if self._nowhere:
            raise ConfigError(
                f"offload_dir (offload_folder where a checkpoint is loaded): name a folder for what goes to 'disk' and "
                f"is in no file yet: {shown(self._nowhere)}"
            )
        if self._lost:
            raise ShardingError(
                f"no values (meta device): {shown(self._lost)}. Load a checkpoint that holds them; buffers that are in "
                "no checkpoint are real when the model is built under init_empty_weights(include_buffers=False)"
            )
        if self._written and self._folder is not None:
            write_index(self._folder, {**self._old, **self._written})

    def _value(self, tensor: ModelTensor) -> torch.Tensor | None:
        given = next((self._state[owner.name] for owner in tensor.owners if owner.name in self._state), None)
        value = tensor.value if given is None else given
        return None if value.is_meta else value

    def _listed(self, tensor: ModelTensor, index: Mapping[str, Any], required: bool = False) -> Stored | None:
        name = next((owner.name for owner in tensor.owners if owner.name in index), None)
        if name is None:
            if required:
                self._lost.append(tensor.name)
            return None
        return from_index(index, name, self._files)
