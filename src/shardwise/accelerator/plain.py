"""What `prepare` does to a model in a plain run, and how it is taken back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwise.accelerator.forward import LowPrecisionForward
from shardwise.accelerator.process import Processes
from shardwise.accelerator.settings import AutocastKwargs, DistributedDataParallelKwargs
from shardwise.compile_check import check_compile
from shardwise.compiling import CompiledBlocks
from shardwise.dist import Axis
from shardwise.errors import ConfigError
from shardwise.sharding.replicas import Replicas
from shardwise.sharding.turns import Turns

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class PlainModel:
    """A model whose gradients are averaged over the processes, and whose forward may run in low precision.

    The model stays the object that it was: two or four hooks are all that it gets.

    Args:
        model: the script's.
        processes: who has a copy.
        precision: "no", "bf16" or "fp16".
        handlers: the Accelerator's, by class.
        place: move the model to the device.
        axis: the processes, where nobody else talks; None: gradients are not averaged.
        first_tag: of a range of tags that is nobody else's.
        outputs_in_fp32: convert what the model returns.
        owner: the Accelerator.
        turns: those of its models.

    Attributes:
        replicas: averages the gradients; None with one process.
    """

    def __init__(
        self,
        model: nn.Module,
        processes: Processes,
        *,
        precision: str,
        handlers: Mapping[type, Any],
        place: bool,
        axis: Axis | None,
        first_tag: int,
        outputs_in_fp32: bool,
        owner: object,
        turns: Turns,
    ) -> None:
        device = processes.device
        if place and getattr(model, "hf_device_map", None) is None:
            model.to(device)
        elif axis is not None and len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            raise ConfigError(
                "prepare: this model is spread over several devices (hf_device_map), so several processes cannot train "
                "copies of it. Start the script with one process, or load the model without device_map."
            )
        self.model = model
        self.replicas: Replicas | None = None
        self._low: LowPrecisionForward | None = None
        self._compiled: CompiledBlocks | None = None
        self._says = processes.is_main_process
        if axis is not None:
            options = handlers.get(DistributedDataParallelKwargs, DistributedDataParallelKwargs())
            bytes_each = max((p.element_size() for p in model.parameters()), default=4)
            self.replicas = Replicas(
                model,
                axis,
                first_tag=first_tag,
                bucket_numel=max(1, options.bucket_cap_mb * 2**20 // bytes_each),
                wire_dtype=options.wire_dtype,
                broadcast_buffers=options.broadcast_buffers,
                owner=owner,
                turns=turns,
            )
        autocast = handlers.get(AutocastKwargs, AutocastKwargs())
        if precision in DTYPES and autocast.enabled:
            self._low = LowPrecisionForward(
                model,
                device.type,
                DTYPES[precision],
                cache=autocast.cache_enabled,
                outputs_in_fp32=outputs_in_fp32,
            )
        mark(model, True)

    def compile_blocks(self, backend: str, kwargs: Mapping[str, Any]) -> None:
        """Compile each block of the model, or the whole if it has none.

        Raises:
            ConfigError: an unknown backend or argument.
        """
        check_compile(self.model, backend, kwargs, 0)
        self._compiled = CompiledBlocks(self.model, backend, kwargs, None, says=self._says)

    @property
    def tags(self) -> int:
        """How many tags it uses."""
        return 0 if self.replicas is None else self.replicas.tags

    def without_precision(self) -> None:
        """Let the forward run in the model's own precision again."""
        if self._low is not None:
            self._low.remove()
            self._low = None

    def close(self) -> None:
        """Take everything back."""
        self.without_precision()
        if self._compiled is not None:
            self._compiled.undo()
            self._compiled = None
        if self.replicas is not None:
            self.replicas.close()
            self.replicas = None
        mark(self.model, False)


def mark(prepared: Any, value: bool) -> None:
    """Say on the object that it is prepared, as scripts look for it, or that it is not any more."""
    if value:
        prepared._is_accelerate_prepared = True
    elif "_is_accelerate_prepared" in vars(prepared):
        del prepared._is_accelerate_prepared
