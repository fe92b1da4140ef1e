"""Modules whose weights lie elsewhere between uses: brought to a device before the forward, let go after it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from shardwise.big_models.absent import absent
from shardwise.big_models.hooks import ModelHook
from shardwise.big_models.stored import Stored
from shardwise.big_models.tensors import Owner, first_device, moved, parameter_like, put
from shardwise.errors import ShardingError


class OffloadedTensor:
    """A parameter or buffer that is on one device while modules use it; otherwise a stand-in hangs in its place.

    Modules that share it (tied weights) share one value while they use it at the same time.

    Args:
        old: the parameter or buffer that it stands for.
        name: from the model's root.
        stored: its values.
        device: where it is used.
    """

    def __init__(self, old: torch.Tensor, name: str, stored: Stored, device: torch.device) -> None:
        self.placeholder = absent(old, name)
        # Its class and attributes, without its values.
        self._like = parameter_like(old, torch.empty_like(old, device="meta"))
        self.stored = stored
        self.device = device
        self._home = torch.device("cpu") if old.is_meta else old.device
        self._users = 0
        self._here: torch.Tensor | None = None
        self._restored: torch.Tensor | None = None
        self._view: weakref.ref[torch.Tensor] | None = None
        self._lock = threading.Lock()

    def acquire(self) -> torch.Tensor:
        """The tensor on its device, read for the first of its users. It gets no gradients: nothing would keep them."""
        with self._lock:
            here = self._here
            if here is None:
                here = self._here = parameter_like(self._like, self.stored.load(self.device), requires_grad=False)
            self._users += 1
            return here

    def release(self) -> None:
        """One user fewer; without any, the memory is free again."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._here = None

    def view(self) -> torch.Tensor:
        """The values on the CPU: the same tensor each time as long as somebody holds it, so that ties can be seen."""
        with self._lock:
            view = self._view() if self._view is not None else None
            if view is None:
                view = self.stored.view().detach()
                self._view = weakref.ref(view)
            return view

    def restore(self) -> torch.Tensor:
        """An ordinary parameter or buffer again: where it was before, on the CPU if it had no values then."""
        with self._lock:
            if self._restored is None:
                self._restored = parameter_like(self._like, self.stored.load(self._home))
            return self._restored

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_users": 0, "_here": None, "_view": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


class OffloadHook(ModelHook):
    """Brings a module's inputs, and its weights that lie elsewhere, to the device where it runs.

    Args:
        execution_device: where the module runs; None leaves the inputs where they are.
        weights: what is brought for each call, with the place where it hangs.
        io_same_device: bring the output back to where the first input was.
        skip_keys: keyword arguments, and keys of mappings, that stay where they are.
        name: the module's name from the model's root.
        root: the whole model's module, which must not be moved while it is hooked.
    """

    def __init__(
        self,
        execution_device: torch.device | None,
        weights: list[tuple[Owner, OffloadedTensor]],
        io_same_device: bool = False,
        skip_keys: frozenset[str] = frozenset(),
        name: str = "",
        root: bool = False,
    ) -> None:
        self.name = name
        self.execution_device = execution_device
        self.weights = weights
        self.io_same_device = io_same_device
        self.skip_keys = skip_keys
        self._root = root
        self._calls = 0
        self._held: list[tuple[Owner, OffloadedTensor]] = []
        self._inputs: dict[int, list[torch.device | None]] = {}
        self._handles: list[Any] = []
        self._lock = threading.RLock()

    @property
    def offload(self) -> bool:
        """Whether some of the module's weights lie elsewhere."""
        return bool(self.weights)

    @property
    def weights_map(self) -> Mapping[str, torch.Tensor]:
        """The values of what lies elsewhere, by the name below the module of this hook."""
        return _Values(self)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Put the weights away."""
        for owner, tensor in self.weights:
            put(owner, tensor.placeholder)
        for holder in {id(owner.module): owner.module for owner, _ in self.weights}.values():
            register: Any = holder  # these two have no types in torch
            own = {owner.attribute: tensor for owner, tensor in self.weights if owner.module is holder}
            self._handles += [
                register.register_state_dict_post_hook(_GiveValues(own)),
                register.register_load_state_dict_pre_hook(_refuse_values),
            ]
        if self._root:
            module.__dict__["_apply"] = _refuse_moves
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Bring the weights back for good."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for owner, tensor in self.weights:
            put(owner, tensor.restore())
        if self._root:
            module.__dict__.pop("_apply", None)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring weights and inputs."""
        if self.weights:
            with self._lock:
                self._calls += 1
                if self._calls == 1:
                    for owner, tensor in self.weights:
                        value = tensor.acquire()
                        self._held.append((owner, tensor))
                        put(owner, value)
        if self.io_same_device:
            self._inputs.setdefault(threading.get_ident(), []).append(first_device([args, kwargs]))
        if self.execution_device is not None:
            args = moved(args, self.execution_device, self.skip_keys)
            kwargs = moved(kwargs, self.execution_device, self.skip_keys)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Let the weights go, and bring the output back."""
        self._let_go()
        device = self._input_device()
        return output if device is None else moved(output, device, self.skip_keys)

    def on_error(self, module: nn.Module) -> None:
        """Let the weights go."""
        self._let_go()
        self._input_device()

    def _let_go(self) -> None:
        if not self.weights:
            return
        with self._lock:
            self._calls -= 1
            if not self._calls:
                for owner, tensor in self._held:
                    put(owner, tensor.placeholder)
                    tensor.release()
                self._held = []

    def _input_device(self) -> torch.device | None:
        devices = self._inputs.get(threading.get_ident())
        if not devices:
            return None
        device = devices.pop()
        if not devices:
            self._inputs.pop(threading.get_ident(), None)
        return device

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_calls": 0, "_held": [], "_inputs": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()


class _Values(Mapping[str, torch.Tensor]):
    def __init__(self, hook: OffloadHook) -> None:
        prefix = f"{hook.name}." if hook.name else ""
        self._tensors = {owner.name.removeprefix(prefix): tensor for owner, tensor in hook.weights}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name].view()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class _GiveValues:
    """A hook for ``state_dict()``: values in place of what is on the meta device."""

    def __init__(self, tensors: dict[str, OffloadedTensor]) -> None:
        self._tensors = tensors

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for attribute, tensor in self._tensors.items():
            found = state.get(prefix + attribute)
            if isinstance(found, torch.Tensor) and found.is_meta:
                state[prefix + attribute] = tensor.view()


def _refuse_values(*_: Any) -> NoReturn:
    raise ShardingError(
        "load_state_dict: weights of this model are offloaded, so nothing can be loaded into them; call "
        "remove_hook_from_submodules(model) first, or load the new checkpoint with load_checkpoint_and_dispatch"
    )


def _refuse_moves(*_: Any, **__: Any) -> NoReturn:
    raise ShardingError(
        "this model was dispatched: each module has its device, so it cannot be moved or cast as a whole; give another "
        "device_map or dtype where it is loaded, or call remove_hook_from_submodules(model) first"
    )
