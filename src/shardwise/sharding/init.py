"""``zero.Init``: a model that never exists whole on any rank."""

from __future__ import annotations

from collections import OrderedDict
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shardwise.dist import Axis, Mesh, init_distributed
from shardwise.dist.mesh import default_device
from shardwise.errors import NotYetSupported, ShardingError
from shardwise.sharding.access import mark, unit_of
from shardwise.sharding.policy import POLICIES
from shardwise.sharding.state import StateDictHooks
from shardwise.sharding.stray import StrayParameters
from shardwise.sharding.unit import Unit

# Parameters that initialisation code touches stay whole until this many others were touched after them, so that code
# that copies from one to another works.
TOUCHED = 4

# Far from the tags that scripts use on the default group.
FIRST_INDEX = 1 << 20


class Init:
    """A context in which each module's parameters are sharded as soon as the module is part of another.

    A module that is built and not yet part of another one is whole: ``[Layer() for _ in range(n)]`` before
    ``ModuleList`` holds n whole layers; give the list a generator, or append one by one.

    The module's own code runs as always, on every rank, with torch's random numbers: the values are those that the
    model has without this, under the same seed. Code that initialises parameters later (``model.apply(...)``,
    ``nn.init.normal_(self.head.weight)``) finds them whole for the moment that it touches them. Rank 0's values count.

    Args:
        module: shard this module, which exists already, instead.
        remote_device: where shards shall live; only the rank's own device has landed.
        enabled: False makes this do nothing.
        dtype: cast floating-point parameters to this when they are sharded; default: keep their own, so that fp32
            masters start from full precision.
        others: names of upstream's arguments; ``config`` and ``config_dict_or_path`` are accepted (the stage that
            matters is that of ``initialize``), groups and quantised weights have not landed.

    Raises:
        NotYetSupported: an argument whose capability has not landed.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **others: Any,
    ) -> None:
        asked = {"data_parallel_group": data_parallel_group, "mpu": mpu, **others}
        wanted = [name for name, value in asked.items() if value]
        if remote_device not in (None, "none", default_device().type):
            wanted.append("remote_device")
        if pin_memory:
            wanted.append("pin_memory")
        if wanted:
            raise NotYetSupported(f"zero.Init({', '.join(wanted)}=...): has not landed yet.")
        self._enabled = enabled
        self._dtype = dtype
        self._units = 0
        self._modules: OrderedDict[int, nn.Module] = OrderedDict()
        self._children: set[int] = set()
        self._touched: OrderedDict[int, Unit] = OrderedDict()
        self._hooks: list[Any] = []
        self._mesh: Mesh | None = None
        if module is not None and enabled:
            self._start()
            self._finish([module])

    def __enter__(self) -> Init:
        if not self._enabled:
            return self
        self._start()
        self._hooks = [
            register_module_parameter_registration_hook(lambda m, name, p: self._note(m)),
            register_module_module_registration_hook(self._registered),
        ]
        self._watch = StrayParameters(unit_of, self._touch)
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._enabled:
            return
        self._watch.stop()
        for hook in self._hooks:
            hook.remove()
        if kind is None:
            self._finish([m for key, m in self._modules.items() if key not in self._children])
        self._modules.clear()
        self._touched.clear()

    def _start(self) -> None:
        init_distributed()
        self._mesh = _whole_world()

    def _finish(self, roots: list[nn.Module]) -> None:
        for root in roots:
            self._shard(root)
        self._evict(0)
        for root in roots:
            units = [u for p in root.parameters() if (u := unit_of(p)) is not None and u.provisional]
            hooks = StateDictHooks(root, [], units)
            for unit in units:
                unit.on_take_over = hooks.remove

    def _note(self, module: nn.Module) -> None:
        self._modules[id(module)] = module

    def _registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        self._note(parent)
        if child is not None:
            self._children.add(id(child))
            self._shard(child)

    def _shard(self, module: nn.Module) -> None:
        """Cut every parameter of the module that is not cut yet, each by itself: the engine groups them later."""
        mesh = self._mesh
        if mesh is None:
            return
        if mesh.world.size == 1:
            for param in module.parameters(recurse=True):
                if self._dtype is not None and param.is_floating_point():
                    param.data = param.data.to(self._dtype)
            return
        for name, param in module.named_parameters():
            if unit_of(param) is not None or param.is_meta:
                continue
            dtype = self._dtype if self._dtype is not None and param.is_floating_point() else param.dtype
            index = FIRST_INDEX + self._units
            unit = Unit(index, name, [(name, param)], dtype, POLICIES[3], mesh, default_device(), provisional=True)
            self._units += 1
            unit.fill(with_master=False)
            mark(unit)
            self._settle(unit)

    def _touch(self, unit: Unit) -> None:
        if not unit.provisional:
            raise ShardingError(
                f"zero.Init is active while parameters of {unit.name}, which an engine manages, are used."
            )
        unit.finish_gather()
        self._touched[id(unit)] = unit
        self._evict(TOUCHED)

    def _evict(self, keep: int) -> None:
        while len(self._touched) > keep:
            _, unit = self._touched.popitem(last=False)
            self._settle(unit)

    @staticmethod
    def _settle(unit: Unit) -> None:
        """The unit may have been written: keep rank 0's values, and release it."""
        with torch.no_grad():
            unit.mesh.world.broadcast(unit.flat, 0, unit.name)
            unit.adopt()
        unit.release()


def _whole_world() -> Mesh:
    # The default group, not new ones: nothing here is in flight for longer than a call, and nobody has to close it.
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    timeout = timedelta(minutes=10)
    group = dist.group.WORLD if size > 1 else None
    world = Axis("world", tuple(range(size)), rank, group, timeout)
    return Mesh(world, world, Axis("replicate", (rank,), 0, None, timeout), None)
