"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.optim.chunks import chunks
from shardwise.optim.common import check_settings, evaluate, gradient, with_gradient


class Lion(Optimizer):
    """Steps each element by ``lr`` in the direction of ``sign(beta1 * m + (1 - beta1) * g)``.

    ``p = p * (1 - lr * weight_decay) - lr * sign(...)``, then ``m = beta2 * m + (1 - beta2) * g``. The sign of zero
    is zero, as in the paper: an element that never had a gradient stays (upstream's GPU kernel moves it by ``+lr``).
    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675.

    Args:
        params: parameters or groups of them.
        lr: the size of every step.
        betas: of the direction and of the momentum.
        weight_decay: decoupled decay.
    """

    takes_found_inf = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        check_settings(lr=lr, betas=betas, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. With the attribute ``found_inf`` of 1.0, change nothing."""
        loss = evaluate(closure)
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            params = with_gradient(group)
            for p in params:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            grads = [gradient(p) for p in params]
            momenta = [self.state[p]["exp_avg"] for p in params]
            for _, (part, part_grads, part_momenta) in chunks(params, grads, momenta):
                _step(part, part_grads, part_momenta, group, found_inf)
        return loss


def _step(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    momenta: list[torch.Tensor],
    group: dict[str, Any],
    found_inf: torch.Tensor | None,
) -> None:
    lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
    if found_inf is not None:
        # Drawn to itself the momentum stays as it is; and nothing that is not finite gets into it.
        grads = [torch.where(found_inf.squeeze().bool(), m, g) for m, g in zip(momenta, grads, strict=True)]
    directions = torch._foreach_lerp(momenta, grads, 1 - beta1)
    torch._foreach_sign_(directions)
    shrink: Any = 1 - lr * decay
    if found_inf is not None:
        kept = (1 - found_inf).to(params[0].dtype).squeeze()
        torch._foreach_mul_(directions, kept)
        shrink = 1 - kept * (lr * decay)
    if decay:
        torch._foreach_mul_(params, shrink)
    torch._foreach_add_(params, directions, alpha=-lr)
    torch._foreach_lerp_(momenta, grads, 1 - beta2)
