"""What a module's forward mentions, read from its byte code: enough to tell which modules to look at closer."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

SDPA = "scaled_dot_product_attention"
SOFTMAX = frozenset({"softmax", "Softmax"})
MATMUL = frozenset({"matmul", "bmm", "einsum", "baddbmm", "__matmul__", "@"})
HF_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
# Nobody's attention is farther from its forward than this many functions.
MOST_FUNCTIONS = 500


class Reader:
    """Reads forwards, each class's once."""

    def __init__(self) -> None:
        self._read: dict[type[nn.Module], frozenset[str]] = {}

    def mentioned(self, module: nn.Module) -> frozenset[str]:
        """Names that a module's forward uses, itself or in Python functions that it calls; ``@`` for the operator.

        Functions of torch are not entered. Calls through variables are not seen.
        """
        cls = type(module)
        if cls not in self._read:
            self._read[cls] = _mentioned(cls)
        return self._read[cls]

    def calls_sdpa(self, module: nn.Module) -> bool:
        """Whether it may call ``scaled_dot_product_attention``."""
        return SDPA in self.mentioned(module)

    def uses_registry(self, module: nn.Module) -> bool:
        """Whether it takes its attention from Hugging Face's registry."""
        return HF_REGISTRY in self.mentioned(module) and hasattr(module, "config")

    def takes_softmax(self, module: nn.Module) -> bool:
        """Whether it takes a softmax itself, in its code or by an ``nn.Softmax`` of its own."""
        return bool(SOFTMAX & self.mentioned(module)) or any(isinstance(m, nn.Softmax) for m in module.children())

    def looks_like_attention(self, module: nn.Module) -> bool:
        """Whether its code has what attention has: a softmax and a product of matrices."""
        return self.takes_softmax(module) and bool(MATMUL & self.mentioned(module))


def _mentioned(cls: type[nn.Module]) -> frozenset[str]:
    names: set[str] = set()
    seen: set[int] = set()
    todo: list[Any] = [cls.forward]
    while todo and len(seen) < MOST_FUNCTIONS:
        function = todo.pop()
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        if not isinstance(function, FunctionType) or id(function) in seen or _is_torch(function.__module__):
            continue
        seen.add(id(function))
        own = set(_names(function.__code__))
        names |= own
        todo.extend(_called(own, function.__globals__, cls))
    return frozenset(names)


def _is_torch(name: str | None) -> bool:
    return name is not None and (name == "torch" or name.startswith("torch."))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for instruction in dis.get_instructions(code):
        since_311 = instruction.opname == "BINARY_OP" and instruction.argrepr.startswith("@")
        if since_311 or instruction.opname.endswith("MATRIX_MULTIPLY"):
            yield "@"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _called(names: set[str], scope: dict[str, Any], cls: type) -> Iterator[Any]:
    """Functions that these names may stand for: of the class, of the module, or of a module that it imports."""
    for name in names:
        found = getattr(cls, name, None)
        if isinstance(found, FunctionType):
            yield found
        found = scope.get(name)
        if isinstance(found, FunctionType) or hasattr(found, "__wrapped__"):
            yield found
        elif isinstance(found, ModuleType) and not _is_torch(found.__name__):
            yield from (f for n in names if isinstance(f := getattr(found, n, None), FunctionType))
