"""Muon: orthogonalized momentum for hidden matrices, AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.optim.common import check_settings, evaluate, gradient, with_gradient
from shardwise.optim.orthogonal import orthogonalized
from shardwise.optim.uncorrected import adam_step

NS_METHODS = ("gram", "standard")


@dataclass(frozen=True)
class Update:
    """A parameter of Muon, its group, and the momentum to orthogonalize (of the slice, where it is one)."""

    param: torch.Tensor
    group: dict[str, Any]
    momentum: torch.Tensor


class Muon(Optimizer):
    """Steps matrices by ``lr * sqrt(max(1, rows / columns))`` times their orthogonalized Nesterov momentum.

    ``m = momentum * m + (1 - momentum) * g``, then ``p = p * (1 - lr * weight_decay) - lr * scale * O(u)`` with ``u``
    interpolated between ``g`` and ``m`` and ``O`` as in :func:`~shardwise.optim.orthogonal.orthogonalized`. Groups
    with ``use_muon: False`` are stepped by AdamW. Source: K. Jordan et al., "Muon: An optimizer for hidden layers in
    neural networks" (2024); the defaults are upstream's.

    Momentum and decay act on each element; only ``O`` needs whole matrices. :meth:`advance` does all that goes
    before it, :meth:`direction` is it, :meth:`apply` what follows; :meth:`step` does all three for whole parameters.

    Args:
        params: parameters, all for Muon, or groups; a group's ``use_muon`` (default True) says who steps it, and
            its own settings beat the others.
        lr: the rate of both, unless the next two say otherwise.
        momentum: of Muon.
        weight_decay: decoupled decay of both.
        muon_lr: rate of Muon; default ``lr``, else 0.02.
        adam_lr: rate of AdamW; default ``lr``, else 3e-4.
        betas, eps: of AdamW.
        ns_method: ``"gram"`` or ``"standard"``.

    Raises:
        ValueError: a setting out of range, or a parameter for Muon that is not a matrix.
    """

    takes_found_inf = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        ns_method: str = "gram",
    ) -> None:
        if ns_method not in NS_METHODS:
            raise ValueError(f"ns_method must be one of {', '.join(NS_METHODS)}, got {ns_method!r}")
        of_muon = next((rate for rate in (muon_lr, lr) if rate is not None), 0.02)
        of_adam = next((rate for rate in (adam_lr, lr) if rate is not None), 3e-4)
        check_settings(lr=of_muon, adam_lr=of_adam, momentum=momentum, weight_decay=weight_decay, betas=betas, eps=eps)
        shared = {"weight_decay": weight_decay, "use_muon": True}
        muon = {"lr": of_muon, "momentum": momentum, "ns_method": ns_method}
        adam = {"lr": of_adam, "betas": betas, "eps": eps, "decoupled": True}
        listed: list[Any] = list(params)
        groups = listed if any(isinstance(item, dict) for item in listed) else [{"params": listed}]
        own = [{**(muon if group.get("use_muon", True) else adam), **group} for group in groups]
        super().__init__(own, shared)
        for group in self.param_groups:
            _check_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = evaluate(closure)
        for update in self.advance():
            self.apply(update, self.direction(update.momentum, update.group))
        return loss

    @torch.no_grad()
    def advance(self) -> list[Update]:
        """Step the parameters of AdamW, and move the momenta of Muon's; gradients are overwritten."""
        updates: list[Update] = []
        for group in self.param_groups:
            params = with_gradient(group)
            if not params:
                continue
            if not group["use_muon"]:
                adam_step(self, params, group, corrected=True)
                continue
            for param in params:
                updates.append(Update(param, group, self._momentum(param, group["momentum"])))
        return updates

    @staticmethod
    def direction(matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """What a whole momentum (rows, columns) is replaced by: orthogonal, times the scale of its shape."""
        rows, columns = matrix.shape
        return orthogonalized(matrix, group["ns_method"]).mul_(math.sqrt(max(1.0, rows / columns)))

    @torch.no_grad()
    def apply(self, update: Update, direction: torch.Tensor) -> None:
        """Decay a parameter, or the slice of it, and step it along the direction (of the same shape)."""
        lr, decay = update.group["lr"], update.group["weight_decay"]
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        if found_inf is None:
            if decay:
                update.param.mul_(1 - lr * decay)
            update.param.add_(direction, alpha=-lr)
            return
        kept = (1 - found_inf).to(update.param.dtype).squeeze()
        update.param.mul_(1 - kept * (lr * decay))
        update.param.addcmul_(direction, kept, value=-lr)

    def _momentum(self, param: torch.Tensor, momentum: float) -> torch.Tensor:
        state, grad = self.state[param], gradient(param)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        buffer: torch.Tensor = state["momentum_buffer"]
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None:
            # Drawn to itself the momentum stays as it is; and nothing that is not finite gets into it.
            grad.copy_(torch.where(found_inf.squeeze().bool(), buffer, grad))
        buffer.lerp_(grad, 1 - momentum)
        return grad.lerp_(buffer, momentum)


def _check_group(group: dict[str, Any]) -> None:
    if not group["use_muon"]:
        return
    for number, param in enumerate(group["params"]):
        if param.dim() != 2:
            raise ValueError(
                f"Muon takes matrices, and parameter {number} of its group has the shape {tuple(param.shape)}; put it "
                "into a group with use_muon: False"
            )
