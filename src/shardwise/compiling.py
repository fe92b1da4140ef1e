"""`compile`: torch.compile of a model's blocks, one by one; what shardwise hooks onto them stays outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise import _torch
from shardwise.checkpointing.caches import Caches, has_cache
from shardwise.compile_check import arguments
from shardwise.messages import logger
from shardwise.sharding.blocks import find_blocks, names_of

if TYPE_CHECKING:
    from shardwise.sharding.gatherer import Gatherer

USE_CACHE = (
    "compile: %s and the other compiled blocks leave the key-value cache empty in training (each would be compiled by "
    "itself for its place in it); pass use_cache=False to the model"
)
FILLED = "compile: %s reads a filled key-value cache: such calls are not compiled"
UNCOMPILED = (
    "compile: %d of %d blocks ran uncompiled in the first training forward (%s): torch gives up on code after "
    "torch._dynamo.config.recompile_limit variants of it, or cannot compile it; TORCH_LOGS=recompiles,graph_breaks "
    "in the environment says why"
)
UNUSED = (
    "compile has no effect: the model's forward called none of its blocks (%s, ...) as modules. Call them as block(x), "
    "or compile the model yourself."
)


class OuterForward:
    """What stands in for a module's ``forward`` and calls ``inner``; compiling replaces that."""

    inner: Callable[..., Any]


class CompiledForward:
    """A compiled ``forward`` and the one that it was compiled from.

    Calls with a key-value cache run as they are: every token of generation has another one. In training an empty cache
    is left out, and the call compiled. Training and evaluation are compiled apart, so that neither uses up the number
    of variants that torch compiles of a piece of code.

    Args:
        block: whose forward it is.
        name: of the block.
        compiler: makes a compiled forward, which compiles when first called; told whether it is for training.
        is_eager: whether the next call is to be made without the compiler.
        say: warns once of what holds for a block, and likely for all.

    Attributes:
        called: whether it was called for training.
        compiled: whether its first compiled call in training ran code that torch had compiled; None before.
    """

    def __init__(
        self,
        block: nn.Module,
        name: str,
        compiler: Callable[[Callable[..., Any], bool], Callable[..., Any]],
        is_eager: Callable[[], bool],
        say: Callable[[str, str], None],
    ) -> None:
        outer = block.__dict__.get("forward")
        forward = outer.inner if isinstance(outer, OuterForward) else block.forward
        self.__wrapped__: Callable[..., Any] = forward
        self.block = block
        self.name = name
        self.called = False
        self.compiled: bool | None = None
        self._training = compiler(forward, True)
        self._evaluation = compiler(forward, False)
        self._is_eager = is_eager
        self._say = say

    def choose(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        """What to call now with these arguments. A recomputation must call the same again."""
        trains = self._trains()
        self.called = self.called or trains
        if self._is_eager() or has_cache(args, kwargs):
            return self.__wrapped__
        if not trains:
            return self._evaluation
        return self._training if self.compiled is not None else self._first_time

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward."""
        if self._trains():
            caches = Caches(self.block)
            args, kwargs = caches.dropped_from(args, kwargs)
            if caches.dropped or caches.filled:
                self._say(USE_CACHE if caches.dropped else FILLED, self.name)
        return self.choose(args, kwargs)(*args, **kwargs)

    def _trains(self) -> bool:
        return self.block.training and torch.is_grad_enabled()

    def _first_time(self, *args: Any, **kwargs: Any) -> Any:
        if self.compiled is not None:  # the recomputation of the first call
            return self._training(*args, **kwargs)
        variants = _torch.Variants(self._training)
        before, known = variants.count, variants.has(args, kwargs)
        out = self._training(*args, **kwargs)
        self.compiled = known or variants.count > before
        return out


class CompiledBlocks:
    """The blocks of a model, each compiled, until :meth:`undo`. A model without blocks is compiled as a whole.

    Blocks of one class share their compiled code: parameters are its arguments. Two engines share none. The first
    forward at stage 3 (one for training, one for evaluation) runs uncompiled, because it is watched for parameters that
    modules read which do not own them.

    Args:
        model: changed in place.
        backend, kwargs: checked by :func:`~shardwise.compile_check.check_compile`.
        gatherer: of stage 3.
        says: log what is compiled (one rank does).
    """

    def __init__(
        self, model: nn.Module, backend: str, kwargs: Mapping[str, Any], gatherer: Gatherer | None, *, says: bool
    ) -> None:
        self._undo: list[Callable[[], None]] = []
        self._backend, self._kwargs, self._says = backend, kwargs, says
        self._said: set[str] = set()
        self._own: dict[tuple[FunctionType, bool], FunctionType] = {}
        blocks = find_blocks(model) or {"": model}
        hooked = [name for name, b in blocks.items() if gatherer is not None and gatherer.hooks_inside(b)]
        # What the user has compiled already stays so.
        chosen = {n: b for n, b in blocks.items() if n not in hooked and not _torch.is_compiled(b)}
        is_eager: Callable[[], bool] = (lambda: False) if gatherer is None else gatherer.looks_for_strays_now
        self.forwards = [CompiledForward(b, n, self._compiled, is_eager, self._say) for n, b in chosen.items()]
        for forward in self.forwards:
            self._install(forward)
        if says:
            what = f"{len(chosen)} blocks: {names_of(chosen)}" if chosen and "" not in chosen else "the whole model"
            if chosen:
                logger.info("compiled when first used (%s): %s", backend, what)
                self._watch = model.register_forward_hook(lambda m, args, out: self._look())
                self._undo.append(self._watch.remove)
            if hooked:
                logger.warning(
                    "not compiled, because a module inside it reads another module's parameter: %s", ", ".join(hooked)
                )

    def undo(self) -> None:
        """Give the blocks their own forward back."""
        while self._undo:
            self._undo.pop()()

    def _compiled(self, forward: Callable[..., Any], for_training: bool) -> Callable[..., Any]:
        return torch.compile(
            self._with_own_code(forward, for_training), backend=self._backend, **arguments(self._kwargs)
        )

    def _with_own_code(self, forward: Callable[..., Any], for_training: bool) -> Callable[..., Any]:
        """The same method of a copy of its function, which torch compiles as if it were another one."""
        function = getattr(forward, "__func__", None)
        if not isinstance(forward, MethodType) or not isinstance(function, FunctionType):
            return forward
        if any(name.startswith("_torchdynamo") for name in function.__dict__):
            return forward  # the user has told the compiler what to do with it
        key = (function, for_training)
        if key not in self._own:
            code = function.__code__.replace()
            own = FunctionType(
                code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
            )
            own.__kwdefaults__, own.__qualname__ = function.__kwdefaults__, function.__qualname__
            own.__dict__.update(function.__dict__)
            self._own[key] = own
        return MethodType(self._own[key], forward.__self__)

    def _install(self, forward: CompiledForward) -> None:
        block = forward.block
        outer = block.__dict__.get("forward")
        if isinstance(outer, OuterForward):
            before = outer.inner
            outer.inner = forward
            self._undo.append(lambda: setattr(outer, "inner", before))
            return
        block.__dict__["forward"] = forward

        def put_back() -> None:
            if outer is None:
                del block.__dict__["forward"]
            else:
                block.__dict__["forward"] = outer

        self._undo.append(put_back)

    def _say(self, text: str, name: str) -> None:
        if self._says and text not in self._said:
            self._said.add(text)
            logger.warning(text, name or "the model")

    def _look(self) -> None:
        """After the first compiled forward for training: torch must have compiled all that ran."""
        if not torch.is_grad_enabled() or not any(f.block.training for f in self.forwards):
            return
        if not any(f.called for f in self.forwards):
            self._watch.remove()
            logger.warning(UNUSED, self.forwards[0].name)
            return
        known = [f for f in self.forwards if f.compiled is not None]
        if not known:
            return  # watched at stage 3, or with filled caches
        self._watch.remove()
        left = [f.name or "the model" for f in known if not f.compiled]
        if left:
            logger.warning(UNCOMPILED, len(left), len(known), ", ".join(left))
