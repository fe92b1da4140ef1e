"""`fp16`, `bf16`, `torch_autocast` and `data_types`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from shardwise.config.fields import Bool, Integer, Number, Section, Text, TextList
from shardwise.config.says import BF16, DYNAMIC_SCALE, FP16, LOW_PRECISION, Says, When, enabled
from shardwise.config.sections.top import DTYPES

AUTOCAST_DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "bf16": "bfloat16",
    "fp16": "float16",
}

_AUTOCAST = enabled("torch_autocast")
_LOW_WINDOWS = When(
    "only with fp16 or bf16 and several micro-steps a window",
    lambda c: LOW_PRECISION.holds(c) and (c.gradient_accumulation_steps > 1 or not c.managed_gradient_accumulation),
)


def _adds_up_in(config: Any) -> str:
    own = "bf16" if config.bf16.bf16_master_weights_and_grads else "fp32"
    return f"the gradients of a window add up in {config.data_types.grad_accum_dtype or own}"


def _bf16(enabled: bool, config: Any) -> str:
    if not enabled:
        return "off"
    return "bf16 parameters, " + ("no masters" if config.bf16.bf16_master_weights_and_grads else "fp32 masters")


class FP16Section(Section):
    """`fp16`: half precision with a loss scale."""

    enabled: Annotated[Bool, Says({True: "fp16 parameters, fp32 masters, a loss scale", False: "off"})] = False
    auto_cast: Annotated[Bool, Says("whether floating-point inputs are cast to fp16", FP16)] = False
    loss_scale: Annotated[
        float,
        BeforeValidator(Number(low=0, note="0 means dynamic")),
        Says(lambda v, c: f"losses are multiplied by {v:g}" if v else "the scale follows overflows", FP16),
    ] = 0.0
    initial_scale_power: Annotated[
        int,
        BeforeValidator(Integer(0, 127, note="the scale starts at 2 to this power")),
        Says("the scale starts at 2^{}", DYNAMIC_SCALE),
    ] = 16
    loss_scale_window: Annotated[
        int,
        BeforeValidator(Integer(1, note="clean steps before the scale doubles")),
        Says("the scale doubles after {} clean steps", DYNAMIC_SCALE),
    ] = 1000
    hysteresis: Annotated[
        int,
        BeforeValidator(Integer(1, note="overflows before the scale halves")),
        Says("the scale halves from the {}. overflow on", DYNAMIC_SCALE),
    ] = 2
    consecutive_hysteresis: Annotated[
        Bool, Says("whether each clean step forgives earlier overflows", DYNAMIC_SCALE)
    ] = False
    min_loss_scale: Annotated[
        float,
        BeforeValidator(Number(above=0, note="a scale of 0 would erase the gradients")),
        Says("an overflow at a scale of {} is an error", DYNAMIC_SCALE),
    ] = 1.0


class BF16Section(Section):
    """`bf16`: bfloat16 with fp32 master weights."""

    enabled: Annotated[Bool, Says(_bf16)] = False
    check_grad_overflow: Annotated[Bool, Says("whether a step with a gradient that is not finite is skipped", BF16)] = (
        True
    )
    immediate_grad_update: Annotated[
        Bool, Says("data_types.grad_accum_dtype says what the gradients of a window add up in", no_effect=True)
    ] = False
    bf16_master_weights_and_grads: Annotated[
        Bool, Says({True: "no fp32 masters: the optimizer steps bf16 weights", False: "fp32 masters"}, BF16)
    ] = False
    bf16_optimizer_states: Annotated[
        Bool, Says({True: "the optimizer's state is bf16", False: "the optimizer's state is fp32"}, BF16)
    ] = False


class TorchAutocastSection(Section):
    """`torch_autocast`: PyTorch's own mixed precision."""

    enabled: Annotated[Bool, Says({True: "the forward runs under torch.autocast", False: "off"})] = False
    dtype: Annotated[
        str | None,
        BeforeValidator(Text(AUTOCAST_DTYPES)),
        Says(lambda v, c: f"matrix products in {v or ('float16' if c.fp16.enabled else 'bfloat16')}", _AUTOCAST),
    ] = None
    lower_precision_safe_modules: Annotated[
        list[str] | None,
        BeforeValidator(TextList()),
        Says("gradients of all modules travel in communication_data_type", no_effect=True),
    ] = None


class DataTypesSection(Section):
    """`data_types`: dtypes beside those of fp16 and bf16."""

    grad_accum_dtype: Annotated[
        str | None,
        BeforeValidator(Text(DTYPES)),
        Says(lambda v, c: _adds_up_in(c), _LOW_WINDOWS),
    ] = None
    param_dtype: Annotated[
        str | None,
        BeforeValidator(Text(DTYPES)),
        Says("only compared: fp16.enabled, bf16.enabled and the model decide"),
    ] = None
    buffer_dtype: Annotated[
        str | None,
        BeforeValidator(Text(DTYPES)),
        Says(lambda v, c: f"floating-point buffers are cast to {v}" if v else "buffers keep their dtype"),
    ] = None
