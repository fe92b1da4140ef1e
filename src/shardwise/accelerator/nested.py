"""Functions on nested values: tensors in lists, tuples, named tuples and mappings. Nothing here is sent anywhere."""

from __future__ import annotations

import copy
import pickle
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import update_wrapper
from typing import Any

import torch

from shardwise.dist.values import ValueKindError
from shardwise.errors import ConfigError, ShardwiseError


class ForwardNotPicklable(ShardwiseError, pickle.PicklingError):
    """A forward function that was wrapped for mixed precision, and that somebody tries to pickle with its model."""


def is_torch_tensor(tensor: Any) -> bool:
    """Whether it is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_namedtuple(data: Any) -> bool:
    """Whether it is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """The items of ``generator`` as a list, tuple or named tuple of the type of ``obj``."""
    items = list(generator)
    return type(obj)(*items) if is_namedtuple(obj) else type(obj)(items)


def rebuild_mapping(obj: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the type of ``obj`` with the same keys and other values. ``obj`` is not changed.

    What else an object holds, as the encodings of a tokenizer's output or the default of a ``defaultdict``, is kept.
    """
    if type(obj) is dict:
        return values
    if not isinstance(obj, MutableMapping):
        return type(obj)(values)  # type: ignore[call-arg]
    # Not made anew: what a class takes to be made from, besides or instead of a dict, only it knows.
    made = copy.copy(obj)
    for key, value in values.items():
        made[key] = value
    return made


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """``func(leaf, *args, **kwargs)`` in place of every leaf of ``data`` that ``test_type`` accepts.

    Args:
        func: what is called.
        data: lists, tuples, named tuples and mappings, nested; their types are kept.
        args: for ``func``.
        test_type: which leaves.
        error_on_other_type: raise for the others instead of leaving them as they are.
        kwargs: for ``func``.

    Raises:
        ValueKindError: a leaf of another type (a TypeError).
    """
    options: dict[str, Any] = {"test_type": test_type, "error_on_other_type": error_on_other_type, **kwargs}
    if isinstance(data, tuple | list):
        return honor_type(data, (recursively_apply(func, o, *args, **options) for o in data))
    if isinstance(data, Mapping):
        return rebuild_mapping(data, {k: recursively_apply(func, v, *args, **options) for k, v in data.items()})
    if test_type(data):
        return func(data, *args, **kwargs)
    if error_on_other_type:
        raise ValueKindError(
            f"`{_name(func)}` got a {type(data).__qualname__}; it takes nested lists, tuples and dicts of what "
            f"`{_name(test_type)}` accepts."
        )
    return data


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The path and value of every leaf, in the order in which :func:`recursively_apply` meets them."""
    if isinstance(data, tuple | list):
        for i, value in enumerate(data):
            yield from leaves(value, f"{path}[{i}]")
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from leaves(value, f"{path}[{key!r}]")
    else:
        yield path, data


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | list[str] | None = None
) -> Any:
    """Nested tensors, and objects that have a method ``to``, on another device. ``tensor`` is not changed.

    Args:
        tensor: nested lists, tuples and mappings; their types are kept. Other leaves stay as they are.
        device: as for ``torch.Tensor.to``.
        non_blocking: do not wait for the copies; of use for pinned memory.
        skip_keys: keys, at any depth, whose values stay where they are.
    """
    skipped = [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or ())
    if isinstance(tensor, dict | UserDict) or (isinstance(tensor, Mapping) and not hasattr(tensor, "to")):
        # Also those with a method `to` of their own: it knows no `skip_keys`, and some change the caller's object.
        moved = {
            key: value if key in skipped else send_to_device(value, device, non_blocking, skipped)
            for key, value in tensor.items()
        }
        return rebuild_mapping(tensor, moved)
    if hasattr(tensor, "to"):
        return _moved(tensor, device, non_blocking)
    if isinstance(tensor, tuple | list):
        return honor_type(tensor, (send_to_device(t, device, non_blocking, skipped) for t in tensor))
    return tensor


def _moved(value: Any, device: Any, non_blocking: bool) -> Any:
    if not non_blocking:
        return value.to(device)
    try:
        return value.to(device, non_blocking=True)
    except TypeError:  # a `to` of somebody's own, which waits
        return value.to(device)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """``t[tensor_slice]`` of every tensor. The two numbers are taken for scripts that give them, and not used."""
    del process_index, num_processes
    return recursively_apply(lambda t: t[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Join a list of values of the same structure, tensor by tensor.

    A single value, and what is no tensor in it, comes back as it is.

    Raises:
        ConfigError: an empty list.
        ValueKindError: several values with something other than tensors in them.
    """
    if not len(data):
        raise ConfigError("concatenate: there is nothing in the list.")
    first = data[0]
    if isinstance(first, tuple | list):
        return honor_type(first, (concatenate([d[i] for d in data], dim=dim) for i in range(len(first))))
    if isinstance(first, Mapping):
        return rebuild_mapping(first, {k: concatenate([d[k] for d in data], dim=dim) for k in first})
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    if len(data) == 1:
        return first
    raise ValueKindError(f"concatenate: expected tensors, but one of the values is a {type(first).__qualname__}.")


def find_batch_size(data: Any) -> int:
    """The length of the first tensor's first dimension.

    Raises:
        ConfigError: an empty list or dict, or a tensor without dimensions.
        ValueKindError: the first leaf is no tensor.
    """
    if isinstance(data, tuple | list | Mapping):
        if not len(data):
            raise ConfigError(f"find_batch_size: an empty {type(data).__qualname__} has no batch size.")
        return find_batch_size(next(iter(data.values())) if isinstance(data, Mapping) else data[0])
    if not isinstance(data, torch.Tensor):
        raise ValueKindError(f"find_batch_size: expected a tensor, not a {type(data).__qualname__}.")
    if not data.dim():
        raise ConfigError("find_batch_size: a tensor without dimensions has no batch size.")
    return data.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """:func:`find_batch_size`, or None where it raises."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def listify(data: Any) -> Any:
    """Nested tensors as numbers and lists of numbers."""
    return recursively_apply(lambda t: t.detach().cpu().tolist(), data)


def find_device(data: Any) -> torch.device | None:
    """Where the first tensor lies; None if there is no tensor."""
    return next((leaf.device for _, leaf in leaves(data) if isinstance(leaf, torch.Tensor)), None)


def convert_to_fp32(tensor: Any) -> Any:
    """Nested values with every float16 and bfloat16 tensor as float32."""

    def is_16_bit(leaf: Any) -> bool:
        return getattr(leaf, "dtype", None) in (torch.float16, torch.bfloat16)

    return recursively_apply(lambda t: t.float(), tensor, test_type=is_16_bit)


class ConvertOutputsToFp32:
    """A function whose outputs are float32 where they were float16 or bfloat16. ``__wrapped__`` is the function.

    Pickling it raises: a model whose ``forward`` it became would be read as one that has no mixed precision, or not
    at all, where this library is missing.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ForwardNotPicklable(
            "a model that was prepared for mixed precision cannot be pickled with its forward function. Save its "
            "state_dict, or take the model out first with `accelerator.unwrap_model(model, keep_fp32_wrapper=False)`."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvertOutputsToFp32:
        return type(self)(copy.deepcopy(self.model_forward, memo))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> ConvertOutputsToFp32:
    """Decorate a function so that float16 and bfloat16 tensors in its outputs become float32."""
    return ConvertOutputsToFp32(model_forward)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
