"""Values as text and tensors, so that they can travel between ranks or lie in a file without pickle.

:func:`pack` takes a nested value apart: its structure and small values become JSON text, its tensors stay tensors.
:func:`unpack` puts it together again. Nothing that is unpacked can run code.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from shardwise.errors import ShardwiseError

KINDS = (
    "None, bool, int, float, complex, str, bytes, list, tuple, named tuple, set, dict and other mappings, torch.Tensor, "
    "torch.Size, torch.dtype, numpy arrays and numbers"
)


class ValueKindError(ShardwiseError, TypeError):
    """A value that cannot travel, or a text that is not a packed value."""


def pack(value: Any) -> tuple[str, list[torch.Tensor]]:
    """Take a nested value apart.

    Args:
        value: made of the kinds of :data:`KINDS`.

    Returns:
        JSON text, and the tensors that it refers to by their number (as they are: not copied, not moved).

    Raises:
        ValueKindError: something of another kind; the message gives its place.
    """
    tensors: list[torch.Tensor] = []
    try:
        return json.dumps(_pack(value, tensors, "value"), separators=(",", ":")), tensors
    except RecursionError as error:
        raise ValueKindError("the value contains itself, or is nested too deeply to be sent.") from error


def unpack(text: str, tensors: list[torch.Tensor], *, classes: bool = True) -> Any:
    """Put together what :func:`pack` took apart.

    Args:
        text: from :func:`pack`.
        tensors: likewise.
        classes: make mappings and named tuples of classes that are imported here. Not for text that a stranger may have
            written: a constructor may do anything. They then become dicts and tuples.

    Raises:
        ValueKindError: the text is not a packed value, or names a class that this process has not imported.
    """
    try:
        return _unpack(json.loads(text) if classes else _without_classes(json.loads(text)), tensors)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ValueKindError):
            raise
        raise ValueKindError(f"not a packed value: {error}") from error


def _pack(value: Any, tensors: list[torch.Tensor], path: str) -> Any:
    plain = type(value)
    if value is None or plain in (bool, int, float, str):
        return value
    if plain is list:
        return [_pack(v, tensors, f"{path}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        pairs = [[_pack(k, tensors, f"{path} key"), _pack(v, tensors, f"{path}[{k!r}]")] for k, v in value.items()]
        return {"dict": pairs, "class": _name_of(plain, path)} if _made_from_a_dict(plain) else {"dict": pairs}
    for kind, (known, take, _) in _OTHERS.items():
        if isinstance(value, known):
            return {kind: take(value, lambda v: _pack(v, tensors, path))}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = [_pack(v, tensors, f"{path}.{name}") for name, v in zip(value._fields, value, strict=True)]
        return {"named": parts, "class": _name_of(plain, path)}
    if plain in (tuple, set):
        return {plain.__name__: [_pack(v, tensors, f"{path}[{i}]") for i, v in enumerate(value)]}
    raise ValueKindError(
        f"{path} is a {plain.__module__}.{plain.__qualname__}, which is not sent between ranks: only {KINDS} are, "
        "because anything else would need pickle. Send what it consists of."
    )


def _unpack(node: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_unpack(v, tensors) for v in node]
    if not isinstance(node, dict):
        return node
    empty: tuple[str, Any] = ("", None)
    kind, inner = next(iter(node.items()), empty)
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        made = {_hashable(_unpack(k, tensors)): _unpack(v, tensors) for k, v in inner}
        return made if "class" not in node else _class_of(node["class"], Mapping)(made)
    if kind == "named":
        return _class_of(node["class"], tuple)(*(_unpack(v, tensors) for v in inner))
    if kind in ("tuple", "set"):
        return (tuple if kind == "tuple" else set)(_unpack(v, tensors) for v in inner)
    return _OTHERS[kind][2](inner, lambda v: _unpack(v, tensors))


def _without_classes(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_classes(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    kept = {("tuple" if key == "named" else key): _without_classes(v) for key, v in node.items() if key != "class"}
    return kept


def _hashable(key: Any) -> Any:
    hash(key)
    return key


# name -> (types, value and pack -> JSON, JSON and unpack -> value)
_OTHERS: dict[str, tuple[Any, Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "complex": (complex, lambda v, _: [v.real, v.imag], lambda v, _: complex(*v)),
    "bytes": ((bytes, bytearray), lambda v, _: base64.b64encode(v).decode(), lambda v, _: base64.b64decode(v)),
    "size": (torch.Size, lambda v, _: list(v), lambda v, _: torch.Size(v)),
    "dtype": (torch.dtype, lambda v, _: str(v).removeprefix("torch."), lambda v, _: _dtype(v)),
    "number": (np.generic, lambda v, pack: [v.dtype.str, pack(v.tolist())], lambda v, un: np.dtype(v[0]).type(un(v[1]))),
    "array": (np.ndarray, lambda v, pack: _from_array(v, pack), lambda v, unpack: _to_array(v, unpack)),
}


def _from_array(array: np.ndarray[Any, Any], pack: Any) -> Any:
    if array.dtype.kind in "biufc":
        raw = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy())
        return [array.dtype.str, list(array.shape), pack(raw)]
    return [array.dtype.str if array.dtype.kind in "US" else "O", list(array.shape), pack(array.reshape(-1).tolist())]


def _to_array(node: Any, unpack: Any) -> np.ndarray[Any, Any]:
    kind, shape, inner = node[0], tuple(node[1]), unpack(node[2])
    if isinstance(inner, torch.Tensor):
        raw: np.ndarray[Any, Any] = inner.cpu().numpy().view(np.dtype(kind))
        return raw.reshape(shape).copy()
    array: np.ndarray[Any, Any] = np.empty(len(inner), dtype=np.dtype(kind))
    array[:] = inner
    return array.reshape(shape)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueKindError(f"`{name}` is not a dtype of torch.")
    return found


def _made_from_a_dict(cls: type) -> bool:
    """Whether a mapping keeps its class. One like ``defaultdict``, whose arguments are others, becomes a dict."""
    if cls is dict:
        return False
    try:
        return isinstance(cls({}), cls)
    except TypeError:
        return False


def _name_of(cls: type, path: str) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _find(name) is not cls:
        raise ValueKindError(
            f"{path} is a {cls.__qualname__} that is not found by its name in {cls.__module__}, so another rank cannot "
            "make one. Define the class at the top of a module, or send a dict or tuple."
        )
    return name


def _find(name: str) -> Any:
    """A class by its name, in a module that is imported already: nothing is imported for it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _class_of(name: str, kind: type) -> Any:
    found = _find(name)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ValueKindError(f"a value of the class {name} arrived, which this rank has not imported.")
    return found
