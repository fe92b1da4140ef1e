"""`is_..._available`: whether a package or a device is there."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable

import torch

# Packages whose import name is not the word in the function's.
PACKAGES = {
    "bnb": "bitsandbytes",
    "comet_ml": "comet_ml",
    "tensorboard": "torch.utils.tensorboard",
    "torchao": "torchao",
    "transformer_engine": "transformer_engine",
}


def _cuda(*_: object, **__: object) -> bool:
    return torch.cuda.is_available()


def _device(name: str) -> Callable[..., bool]:
    def here(*_: object, **__: object) -> bool:
        backend = getattr(torch, name, None) or getattr(torch.backends, name, None)
        return bool(backend is not None and hasattr(backend, "is_available") and backend.is_available())

    return here


def _bf16(*_: object, **__: object) -> bool:
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()


# What is no package. bf16 and fp16 run under autocast on a CPU too; the engine is what upstream needs deepspeed for.
OWN: dict[str, Callable[..., bool]] = {
    "cuda": _cuda,
    "bf16": _bf16,
    "fp16": lambda *_, **__: True,
    "fp8": lambda *_, **__: False,
    "deepspeed": lambda *_, **__: True,
    "ipex": lambda *_, **__: False,
    "torch_xla": lambda *_, **__: False,
    "tpu": lambda *_, **__: False,
    "megatron_lm": lambda *_, **__: False,
    **{name: _device(name) for name in ("mps", "xpu", "npu", "hpu", "mlu", "musa", "sdaa", "neuron")},
}


def available(name: str) -> Callable[..., bool] | None:
    """The function called ``is_<something>_available``, or None if the name is another."""
    match = re.fullmatch(r"is_(\w+)_available", name)
    if match is None:
        return None
    what = match[1]
    if what in OWN:
        return OWN[what]
    package = PACKAGES.get(what, what)

    def here(*_: object, **__: object) -> bool:
        return importlib.util.find_spec(package.partition(".")[0]) is not None

    here.__name__ = name
    return here
