"""The keys that stand outside of any section."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator

from shardwise.config.fields import Bool, Integer, Number, Section, Text
from shardwise.config.says import SEVERAL_RANKS, Says, When

DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}
LEVELS = {name: name for name in ("debug", "info", "warning", "error", "critical")}

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

BATCH_SAYS = {
    "train_batch_size": Says("samples of one optimizer step over all ranks"),
    "train_micro_batch_size_per_gpu": Says("samples of one forward on one rank"),
    "gradient_accumulation_steps": Says("micro-steps whose gradients make one optimizer step"),
}

_FP16_WIRE = When(
    "gradients are divided while they are copied; only fp16 on the wire could tell",
    lambda c: (c.communication_data_type or ("fp16" if c.fp16.enabled else None)) == "fp16",
)


_PREDIVIDES = When(
    "only for fp16 gradients that are not divided by all ranks at once (prescale_gradients)",
    lambda c: _FP16_WIRE.holds(c) and not (c.prescale_gradients and c.gradient_allreduce_op == "mean"),
)
_BY_ROWS = When(
    "only with several ranks, for embeddings that rest whole (below stage 3)",
    lambda c: SEVERAL_RANKS.holds(c) and c.zero_optimization.stage < 3,
)


def _steps_per_print(value: object) -> int | None:
    if isinstance(value, float) and math.isinf(value):
        return None
    return Integer(1, note="null or infinity: never print")(value)


def _log_lines(every: int | None, config: Any) -> str:
    if config.log_level in ("warning", "error", "critical"):
        return f"log lines are hidden by log_level {config.log_level}"
    if every is None:
        return "a log line every 10 steps (wall_clock_breakdown)" if config.wall_clock_breakdown else "no log lines"
    return f"a log line every {every} steps"


class TopLevel(Section):
    """The keys that stand outside of any section, without the batch keys."""

    managed_gradient_accumulation: Annotated[
        Bool,
        Says({True: "the engine counts micro-steps", False: "every engine.step() is an optimizer step"}),
    ] = True
    dataloader_drop_last: Annotated[
        Bool, Says("whether the loader made from training_data leaves out a last short batch")
    ] = False
    gradient_clipping: Annotated[
        float,
        BeforeValidator(Number(low=0, note="the largest gradient norm; 0 turns clipping off")),
        Says(lambda v, c: f"gradients are scaled down to a norm of {v:g}" if v else "gradients are not clipped"),
    ] = 1.0
    communication_data_type: Annotated[
        str | None,
        BeforeValidator(Text(DTYPES)),
        Says(lambda v, c: f"gradients travel as {v}" if v else "gradients travel in their own dtype", SEVERAL_RANKS),
    ] = None
    prescale_gradients: Annotated[
        Bool,
        Says(
            {True: "fp16 gradients are divided by the ranks before they are summed", False: "summed, then divided"},
            _FP16_WIRE,
        ),
    ] = False
    gradient_predivide_factor: Annotated[
        float,
        BeforeValidator(Number(above=0, note="gradients are divided by it before the sum, the rest after")),
        Says("fp16 gradients are divided by {} before the sum, by the rest of the ranks after it", _PREDIVIDES),
    ] = 1.0
    gradient_allreduce_op: Annotated[
        str,
        BeforeValidator(Text({"mean": "mean", "sum": "sum"})),
        Says({"mean": "the gradient is the mean over the ranks", "sum": "the gradient is the sum over the ranks"}),
    ] = "mean"
    sparse_gradients: Annotated[
        Bool,
        Says(
            {
                True: "of embeddings only the rows with a gradient travel (each step waits once for the device)",
                False: "the gradients of embeddings travel whole",
            },
            _BY_ROWS,
        ),
    ] = False
    steps_per_print: Annotated[
        int | None,
        BeforeValidator(_steps_per_print),
        Says(_log_lines),
    ] = None
    wall_clock_breakdown: Annotated[
        Bool, Says("whether log lines, one every 10 steps by default, give the time of forward, backward and step")
    ] = False
    memory_breakdown: Annotated[
        Bool, Says("whether memory is said after initialize and the first forward, backward, step")
    ] = False
    dump_state: Annotated[
        Bool, Says("whether sizes, units, groups and the whole configuration are printed at the start")
    ] = False
    log_level: Annotated[
        str | None,
        BeforeValidator(Text(LEVELS)),
        Says(lambda v, c: f"shardwise says what is {v} or worse" if v else "shardwise says what is info or worse"),
    ] = None
    vocabulary_size: Annotated[
        int | None, BeforeValidator(Integer(1)), Says("only checked: a multiple of 8 is faster on GPUs")
    ] = None
    zero_allow_untested_optimizer: Annotated[
        Bool, Says("whether an optimizer class that nobody has tested here is taken; it gets whole parameters")
    ] = False
    zero_force_ds_cpu_optimizer: Annotated[
        Bool, Says("there is one implementation of each optimizer, torch's where it has one", no_effect=True)
    ] = True
    disable_allgather: Annotated[
        Bool, Says("updated parameters are gathered in place; a broadcast would give the same values", no_effect=True)
    ] = False
    seed: Annotated[
        int | None,
        BeforeValidator(Integer(0)),
        Says(
            lambda v, c: f"rank r seeds its generators with {v} + r" if v is not None else "generators stay as they are"
        ),
    ] = None
    gradient_normalization: Annotated[
        str,
        BeforeValidator(Text({"micro_steps": "micro_steps", "tokens": "tokens"})),
        Says({"micro_steps": "each micro-batch counts alike", "tokens": "each token of the global batch counts alike"}),
    ] = "micro_steps"
    communication_timeout: Annotated[
        float, BeforeValidator(Number(above=0, high=1e9, note="seconds")), Says("a rank is waited for {} s")
    ] = 600.0
