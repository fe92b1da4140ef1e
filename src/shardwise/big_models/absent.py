"""What hangs in a module while its weight is elsewhere: it has a shape and a dtype, and refuses to be computed with.

A tensor on the meta device does not do: torch lets it into some operations, whose results are then wrong without a
word (``x.add_(meta)`` leaves ``x`` as it is, and ``linear`` of a real input and a meta weight gives a meta output).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardingError

# What may be asked of a tensor that is not there. Attributes (``shape``, ``device`` ...) may be too.
_QUESTIONS = frozenset(
    {"__get__", "__format__", "__hash__", "__len__", "__repr__", "data_ptr", "detach", "detach_", "dim", "element_size"}
    | {"empty_like", "get_device", "has_names", "is_complex", "is_conj", "is_contiguous", "is_floating_point"}
    | {"is_inference", "is_neg", "is_pinned", "is_same_size", "is_shared", "is_signed", "ndimension", "nelement"}
    | {"numel", "requires_grad_", "size", "storage_offset", "stride", "type", "untyped_storage"}
)
_SETTABLE = frozenset({"requires_grad", "grad"})


def absent(old: torch.Tensor, name: str) -> torch.Tensor:
    """A stand-in for a parameter or buffer.

    Args:
        old: what it stands for; may be on the meta device itself.
        name: from the model's root, for messages.
    """
    empty = torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device="meta")
    if not isinstance(old, nn.Parameter):
        return _named(empty.as_subclass(AbsentBuffer), name)
    return _named(empty.as_subclass(AbsentParameter).requires_grad_(old.requires_grad), name)


def _named(tensor: Any, name: str) -> torch.Tensor:
    tensor.absent_name = name
    found: torch.Tensor = tensor
    return found


def _refuse(
    func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    called = getattr(func, "__name__", str(func))
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    setting = called == "__set__" and attribute in _SETTABLE
    if called in _QUESTIONS or setting or (called == "to" and _asks_for_meta(args, kwargs or {})):
        # nn.Parameter's own, which calls the function as if there were no classes of tensors.
        ordinary: Any = nn.Parameter.__torch_function__
        result = ordinary(func, types, args, kwargs or {})
        if called in ("__get__", "detach") and isinstance(result, torch.Tensor):
            return _named(result.as_subclass(AbsentBuffer), args[0].absent_name)  # a view (``weight.T``) is absent too
        return result
    values = [*args, *(kwargs or {}).values()]
    flat = [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]
    names = [v.absent_name for v in flat if isinstance(v, AbsentParameter | AbsentBuffer)]
    called = f"setting its {attribute}" if called == "__set__" else f"{called}()"
    raise ShardingError(
        f"{', '.join(names) or 'a weight'} is offloaded and not here, but {called} needs its values. Weights come to "
        "a module as it is called. If a module uses the weights of one within it without calling that, name the class "
        "of the outer one in preload_module_classes; for the values alone, use state_dict()."
    )


def _asks_for_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(str(value) == "meta" for value in [*args[1:], *kwargs.values()] if isinstance(value, str | torch.device))


class AbsentParameter(nn.Parameter):
    """A parameter that is elsewhere."""

    absent_name: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer what needs no values; refuse the rest."""
        return _refuse(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Another stand-in."""
        return memo.setdefault(id(self), absent(self, self.absent_name))  # type: ignore[no-any-return]


class AbsentBuffer(torch.Tensor):
    """A buffer that is elsewhere."""

    absent_name: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer what needs no values; refuse the rest."""
        return _refuse(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Another stand-in."""
        return memo.setdefault(id(self), absent(self, self.absent_name))  # type: ignore[no-any-return]
