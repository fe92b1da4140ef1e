"""A model as a tree of blocks: what a device map can place apart from the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwise.big_models.sizes import tensor_bytes
from shardwise.big_models.tensors import Device, tensors_of


@dataclass(eq=False)
class Block:
    """A module, or a parameter or buffer that hangs on one that was split.

    Attributes:
        name: from the model's root.
        tensors: ids of the distinct tensors in it.
        parts: what it falls into when it is split; none for a layer that stays whole.
        largest: bytes of the largest layer in it.
        largest_weights: bytes of the parameters of the layer that has most of them.
    """

    name: str
    tensors: frozenset[int]
    parts: list[Block] = field(default_factory=list)
    largest: int = 0
    largest_weights: int = 0

    def holds(self, names: set[str]) -> bool:
        """Whether one of the names is that of this block or of one within."""
        return any(name == self.name or not self.name or name.startswith(self.name + ".") for name in names)

    def layers_with(self, tensor: int) -> Iterator[Block]:
        """The smallest blocks within that cannot be split and hold a tensor."""
        if tensor in self.tensors:
            if self.parts:
                for part in self.parts:
                    yield from part.layers_with(tensor)
            else:
                yield self

    def without(self, names: set[str]) -> list[Block]:
        """What is left of this block when the blocks of these names are taken out."""
        if self.name in names:
            return []
        if not self.parts or not self.holds(names):
            return [self]
        return [left for part in self.parts for left in part.without(names)]


class Blocks:
    """The tree of a model's blocks, with the bytes of its tensors.

    Args:
        model: the model; may be on the meta device.
        whole: names of classes whose modules are never split.
        dtype, special_dtypes: what the tensors will be cast to, as for :func:`compute_module_sizes`.
    """

    def __init__(
        self,
        model: nn.Module,
        whole: frozenset[str],
        dtype: torch.dtype | None = None,
        special_dtypes: Mapping[str, torch.dtype | None] | None = None,
    ) -> None:
        self.bytes: dict[int, int] = {}
        self.buffers: set[int] = set()
        self.tied: set[int] = set()
        self._below: dict[str, list[tuple[str, int]]] = {}
        for tensor in tensors_of(model):
            key = id(tensor.value)
            self.bytes[key] = tensor_bytes(tensor, dtype, special_dtypes or {})
            if tensor.is_buffer:
                self.buffers.add(key)
            if len(tensor.owners) > 1:
                self.tied.add(key)
            for owner in tensor.owners:
                self._below.setdefault(owner.module_name, []).append((owner.name, key))
        self._whole = whole
        self.root = self._module("", model)

    def size(self, tensors: frozenset[int] | set[int]) -> int:
        """The bytes of some tensors."""
        return sum(self.bytes[key] for key in tensors)

    def _module(self, name: str, module: nn.Module) -> Block:
        prefix = f"{name}." if name else ""
        children = [
            self._module(prefix + child_name, child)
            for child_name, child in module._modules.items()
            if child is not None
        ]
        own = [self._layer(n, frozenset([key])) for n, key in self._below.get(name, [])]
        tensors = frozenset().union(*(part.tensors for part in [*own, *children]))
        # A layer without modules in it stays whole; only the root falls into its own parameters.
        if type(module).__name__ in self._whole or (name and not children):
            return self._layer(name, tensors)
        parameters = [part for part in own if not part.tensors & self.buffers]
        parts = [*parameters, *children, *(part for part in own if part.tensors & self.buffers)]
        largest = max((part.largest for part in parts), default=0)
        return Block(name, tensors, parts, largest, max((part.largest_weights for part in parts), default=0))

    def _layer(self, name: str, tensors: frozenset[int]) -> Block:
        return Block(name, tensors, [], self.size(tensors), self.size(tensors - self.buffers))

    def joined(self, devices: Mapping[str, Device], block: Block | None = None) -> dict[str, Device]:
        """A device map with each module whose parts are all on one device named instead of them."""
        block = self.root if block is None else block
        if block.name in devices:
            return {block.name: devices[block.name]}
        found: dict[str, Device] = {}
        for part in block.parts:
            found.update(self.joined(devices, part))
        places = list(found.values())
        if places and all(place == places[0] for place in places):
            return {block.name: places[0]}
        return found
