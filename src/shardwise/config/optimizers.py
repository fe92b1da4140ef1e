"""Optimizers that torch does not have: what they take, and which of upstream's are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.config.fields import Flag, Number, Text, refuse
from shardwise.config.problems import Problems, mismatch, show

Check = Callable[[object], Any]

_ONE_BIT = (
    "is refused: it sends momenta as signs with an error feedback, which changes the loss and was made for networks "
    "far slower than today's; write {instead}, and communication_data_type bf16 for less traffic"
)
_MUP = (
    "is refused: it scales rates by the shapes that the mup package records, which a shard does not have; write "
    "{instead} with a parameter group for each width"
)

_REFUSED = {
    "OneBitAdam": _ONE_BIT.format(instead="Adam"),
    "OneBitLamb": _ONE_BIT.format(instead="Lamb"),
    "ZeroOneAdam": _ONE_BIT.format(instead="Adam"),
    "MuAdam": _MUP.format(instead="Adam with adam_w_mode false"),
    "MuAdamW": _MUP.format(instead="AdamW"),
    "MuSGD": _MUP.format(instead="SGD"),
}
REFUSED = tuple(_REFUSED)
"""Names of upstream's that are refused for good."""


def refusal(name: str) -> str | None:
    """Why an optimizer of upstream's is refused (the rest of a sentence that begins with its name), or None."""
    return {known.lower(): why for known, why in _REFUSED.items()}.get(name.lower())


class Betas:
    """Two numbers, each from 0 up to but not 1."""

    what = "a list of 2 numbers, each from 0 up to but not 1"

    def __call__(self, value: object) -> list[float]:
        """Return the numbers, or refuse the value."""
        number = Number(low=0, below=1)
        if not isinstance(value, list) or len(value) != 2:
            raise refuse(mismatch(value, self.what))
        return [number(item) for item in value]


def _only_true(why: str) -> Check:
    def check(value: object) -> bool:
        if not Flag()(value):
            raise refuse(f"false is not available: {why}")
        return True

    return check


def _never(why: str) -> Check:
    def check(value: object) -> bool:
        if Flag()(value):
            raise refuse(f"true is not available: {why}")
        return False

    return check


_SIZE = Number(low=0)
_STATES = {"fp32_optimizer_states": Flag("the state has the dtype of the weights that are stepped, either way")}

OURS: Mapping[str, Mapping[str, Check]] = {
    "Lamb": {
        "lr": _SIZE,
        "bias_correction": Flag(),
        "betas": Betas(),
        "eps": _SIZE,
        "eps_inside_sqrt": Flag(),
        "weight_decay": _SIZE,
        "max_coeff": _SIZE,
        "min_coeff": _SIZE,
        "amsgrad": _never("LAMB has no such variant; remove the key"),
    },
    "Lion": {"lr": _SIZE, "betas": Betas(), "weight_decay": _SIZE, **_STATES},
    "Muon": {
        "lr": _SIZE,
        "momentum": Number(low=0, below=1),
        "weight_decay": _SIZE,
        "muon_lr": _SIZE,
        "adam_lr": _SIZE,
        "betas": Betas(),
        "eps": _SIZE,
        "ns_method": Text({"gram": "gram", "standard": "standard"}),
        "adam_w_mode": _only_true("what is not a hidden matrix is stepped by AdamW; remove the key"),
        "per_head_muon": _never("whole matrices are orthogonalized; remove the key"),
    },
}
"""The arguments of our optimizers; a test compares them with the constructors."""

ADAM_SWITCHES: Mapping[str, Check] = {
    "torch_adam": Flag(),
    "adam_w_mode": Flag("true makes Adam decay weights as AdamW does"),
    "bias_correction": Flag(),
    **_STATES,
}
"""Arguments of upstream's Adam that torch's does not have."""

# What Adam without bias correction leaves out.
_CORRECTED_ONLY = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")

CLIPPING = "max_grad_norm"
"""In the parameters of any optimizer: the engine clips, to this norm."""

_CLIPPING_PATH = ("optimizer", "params", CLIPPING)


def extra_checks(name: str) -> dict[str, Check]:
    """Checks of arguments that upstream gives an optimizer of this name and that its constructor does not have."""
    checks: dict[str, Check] = {CLIPPING: Number(low=0, note="0 leaves it to gradient_clipping")}
    if name in ("Adam", "AdamW"):
        checks.update(ADAM_SWITCHES)
    if name == "Adagrad":
        checks.update(_STATES)
    return checks


def check_uncorrected(params: Mapping[str, object], problems: Problems) -> None:
    """Report arguments that Adam without bias correction does not take."""
    if params.get("bias_correction", True):
        return
    for key in _CORRECTED_ONLY:
        if params.get(key):
            problems.add(("optimizer", "params", key), f"{show(params[key])} needs bias_correction true; remove one")


def clipping(params: Mapping[str, object], written: object, default: float, problems: Problems) -> float:
    """The norm to which gradients are clipped: ``gradient_clipping``, or the optimizer's ``max_grad_norm``.

    Args:
        params: checked ``optimizer.params``; a ``max_grad_norm`` of 0, upstream's default, asks for nothing.
        written: ``gradient_clipping`` as it was written, None if it was not.
        default: ``gradient_clipping`` otherwise.
        problems: where to report that both are written and differ.
    """
    norm = params.get(CLIPPING)
    if not isinstance(norm, float) or norm == 0:
        return default
    if written is not None and written != norm:
        problems.add(
            _CLIPPING_PATH,
            f"{show(norm)}, but gradient_clipping is {show(written)}: gradients are clipped once; keep one of the two",
        )
    return norm
