"""Pickling between the test process and the ranks: tensors by value, never as shared file descriptors."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from tests.ranks.errors import RemoteError


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


class _Pickler(pickle.Pickler):
    """Writes a dense tensor as its own bytes: a view does not drag its whole buffer along."""

    def reducer_override(self, obj: object) -> Any:
        if type(obj) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        assert isinstance(obj, torch.Tensor)
        if obj.layout is not torch.strided or obj.device.type == "meta":
            return NotImplemented
        plain = obj.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return _tensor, (data, plain.dtype, tuple(plain.shape))


def dumps(obj: object) -> bytes:
    """Pickle ``obj``; a tensor or a parameter in it arrives as a plain tensor on the CPU."""
    out = io.BytesIO()
    _Pickler(out, protocol=5).dump(obj)
    return out.getvalue()


def loads(data: bytes) -> Any:
    """Undo ``dumps``."""
    return pickle.loads(data)


def dump_exception(error: BaseException) -> bytes:
    """Pickle an exception, or a ``RemoteError`` with its type and text when it does not survive the trip."""
    try:
        data = dumps(error)
        loads(data)
        return data
    except Exception:  # whatever a foreign __reduce__ or __init__ raises, the text is what the test needs
        return dumps(RemoteError(f"{type(error).__name__}: {error}"))
