"""Adam and AdamW without bias correction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.adam import adam

from shardwise.optim.common import (
    check_settings,
    evaluate,
    fits_fused_kernel,
    gradient,
    has_fused_kernel,
    step_count,
    with_gradient,
)


class UncorrectedAdam(Optimizer):
    """Adam or AdamW with ``bias_correction: false``: ``p -= lr * m / (sqrt(v) + eps)``, however early the step.

    Torch's kernels are told that infinitely many steps were taken: both corrections ``1 - beta ** step`` are then
    exactly 1. Source of Adam: Kingma and Ba, arXiv 1412.6980; of the decoupled decay: Loshchilov and Hutter,
    arXiv 1711.05101.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, or an L2 penalty.
        decoupled: which of the two.
    """

    # As torch's own fused classes say that their kernel looks at `grad_scale` and `found_inf`.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = True,
    ) -> None:
        check_settings(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(params, {**defaults, "fused": None})
        for group in self.param_groups:
            group["fused"] = all(has_fused_kernel(p) for p in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = evaluate(closure)
        for group in self.param_groups:
            params = with_gradient(group)
            if params:
                adam_step(self, params, group, corrected=False)
        return loss


def adam_step(optimizer: Optimizer, params: list[torch.Tensor], group: dict[str, Any], *, corrected: bool) -> None:
    """Step parameters by Adam as their group says, with torch's fused kernel where it takes them.

    Args:
        optimizer: holds the state: ``exp_avg``, ``exp_avg_sq`` and ``step`` of each parameter.
        params: all have gradients.
        group: ``lr``, ``betas``, ``eps``, ``weight_decay``, ``decoupled``.
        corrected: count the steps and correct the moments' bias.
    """
    states = [_moments(optimizer, p) for p in params]
    grads, exp_avgs = [gradient(p) for p in params], [s["exp_avg"] for s in states]
    fused = fits_fused_kernel(params, grads, exp_avgs)
    # The fused kernel reads the count on the device, the others on the host.
    device = params[0].device if fused else torch.device("cpu")
    if corrected:
        steps = [step_count(s, device) for s in states]
    else:
        steps = [torch.full((), math.inf, dtype=torch.float32, device=device)] * len(params)
    beta1, beta2 = group["betas"]
    found_inf: torch.Tensor | None = getattr(optimizer, "found_inf", None)
    adam(
        params,
        grads,
        exp_avgs,
        [s["exp_avg_sq"] for s in states],
        [],
        steps,
        foreach=False if fused else None,
        fused=fused,
        grad_scale=getattr(optimizer, "grad_scale", None),
        found_inf=None if found_inf is None else found_inf.squeeze(),  # a count and it must have one shape
        decoupled_weight_decay=group["decoupled"],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _moments(optimizer: Optimizer, param: torch.Tensor) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state[param]
    if "exp_avg" not in state:
        state["exp_avg"] = torch.zeros_like(param)
        state["exp_avg_sq"] = torch.zeros_like(param)
    return state
