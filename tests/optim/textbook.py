"""Optimizers as their papers write them: one parameter at a time, plain operations, nothing shared with the library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

Update = Callable[[torch.Tensor, torch.Tensor, dict[str, Any], dict[str, Any]], torch.Tensor]


class Textbook(Optimizer):
    """Calls ``update(p, g, state, settings)``, which returns the new value, for each parameter with a gradient."""

    def __init__(self, params: Iterable[Any], update: Update, **settings: Any) -> None:
        self.update = update
        super().__init__(params, {"lr": 1e-3, "weight_decay": 0.0, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self.update(p.clone(), p.grad.clone(), self.state[p], group))


def _moments(g: torch.Tensor, state: dict[str, Any], betas: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
    state["t"] = state.get("t", 0) + 1
    state["m"] = betas[0] * state.get("m", 0 * g) + (1 - betas[0]) * g
    state["v"] = betas[1] * state.get("v", 0 * g) + (1 - betas[1]) * g * g
    return state["m"], state["v"]


def lamb(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], s: dict[str, Any]) -> torch.Tensor:
    betas = s.get("betas", (0.9, 0.999))
    m, v = _moments(g, state, betas)
    eps = s.get("eps", 1e-8)
    u = m / (torch.sqrt(v + eps) if s.get("eps_inside_sqrt") else torch.sqrt(v) + eps) + s["weight_decay"] * p
    ratio, size, length = 1.0, float(p.norm()), float(u.norm())
    if size > 0 and length > 0:
        ratio = min(max(size / length, s.get("min_coeff", 0.01)), s.get("max_coeff", 10.0))
    rate = s["lr"]
    if s.get("bias_correction", True):
        rate *= math.sqrt(1 - betas[1] ** state["t"]) / (1 - betas[0] ** state["t"])
    return p - rate * ratio * u


def lion(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], s: dict[str, Any]) -> torch.Tensor:
    beta1, beta2 = s.get("betas", (0.9, 0.999))
    m = state.get("m", 0 * g)
    direction = torch.sign(beta1 * m + (1 - beta1) * g)
    state["m"] = beta2 * m + (1 - beta2) * g
    return p - s["lr"] * (direction + s["weight_decay"] * p)


def uncorrected_adamw(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], s: dict[str, Any]) -> torch.Tensor:
    m, v = _moments(g, state, s.get("betas", (0.9, 0.999)))
    return p - s["lr"] * (m / (torch.sqrt(v) + s.get("eps", 1e-8)) + s["weight_decay"] * p)


def uncorrected_adam(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], s: dict[str, Any]) -> torch.Tensor:
    m, v = _moments(g + s["weight_decay"] * p, state, s.get("betas", (0.9, 0.999)))
    return p - s["lr"] * m / (torch.sqrt(v) + s.get("eps", 1e-8))


def adamw(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], s: dict[str, Any]) -> torch.Tensor:
    betas = s["betas"]
    m, v = _moments(g, state, betas)
    m, v = m / (1 - betas[0] ** state["t"]), v / (1 - betas[1] ** state["t"])
    return p - s["lr"] * (m / (torch.sqrt(v) + s["eps"]) + s["weight_decay"] * p)


def muon(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], s: dict[str, Any]) -> torch.Tensor:
    """Newton and Schulz's polynomial applied to the singular values themselves."""
    beta = s.get("momentum", 0.95)
    state["m"] = beta * state.get("m", 0 * g) + (1 - beta) * g
    u = (1 - beta) * g + beta * state["m"]
    left, sigma, right = torch.linalg.svd(u, full_matrices=False)
    sigma = sigma / (u.norm() + 1e-7)
    for _ in range(5):
        sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
    scale = math.sqrt(max(1, p.shape[0] / p.shape[1]))
    return p * (1 - s["lr"] * s["weight_decay"]) - s["lr"] * scale * (left * sigma) @ right
