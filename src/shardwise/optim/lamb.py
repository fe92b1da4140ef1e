"""LAMB: Adam's direction, with a rate for each parameter by the norms of its weights and of the direction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise import _torch
from shardwise.optim.chunks import chunks
from shardwise.optim.common import check_settings, evaluate, fits_fused_kernel, gradient, step_count, with_gradient

# Elements that stay in the cache between the kernel and the norms; with 256 K calls cost 5 % more, with 1 M no less.
CPU_NUMEL = 512 * 1024


class Lamb(Optimizer):
    """``p -= lr * c * ratio * u`` with the direction ``u = m / (sqrt(v) + eps) + weight_decay * p``.

    ``ratio = |p| / |u|``, between ``min_coeff`` and ``max_coeff``, and 1 where one of the norms is 0. With bias
    correction ``c = sqrt(1 - beta2 ** t) / (1 - beta1 ** t)``, else 1: as upstream's FusedLamb the correction scales
    the rate and not the moments, so that ``weight_decay`` is scaled by it too. Source: You et al., "Large Batch
    Optimization for Deep Learning", arXiv 1904.00962.

    The norms are those of whole parameters. A step therefore has two passes: :meth:`advance` moves the moments and
    gives the squares of both norms of each tensor, :meth:`apply` takes the squares of each whole parameter. Where a
    tensor is a slice, its owner adds up the squares in between; :meth:`step` does both for whole parameters.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        bias_correction: see above.
        betas: decay of the two moments.
        eps: keeps the division finite.
        eps_inside_sqrt: divide by ``sqrt(v + eps)`` instead of ``sqrt(v) + eps``.
        weight_decay: decay, inside the direction.
        max_coeff: the largest ratio.
        min_coeff: the smallest ratio.
    """

    takes_found_inf = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        check_settings(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, min_coeff=min_coeff)
        if max_coeff < min_coeff:
            raise ValueError(f"max_coeff {max_coeff} is below min_coeff {min_coeff}")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient, in place of which its direction stands afterwards."""
        loss = evaluate(closure)
        self.apply(self.advance())
        return loss

    @torch.no_grad()
    def advance(self) -> dict[torch.Tensor, torch.Tensor]:
        """Move the moments, and put the negative direction in the place of each gradient.

        Returns:
            For each tensor that has a gradient the squares of the norms of its weights and of its direction (two
            float64 numbers on its device).
        """
        squares: dict[torch.Tensor, torch.Tensor] = {}
        for group in self.param_groups:
            params = with_gradient(group)
            if not params:
                continue
            states = [self._state(p) for p in params]
            moments = ([s[key] for s in states] for key in ("exp_avg", "exp_avg_sq"))
            lists = (params, [gradient(p) for p in params], *moments)
            fused = not group["eps_inside_sqrt"] and fits_fused_kernel(*lists)
            sums: list[list[torch.Tensor]] = [[] for _ in params]
            for places, part in chunks(*lists, cpu_numel=CPU_NUMEL):
                (_torch_fused if fused else _foreach)(group, self._found_inf, *part)
                for place, *both in zip(places, _squares(part[0]), _squares(part[1]), strict=True):
                    sums[place] += both
            for param, each in zip(params, sums, strict=True):
                squares[param] = torch.stack(each).view(-1, 2).sum(dim=0, dtype=torch.float64)
        return squares

    @torch.no_grad()
    def apply(self, squares: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Take the step along the directions that :meth:`advance` left.

        Args:
            squares: as :meth:`advance` gives them, summed over the slices of each parameter.
        """
        for group in self.param_groups:
            params = [p for p in group["params"] if p in squares]
            if not params:
                continue
            counts = self._count(params)
            rates = _rates(torch.stack([squares[p] for p in params]), counts, group)
            if self._found_inf is not None:
                rates = rates * (1 - self._found_inf)
            if params[0].device.type == "cpu" and not _torch.is_fake(rates):
                # Backwards: what the first pass read last may still be in the cache.
                for p, rate in reversed(list(zip(params, rates.tolist(), strict=True))):
                    p.add_(gradient(p), alpha=rate)
            else:  # the rate stays on the device
                for p, each in zip(params, rates.unbind(), strict=True):
                    p.addcmul_(gradient(p), each.to(p.dtype))

    @property
    def _found_inf(self) -> torch.Tensor | None:
        return getattr(self, "found_inf", None)

    def _state(self, param: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        step_count(state, param.device)
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state

    def _count(self, params: list[torch.Tensor]) -> torch.Tensor:
        """Count the step, where it is one; the counts so far, on the device."""
        steps = [self.state[p]["step"] for p in params]
        if self._found_inf is None:
            torch._foreach_add_(steps, 1)
        else:
            for step in steps:
                step.add_(1 - self._found_inf.squeeze())
        return torch.stack(steps).to(params[0].device, torch.float64)


def _squares(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The sum of squares of each tensor, in fp32 or better."""
    if tensors[0].device.type == "cpu" and tensors[0].dtype in (torch.float32, torch.float64):
        # On a CPU, faster than a norm by a half.
        return [torch.dot(t, t) for t in (t.reshape(-1) for t in tensors)]
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return [norm.square() for norm in torch._foreach_norm(tensors, 2, dtype=wide)]


def _torch_fused(
    group: dict[str, Any],
    found_inf: torch.Tensor | None,
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
) -> None:
    """Move the moments, and put the negative directions over the gradients."""
    # Adam's kernel after infinitely many steps (no bias correction), with the gradient as what it steps, too: a decay
    # by all of it leaves the step alone.
    steps = [torch.full((), math.inf, dtype=torch.float32, device=params[0].device)] * len(params)
    beta1, beta2 = group["betas"]
    _torch.fused_adam_(
        grads,
        grads,
        exp_avgs,
        exp_avg_sqs,
        steps,
        lr=1.0,
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=1.0,
        found_inf=found_inf,
    )
    if found_inf is not None:  # then the kernel left the gradients as they were, and 0 times infinity is no step
        for grad in grads:
            grad.masked_fill_(found_inf.reshape(()).bool(), 0)
    if group["weight_decay"]:
        torch._foreach_add_(grads, params, alpha=-group["weight_decay"])


def _foreach(
    group: dict[str, Any],
    found_inf: torch.Tensor | None,
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
) -> None:
    """Move the moments, and put the negative directions over the gradients."""
    beta1, beta2 = group["betas"]
    before = None
    if found_inf is not None:
        before = [[t.clone() for t in tensors] for tensors in (exp_avgs, exp_avg_sqs)]
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1 - beta2)
    if found_inf is not None and before is not None:
        for tensors, olds in zip((exp_avgs, exp_avg_sqs), before, strict=True):
            for new, old in zip(tensors, olds, strict=True):
                new.copy_(torch.where(found_inf.squeeze().bool(), old, new))
    if group["eps_inside_sqrt"]:
        denominators = torch._foreach_add(exp_avg_sqs, group["eps"])
        torch._foreach_sqrt_(denominators)
    else:
        denominators = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_add_(denominators, group["eps"])
    torch._foreach_zero_(grads)
    torch._foreach_addcdiv_(grads, exp_avgs, denominators, value=-1)
    if group["weight_decay"]:
        torch._foreach_add_(grads, params, alpha=-group["weight_decay"])


def _rates(squares: torch.Tensor, counts: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """``lr * c * ratio`` of each parameter, from the squares of its norms (n, 2)."""
    weights, directions = squares.sqrt().unbind(dim=1)
    ratio = (weights / directions).clamp(group["min_coeff"], group["max_coeff"])
    ratio = torch.where((weights > 0) & (directions > 0), ratio, 1.0)
    rates: torch.Tensor = ratio * group["lr"]
    if group["bias_correction"]:
        beta1, beta2 = group["betas"]
        # The first step may be one that changes nothing: its count is 0.
        counts = counts.clamp(min=1)
        rates = rates * (1 - beta2**counts).sqrt() / (1 - beta1**counts)
    return rates
