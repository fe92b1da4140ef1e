"""`compile`: torch.compile of a model's blocks, one by one; what shardwise hooks onto them stays outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise import _torch
from shardwise.errors import ConfigError
from shardwise.messages import logger
from shardwise.sharding.blocks import find_blocks, names_of

if TYPE_CHECKING:
    from shardwise.sharding.gatherer import Gatherer

KWARGS = ("mode", "fullgraph", "dynamic", "options")
# With CUDA graphs, which remember the addresses of parameters.
GRAPH_MODES = ("reduce-overhead", "max-autotune")


def check_compile(model: nn.Module, backend: str, kwargs: Mapping[str, Any], stage: int) -> None:
    """Whether the model can be compiled so at this ZeRO stage.

    Raises:
        ConfigError: an unknown back-end or argument; a model without blocks, or CUDA graphs, at stage 3.
    """
    unknown = [name for name in kwargs if name not in KWARGS]
    if unknown:
        raise ConfigError(f"compile.kwargs.{unknown[0]}: unknown; torch.compile takes {', '.join(KWARGS)} here.")
    if kwargs.get("mode") and kwargs.get("options"):
        raise ConfigError("compile.kwargs: mode and options are both given; torch.compile takes one of the two.")
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(f"compile.backend: {backend!r} is unknown; torch knows {', '.join(sorted(known))}.")
    if stage < 3:
        return
    options = kwargs.get("options") or {}
    if kwargs.get("mode") in GRAPH_MODES or options.get("triton.cudagraphs"):
        raise ConfigError(
            "compile.kwargs: CUDA graphs (mode reduce-overhead or max-autotune, option triton.cudagraphs) remember "
            "where parameters lie, which changes with every gather of zero_optimization.stage 3. Write "
            '"mode": "max-autotune-no-cudagraphs" or leave it out, or use stage 2.'
        )
    if not find_blocks(model):
        raise ConfigError(
            f"compile: {type(model).__name__} has no list of blocks (an nn.ModuleList, nn.ModuleDict or nn.Sequential "
            "of at least two modules of one class), and at zero_optimization.stage 3 the model as a whole cannot be "
            "compiled: its parameters are gathered between its modules. Put its repeated part into a list, or use "
            "stage 2, or turn compile off."
        )


class OuterForward:
    """What stands in for a module's ``forward`` and calls ``inner``; compiling replaces that."""

    inner: Callable[..., Any]


class CompiledForward:
    """A compiled ``forward`` and the one that it was compiled from.

    Args:
        forward: a bound method.
        compiler: makes the compiled one, which compiles when first called.
        is_eager: whether the next call is to be made without the compiler.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        compiler: Callable[[Callable[..., Any]], Callable[..., Any]],
        is_eager: Callable[[], bool],
    ) -> None:
        self.__wrapped__ = forward
        self._compiled = compiler(forward)
        self._is_eager = is_eager

    def choose(self) -> Callable[..., Any]:
        """What to call now. A recomputation must call the same again."""
        return self.__wrapped__ if self._is_eager() else self._compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward."""
        return self.choose()(*args, **kwargs)


class CompiledBlocks:
    """The blocks of a model, each compiled, until :meth:`undo`. A model without blocks is compiled as a whole.

    Blocks of one class share their compiled code: parameters are its arguments. The first forward at stage 3 (one for
    training, one for evaluation) runs uncompiled, because it is watched for parameters that modules read which do not
    own them.

    Args:
        model: changed in place.
        backend, kwargs: checked by :func:`check_compile`.
        gatherer: of stage 3.
        says: log what is compiled (one rank does).
    """

    def __init__(
        self, model: nn.Module, backend: str, kwargs: Mapping[str, Any], gatherer: Gatherer | None, *, says: bool
    ) -> None:
        self._undo: list[Callable[[], None]] = []
        blocks = find_blocks(model) or {"": model}
        hooked = [name for name, b in blocks.items() if gatherer is not None and gatherer.hooks_inside(b)]
        # What the user has compiled already stays so.
        chosen = {n: b for n, b in blocks.items() if n not in hooked and not _torch.is_compiled(b)}
        self._compiler: Callable[..., Any] = lambda forward: torch.compile(forward, backend=backend, **kwargs)
        self._is_eager: Callable[[], bool] = (lambda: False) if gatherer is None else gatherer.looks_for_strays_now
        for block in chosen.values():
            self._compile(block)
        if says:
            what = f"{len(chosen)} blocks: {names_of(chosen)}" if chosen and "" not in chosen else "the whole model"
            if chosen:
                logger.info("compiled when first used (%s): %s", backend, what)
            if hooked:
                logger.warning(
                    "not compiled, because a module inside it reads another module's parameter: %s", ", ".join(hooked)
                )

    def undo(self) -> None:
        """Give the blocks their own forward back."""
        while self._undo:
            self._undo.pop()()

    def _compile(self, block: nn.Module) -> None:
        outer = block.__dict__.get("forward")
        if isinstance(outer, OuterForward):
            before = outer.inner
            outer.inner = CompiledForward(before, self._compiler, self._is_eager)
            self._undo.append(lambda: setattr(outer, "inner", before))
            return
        block.__dict__["forward"] = CompiledForward(block.forward, self._compiler, self._is_eager)

        def put_back() -> None:
            if outer is None:
                del block.__dict__["forward"]
            else:
                block.__dict__["forward"] = outer

        self._undo.append(put_back)
