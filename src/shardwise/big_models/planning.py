"""Which device each module of a model goes to, when the devices have only so much memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import nn

from shardwise.big_models.blocks import Block, Blocks
from shardwise.big_models.sizes import get_max_memory
from shardwise.big_models.tensors import Device, as_dtype, class_names
from shardwise.errors import ConfigError

OFFLOADED = ("cpu", "disk")


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, int | float | str] | None = None,
    no_split_module_classes: str | list[str] | tuple[str, ...] | set[str] | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Device]:
    """Fill the devices one after the other: accelerators, then the CPU, then the disk.

    The first accelerator and the CPU keep room for the largest layer that is placed after, since a layer that is
    offloaded comes there to run. Tied weights count once, and what holds them goes to one device. Buffers of offloaded
    modules stay where those modules run, unless ``offload_buffers``, and are counted there.

    Args:
        model: the model; may be on the meta device.
        max_memory: bytes, or text such as "10GB", by device; what is free now when None.
        no_split_module_classes: names of classes whose modules stay whole (blocks with a residual connection).
        dtype: what floating-point weights are cast to when they are loaded; their own dtype when None.
        special_dtypes: dtypes of single parameters, by name.
        verbose: print a table of what went where.
        clean_result: name a module instead of its parts where these are all on one device.
        offload_buffers: buffers are offloaded with the parameters.
        fallback_allocation: when the next layer is too large for a device that is still empty, look for a later one
            that fits.

    Returns:
        Devices by the names of modules, and of parameters and buffers of a module that was split.

    Raises:
        ConfigError: ``max_memory`` cannot be read, or gives the disk a limit and the model is larger than all.
    """
    special = {name: as_dtype(d) for name, d in (special_dtypes or {}).items()}
    blocks = Blocks(model, class_names(no_split_module_classes), as_dtype(dtype), special)
    limits = get_max_memory(max_memory)
    plan, kept = _Plan(blocks, limits, fallback_allocation), 0
    plan.fill()
    # Buffers that stay where offloaded modules run take room there, which may push more modules out, and so on.
    while not offload_buffers and (needed := plan.stranded_buffers()) > kept:
        kept = needed
        plan = _Plan(blocks, limits, fallback_allocation, kept)
        plan.fill()
    if kept > limits.get(plan.main, 0) and plan.main != "disk":
        warnings.warn(
            f"the buffers of offloaded modules take {kept:,} bytes on device {plan.main!r}, for which max_memory gives "
            f"{limits.get(plan.main, 0):,}; pass offload_buffers=True to bring them there only while they are used",
            stacklevel=2,
        )
    if verbose:
        _show(plan)
    return blocks.joined(plan.devices) if clean_result else dict(plan.devices)


class _Plan:
    """One way through the model's blocks, filling the devices in turn."""

    def __init__(
        self, blocks: Blocks, limits: Mapping[int | str, int], fallback: bool, kept_for_buffers: int = 0
    ) -> None:
        self.blocks = blocks
        self.limits = limits
        self.order: list[int | str] = [*limits, *([] if "disk" in limits else ["disk"])]
        self.main = next((device for device in self.order if device not in OFFLOADED), self.order[0])
        self.devices: dict[str, Device] = {}
        self.used: dict[int | str, int] = dict.fromkeys(self.order, 0)
        self.needs: dict[str, int] = {}
        self._fallback = fallback
        self._kept = kept_for_buffers
        self._homes: dict[int, int | str] = {}
        root = blocks.root
        self._queue = list(root.parts) if root.parts else [root]

    def fill(self) -> None:
        """Place every block."""
        position = 0
        while self._queue:
            block, rest = self._queue[0], self._queue[1:]
            device = self.order[position]
            group, needed = self._with_ties(block, rest)
            later = _without(rest, group[1:])
            room = self._room(device, later)
            if room is None or self.used[device] + needed <= room:
                self._place(group, needed, device)
                self._queue = later
            elif block.parts:
                self._queue = [*block.parts, *rest]
            elif (fitting := self._fallback_block(device)) is not None:
                self._queue = [fitting, *_without(self._queue, [fitting])]
            elif position + 1 < len(self.order):
                position += 1
            else:
                raise ConfigError(
                    f"max_memory: {block.name!r} ({needed:,} bytes) and what follows fit on none of the devices "
                    f"{self.order}; give one more, or leave 'disk' without a limit"
                )

    def stranded_buffers(self) -> int:
        """Bytes of buffers of modules that are offloaded from the main device."""
        away = {device for device in OFFLOADED if device != self.main}
        return self.blocks.size({key for key in self.blocks.buffers if self._homes[key] in away})

    def _room(self, device: int | str, later: list[Block]) -> int | None:
        if device not in self.limits:
            return None
        room = self.limits[device]
        if device == self.main:
            room -= self._kept
        # A layer that is offloaded comes to the main device to run, and one from the disk passes through the CPU.
        if device == self.main or (device == "cpu" and self.main != "mps"):
            # Where buffers that stay were counted already, only its weights come.
            comes = [block.largest_weights if self._kept else block.largest for block in later]
            room -= max(comes, default=0)
        return room

    def _with_ties(self, block: Block, others: list[Block]) -> tuple[list[Block], int]:
        """A block with every later layer that shares a weight with it, and the bytes of all."""
        group, tensors = [block], set(block.tensors)
        open_ties = tensors & self.blocks.tied
        done: set[int] = set()
        while open_ties:
            key = open_ties.pop()
            done.add(key)
            for other in others:
                for layer in other.layers_with(key):
                    if all(layer is not known for known in group):
                        group.append(layer)
                        tensors |= layer.tensors
                        open_ties |= (layer.tensors & self.blocks.tied) - done
        return group, self.blocks.size(tensors)

    def _place(self, group: list[Block], needed: int, device: int | str) -> None:
        for block in group:
            self.devices[block.name] = device
            self._homes.update(dict.fromkeys(block.tensors, device))
        self.needs[group[0].name] = needed
        self.used[device] += needed

    def _fallback_block(self, device: int | str) -> Block | None:
        """The first block, nearest to the root, that fits on a device which is still empty."""
        if not self._fallback or self.used[device] or device == "disk":
            return None
        level = self._queue
        while level:
            for block in level:
                others = _without(self._queue, [block])
                group, needed = self._with_ties(block, others)
                room = self._room(device, _without(others, group[1:]))
                if room is not None and 0 < needed <= room:
                    return block
            level = [part for block in level for part in block.parts]
        return None


def _without(blocks: list[Block], taken: list[Block]) -> list[Block]:
    """What is left of some blocks when others, which may be within them, are taken out."""
    names = {block.name for block in taken}
    return [left for block in blocks for left in block.without(names)] if names else blocks


def _show(plan: _Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("module", "device", "bytes", title="device map", title_justify="left")
    for name, device in plan.devices.items():
        size = plan.needs.get(name)
        table.add_row(name or "(the model)", str(device), "with a tied weight" if size is None else f"{size:,}")
    for device in plan.order:
        limit = plan.limits.get(device)
        of = "" if limit is None else f" of {limit:,}"
        table.add_row(f"all on {device}", str(device), f"{plan.used[device]:,}{of}")
    Console().print(table)
