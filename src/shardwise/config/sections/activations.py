"""`activation_checkpointing`, `flashattention` and `compile`: how the model's forward runs."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from shardwise.config.fields import Bool, Flag, FreeObject, Integer, Number, Section, Text, refuse
from shardwise.config.problems import mismatch
from shardwise.config.says import Says, When, enabled

_CHECKPOINTS = When("only when blocks are checkpointed", lambda c: c.activation_checkpointing.active)
_FLASH = enabled("flashattention", "enable")
_COMPILES = When("only when blocks are compiled", lambda c: c.compile.active)


class ActivationCheckpointingSection(Section):
    """`activation_checkpointing`: blocks keep their inputs only, and run again in the backward."""

    enabled: Annotated[
        bool | None,
        BeforeValidator(Flag("leave the key out: on when another key of the section asks for something")),
        Says(lambda v, c: "blocks are checkpointed" if c.activation_checkpointing.active else "off"),
    ] = None
    partition_activations: Annotated[
        Bool,
        Says(
            {
                True: "blocks are checkpointed; without a tensor-parallel axis an activation stays in one piece",
                False: "an activation stays in one piece",
            },
            _CHECKPOINTS,
        ),
    ] = False
    cpu_checkpointing: Annotated[
        Bool, Says({True: "what is kept lies in host memory", False: "what is kept stays on the device"}, _CHECKPOINTS)
    ] = False
    contiguous_memory_optimization: Annotated[
        Bool, Says("torch's allocator keeps what is saved from scattering", no_effect=True)
    ] = False
    number_checkpoints: Annotated[
        int | None,
        BeforeValidator(Integer(1, note="blocks that are checkpointed")),
        Says(
            lambda v, c: f"{v} blocks are checkpointed, evenly spread" if v else "every block is checkpointed",
            _CHECKPOINTS,
        ),
    ] = None
    synchronize_checkpoint_boundary: Annotated[
        Bool, Says("whether the device is waited for before and after each checkpointed block", _CHECKPOINTS)
    ] = False
    profile: Annotated[Bool, Says("whether the time of recomputation is measured and logged", _CHECKPOINTS)] = False

    @property
    def active(self) -> bool:
        """Whether blocks are checkpointed."""
        if self.enabled is not None:
            return self.enabled
        return bool(self.partition_activations or self.cpu_checkpointing or self.number_checkpoints)


class _Dropout:
    """`true`, `false` or a probability."""

    what = "true, false, or a probability from 0 up to but not 1"

    def __call__(self, value: object) -> bool | float:
        if isinstance(value, bool):
            return value
        try:
            return Number(low=0, below=1)(value)
        except PydanticCustomError:
            raise refuse(mismatch(value, self.what)) from None


def _says_dropout(value: Any, config: Any) -> str:
    if value is None or value is True:
        return "attention drops with each module's own probability"
    return f"attention drops with probability {value:g}" if value else "attention drops nothing"


class FlashAttentionSection(Section):
    """`flashattention`: attention by torch's scaled_dot_product_attention, the flash back-end first."""

    enable: Annotated[Bool, Says({True: "attention runs as flash attention where it can", False: "off"})] = False
    attention_dropout: Annotated[bool | float | None, BeforeValidator(_Dropout()), Says(_says_dropout, _FLASH)] = None
    cross_attention: Annotated[
        Bool, Says({True: "cross-attention is switched too", False: "cross-attention stays as it is"}, _FLASH)
    ] = False


class CompileSection(Section):
    """`compile`: torch.compile of the model's blocks, the engine's hooks outside."""

    enabled: Annotated[Bool, Says({True: "each block is compiled", False: "off"})] = False
    deepcompile: Annotated[Bool, Says({True: "each block is compiled; gathers stay outside", False: "off"})] = False
    backend: Annotated[str, BeforeValidator(Text()), Says("torch.compile's back-end", _COMPILES)] = "inductor"
    kwargs: Annotated[FreeObject, Says("further arguments of torch.compile", _COMPILES)] = Field(default_factory=dict)

    @property
    def active(self) -> bool:
        """Whether blocks are compiled."""
        return self.enabled or self.deepcompile
