"""`optimizer` and `scheduler`: a class by name, and its arguments."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from shardwise.config.fields import FreeObject, Section, Text
from shardwise.config.says import Says

TypeName = Annotated[str, BeforeValidator(Text(note="the name of a class"))]

# Names that `optimizer.params` commonly holds, to say where a misplaced one belongs.
COMMON_OPTIMIZER_PARAMS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "momentum",
    "amsgrad",
    "torch_adam",
    "adam_w_mode",
)


class OptimizerSection(Section):
    """`optimizer`: the class by name and its arguments."""

    type: Annotated[TypeName, Says("the optimizer, stepping shards")]
    params: FreeObject = Field(default_factory=dict)


class SchedulerSection(Section):
    """`scheduler`: the class by name and its arguments."""

    type: Annotated[TypeName, Says("the learning rate's schedule, one step an optimizer step")]
    params: FreeObject = Field(default_factory=dict)
