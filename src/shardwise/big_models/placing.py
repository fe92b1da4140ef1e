"""The tensors of a model put in their places, and the hooks that bring what a module needs when it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.big_models.hooks import add_hook_to_module
from shardwise.big_models.offload import OffloadedTensor, OffloadHook
from shardwise.big_models.sources import Sources
from shardwise.big_models.tensors import ModelTensor, Owner, parameter_like, put, tensors_of
from shardwise.errors import ShardingError

# torch's own modules that use the weights of a module within without calling it.
_PRELOADED = frozenset({"MultiheadAttention"})


@dataclass(frozen=True)
class Home:
    """Where a module runs, and where its weights are between its calls.

    Attributes:
        device: where it runs.
        away: "cpu" or "disk" when its weights are only there between calls; None when they stay on the device.
    """

    device: torch.device
    away: str | None = None


def place(
    model: nn.Module,
    home_of: Callable[[str], Home],
    sources: Sources,
    offload_buffers: bool = False,
    skip_keys: frozenset[str] = frozenset(),
    preload_classes: frozenset[str] = frozenset(),
    hooked_names: Iterable[str] = (),
) -> None:
    """Put each tensor where it shall be and attach the hooks. If something has no values, the model stays as it is.

    Args:
        model: the model.
        home_of: where the module or tensor of a name runs and stays.
        sources: finds the values.
        offload_buffers: saved buffers go away with the weights; the others always stay where their module runs.
        skip_keys: keys of arguments that are not moved.
        preload_classes: names of classes whose modules bring all that is within them as they are called.
        hooked_names: modules that bring their inputs to their device, when there are several.

    Raises:
        ConfigError, ShardingError: values are missing, or the model has such hooks already.
    """
    if any(isinstance(module.__dict__.get("_hf_hook"), OffloadHook) for module in model.modules()):
        raise ShardingError("this model was dispatched before; call remove_hook_from_submodules(model) first")
    tensors = tensors_of(model)
    placements = [_Placement(tensor, home_of, sources, offload_buffers) for tensor in tensors]
    sources.check()
    modules = dict(model.named_modules(remove_duplicate=False))
    preload = [name for name, module in modules.items() if type(module).__name__ in preload_classes | _PRELOADED]
    weights: dict[str, list[tuple[Owner, OffloadedTensor]]] = {}
    several = len({home_of(owner.name).device for tensor in tensors for owner in tensor.owners}) > 1
    names = {""}
    if several:
        names.update(name for name in hooked_names if name in modules)
        names.update(owner.module_name for tensor in tensors for owner in tensor.owners)
    for placement in placements:
        for owner, away in placement.settle():
            holder = next((p for p in preload if f"{owner.name}.".startswith(f"{p}." if p else "")), owner.module_name)
            weights.setdefault(holder, []).append((owner, away))
    names.update(weights)
    for name, module in modules.items():
        if name in names and not (name and isinstance(module.__dict__.get("_hf_hook"), OffloadHook)):
            hook = OffloadHook(
                home_of(name).device,
                weights.get(name, []),
                io_same_device=not name,
                skip_keys=skip_keys,
                name=name,
                root=not name,
            )
            add_hook_to_module(module, hook, append=True)


class _Placement:
    """What becomes of one tensor at each place where it hangs; :meth:`settle` does it."""

    def __init__(
        self, tensor: ModelTensor, home_of: Callable[[str], Home], sources: Sources, offload_buffers: bool
    ) -> None:
        self._tensor = tensor
        self._homes = [home_of(owner.name) for owner in tensor.owners]
        stays = tensor.is_buffer and not (offload_buffers and tensor.persistent)
        # Where a tied weight stays, the modules that run there use it too, wherever the map would keep theirs.
        self._resident = {home.device for home in self._homes if home.away is None or stays}
        self._values = sources.resident(tensor) if self._resident else None
        self._away: dict[torch.device, OffloadedTensor] = {}
        for home in self._homes:
            if home.device in self._resident or home.device in self._away:
                continue
            stored = sources.in_memory(tensor) if home.away == "cpu" else sources.on_disk(tensor)
            if stored is not None:
                self._away[home.device] = OffloadedTensor(tensor.value, tensor.name, stored, home.device)

    def settle(self) -> list[tuple[Owner, OffloadedTensor]]:
        """Put the tensor where it stays. Returns what has to be brought for each call, and where it hangs."""
        old, here = self._tensor.value, {}
        for device in self._resident:
            values = self._values if self._values is not None else old
            same = values is old and old.device == device
            here[device] = old if same else parameter_like(old, values.detach().to(device))
        coming, seen = [], set()
        for owner, home in zip(self._tensor.owners, self._homes, strict=True):
            if home.device in here:
                put(owner, here[home.device])
            elif (id(owner.module), owner.attribute) not in seen:  # a module with two names brings its weights once
                seen.add((id(owner.module), owner.attribute))
                coming.append((owner, self._away[home.device]))
        return coming
