"""A back-end of ``torch.compile`` that counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

COUNTED = {"enabled": True, "backend": "counting"}


class Counting:
    """A back-end that counts graphs and runs of them."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


@contextmanager
def counting_backend() -> Iterator[Counting]:
    """A context in which the back-end is known as ``counting``."""
    counting = Counting()
    torch._dynamo.register_backend(counting, name="counting")
    try:
        yield counting
    finally:
        torch._dynamo.backends.registry._BACKENDS.pop("counting", None)
        torch._dynamo.backends.registry._COMPILER_FNS.pop("counting", None)
