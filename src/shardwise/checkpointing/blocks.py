"""`activation_checkpointing`: the blocks of a model run again in the backward pass, without a change to the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise import _torch
from shardwise.checkpointing.caches import Caches
from shardwise.checkpointing.process import PROCESS
from shardwise.checkpointing.recompute import Checkpointer, Times
from shardwise.compiling import CompiledForward, OuterForward
from shardwise.errors import ConfigError
from shardwise.messages import logger
from shardwise.sharding.blocks import find_blocks, names_of

if TYPE_CHECKING:
    from shardwise.config.sections import ActivationCheckpointingSection

USE_CACHE = (
    "activation checkpointing: %s and the other checkpointed blocks leave the key-value cache empty in training (they "
    "would fill it twice); pass use_cache=False to the model"
)

COMPILED = (
    "activation checkpointing: the model was compiled as a whole, and checkpointed blocks run outside of compiled "
    'code; write "compile": {"enabled": true} instead, which compiles the inside of each block'
)
OWN_CHECKPOINT = "activation checkpointing: %s lies in a checkpoint of the model's own, which is left to do its work"


def checkpoint_blocks(
    model: nn.Module, section: ActivationCheckpointingSection, *, times: Times, says: bool
) -> CheckpointedBlocks | None:
    """Checkpoint the model's blocks as the section says; None if it asks for nothing.

    With ``number_checkpoints`` n of B blocks these are the blocks number ``i * B // n`` for i from 0 to n - 1 (counted
    from 0 through all block lists in the model's order): every k-th where k divides B, the first always. n >= B: all.

    Args:
        model: changed in place, until :meth:`CheckpointedBlocks.undo`.
        section: ``activation_checkpointing``.
        times: where ``profile`` reports to.
        says: log which blocks are checkpointed (one rank does).

    Raises:
        ConfigError: the model has no list of blocks.
    """
    if not section.active:
        return None
    blocks = _blocks_of(model, section)
    checkpointer = Checkpointer(
        cpu=section.cpu_checkpointing,
        synchronize=section.synchronize_checkpoint_boundary,
        times=times if section.profile else None,
        rng=PROCESS.rng,
    )
    chosen = spread(blocks, section.number_checkpoints)
    return CheckpointedBlocks(model, chosen, checkpointer, of=len(blocks), says=says)


def check_checkpointing(model: nn.Module, section: ActivationCheckpointingSection) -> None:
    """Whether the model's blocks can be checkpointed, before anything is changed.

    Raises:
        ConfigError: they are to be, and there is no list of them.
    """
    if section.active:
        _blocks_of(model, section)


def _blocks_of(model: nn.Module, section: ActivationCheckpointingSection) -> dict[str, nn.Module]:
    blocks = find_blocks(model)
    if not blocks:
        keys = ("enabled", "number_checkpoints", "cpu_checkpointing", "partition_activations")
        asking = " and ".join(f"activation_checkpointing.{key}" for key in keys if getattr(section, key))
        raise ConfigError(
            f"{asking}: {type(model).__name__} has no list of blocks to checkpoint: an nn.ModuleList, "
            "nn.ModuleDict or nn.Sequential of at least two modules of one class. Put its repeated part into one, or "
            'write "activation_checkpointing": {"enabled": false} and call shardwise.checkpointing.checkpoint in the '
            "model's forward."
        )
    return blocks


def spread(blocks: dict[str, nn.Module], number: int | None) -> dict[str, nn.Module]:
    """``number`` of the blocks, evenly spread (see :func:`checkpoint_blocks`); None: all."""
    count = len(blocks)
    if number is None or number >= count:
        return blocks
    names = list(blocks)
    return {names[i * count // number]: blocks[names[i * count // number]] for i in range(number)}


class CheckpointedBlocks:
    """The blocks whose forward is checkpointed, until :meth:`undo`."""

    def __init__(
        self, model: nn.Module, blocks: dict[str, nn.Module], checkpointer: Checkpointer, *, of: int, says: bool
    ) -> None:
        self._says = says
        self._said: set[str] = set()
        self.forwards = [CheckpointedForward(block, name, checkpointer, self._say) for name, block in blocks.items()]
        self._watch: Any = model.register_forward_hook(lambda m, args, out: self._look()) if says else None
        if says:
            names = names_of(blocks) if len(blocks) in (1, of) else ", ".join(blocks)
            logger.info("activation checkpointing: %d of %d blocks: %s", len(blocks), of, names)
            if _torch.is_compiled(model):
                logger.warning(COMPILED)

    def undo(self) -> None:
        """Give the blocks their own forward back."""
        for forward in reversed(self.forwards):
            forward.remove()
        self._stop_watching()

    def _say(self, text: str, name: str) -> None:
        """Warn once of what holds for a block, and likely for all."""
        if self._says and text not in self._said:
            self._said.add(text)
            logger.warning(text, name)

    def _look(self) -> None:
        """After the first forward for training: it must have gone through the blocks."""
        if not torch.is_grad_enabled() or not any(f.block.training for f in self.forwards):
            return
        self._stop_watching()
        if not any(f.called for f in self.forwards):
            logger.warning(
                "activation checkpointing has no effect: the model's forward called none of its blocks (%s, ...) as "
                "modules. Call them as block(x), or call shardwise.checkpointing.checkpoint by hand.",
                self.forwards[0].name,
            )

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None


class CheckpointedForward(OuterForward):
    """Stands in for the ``forward`` of a block; hooks of the block stay outside of what is checkpointed.

    In evaluation, without gradients, and inside another checkpoint (also torch's) it is a plain call. Where the block
    checkpoints itself (Hugging Face's ``gradient_checkpointing``), this is turned off during the call.

    Attributes:
        inner: the forward that is called; replaced when the block is compiled.
        called: whether it was called for training.
    """

    def __init__(
        self, block: nn.Module, name: str, checkpointer: Checkpointer, say: Callable[[str, str], None]
    ) -> None:
        self.block = block
        self.name = name
        self.called = False
        self._checkpointer = checkpointer
        self._say = say
        self._replaced = block.__dict__.get("forward")
        self.inner: Callable[..., Any] = block.forward
        self.__wrapped__ = self.inner  # the signature is read by way of this name
        block.__dict__["forward"] = self

    def remove(self) -> None:
        """Put back what was there."""
        if self._replaced is None:
            self.block.__dict__.pop("forward", None)
        else:
            self.block.__dict__["forward"] = self._replaced

    @_torch.outside_compiled_code
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward."""
        if not self.block.training:
            return self.inner(*args, **kwargs)
        self.called = True
        if self._checkpointer.is_plain():
            if torch.is_grad_enabled():
                self._say(OWN_CHECKPOINT, self.name)
            return self.inner(*args, **kwargs)
        caches = Caches(self.block)
        args, kwargs = caches.dropped_from(args, kwargs)
        if caches.filled:
            self._say("activation checkpointing: %s reads a filled key-value cache: not checkpointed", self.name)
            return self.inner(*args, **kwargs)
        if caches.dropped:
            self._say(USE_CACHE, self.name)
        # Decided once: a recomputation must not run other code than the forward did.
        inner = self.inner.choose(args, kwargs) if isinstance(self.inner, CompiledForward) else self.inner

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._own_checkpoint_off():
                return inner(*args, **kwargs)

        return self._checkpointer(forward, args, kwargs, module=self.block)

    @contextmanager
    def _own_checkpoint_off(self) -> Iterator[None]:
        if not getattr(self.block, "gradient_checkpointing", False):
            yield
            return
        attributes = self.block.__dict__
        before = attributes.get("gradient_checkpointing")
        attributes["gradient_checkpointing"] = False
        try:
            yield
        finally:
            if before is None:
                del attributes["gradient_checkpointing"]
            else:
                attributes["gradient_checkpointing"] = before
