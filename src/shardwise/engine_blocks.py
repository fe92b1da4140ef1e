"""What an engine does to the blocks of its model: checkpoints and compiles them, until it is destroyed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.checkpointing.blocks import check_checkpointing, checkpoint_blocks
from shardwise.compile_check import check_compile
from shardwise.compiling import CompiledBlocks
from shardwise.errors import ConfigError
from shardwise.messages import logger

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.journal import Journal
    from shardwise.sharding import ShardedModel


def check_blocks(model: nn.Module, config: Config) -> None:
    """Whether the model's blocks can be treated as the configuration says, before anything is changed.

    Raises:
        ConfigError: they cannot.
    """
    check_checkpointing(model, config.activation_checkpointing)
    if config.compile.active:
        check_compile(model, config.compile.backend, config.compile.kwargs, config.zero_optimization.stage)


class BlockMethods:
    """The part of the engine that is about blocks."""

    module: nn.Module
    config: Config
    _sharded: ShardedModel
    _journal: Journal
    _undo: contextlib.ExitStack
    _compiled: CompiledBlocks | None = None

    def _prepare_blocks(self) -> None:
        section = self.config.activation_checkpointing
        says = self._sharded.mesh.world.position == 0
        checkpointed = checkpoint_blocks(self.module, section, times=self._journal.meter, says=says)
        if checkpointed is not None:
            self._undo.callback(checkpointed.undo)
        if self.config.compile.active:
            self.compile()

    def compile(
        self,
        backend: str | None = None,
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile each block of the model by ``torch.compile``, from its next call on; ``compile`` in the configuration
        does so from the start. A model without blocks is compiled as a whole, below stage 3.

        Args:
            backend: of ``torch.compile``; default: that of the configuration.
            compile_kwargs: ``mode``, ``fullgraph``, ``dynamic``, ``options``; default: those of the configuration.
            schedule: refused: it is a list of upstream's compiler passes.
            compiled_autograd_enabled: refused.

        Raises:
            ConfigError: an unknown back-end, argument or value, or a model that cannot be compiled at this stage.
        """
        if schedule is not None:
            raise ConfigError(
                "engine.compile: schedule is a list of upstream's compiler passes, which move parameters and gradients "
                "inside of compiled code; here hooks outside of it do so. Leave it out."
            )
        if compiled_autograd_enabled:
            raise ConfigError(
                "engine.compile: compiled_autograd_enabled would take the backward away from the hooks that gather "
                "parameters and reduce gradients in it. Leave it out."
            )
        if self._compiled is not None:
            logger.info("engine.compile: the model is compiled already; nothing is changed")
            return
        backend = backend or self.config.compile.backend
        kwargs = self.config.compile.kwargs if compile_kwargs is None else compile_kwargs
        check_compile(self.module, backend, kwargs, self._sharded.policy.stage)
        says = self._sharded.mesh.world.position == 0
        self._compiled = CompiledBlocks(self.module, backend, kwargs, self._sharded.gatherer, says=says)
        self._undo.callback(self._compiled.undo)

    @property
    def is_compiled(self) -> bool:
        """Whether the model's blocks are compiled."""
        return self._compiled is not None
