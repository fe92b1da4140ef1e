"""What the optimizers of shardwise share: which parameters are stepped, closures, checks of settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_FUSED_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def with_gradient(group: dict[str, Any]) -> list[torch.Tensor]:
    """The parameters of a group that have a gradient.

    Raises:
        RuntimeError: a gradient is sparse.
    """
    params: list[torch.Tensor] = [p for p in group["params"] if p.grad is not None]
    if any(gradient(p).is_sparse for p in params):
        raise RuntimeError("sparse gradients are not supported; build the embedding with sparse=False")
    return params


def gradient(param: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter that has one."""
    if param.grad is None:
        raise RuntimeError("the parameter has no gradient")
    return param.grad


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """What the closure of ``step`` returns, computed with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_settings(**settings: Any) -> None:
    """Raise ValueError for a rate, decay or epsilon below 0 and betas outside [0, 1)."""
    for name, value in settings.items():
        if name == "betas":
            if len(value) != 2 or not all(0.0 <= beta < 1.0 for beta in value):
                raise ValueError(f"betas must be two numbers from 0 up to but not 1, got {value}")
        elif not value >= 0.0:
            raise ValueError(f"{name} must not be negative, got {value}")


def has_fused_kernel(tensor: torch.Tensor) -> bool:
    """Whether torch's fused kernels take the tensor."""
    return tensor.device.type in ("cpu", "cuda") and tensor.layout is torch.strided and tensor.dtype in _FUSED_DTYPES


def step_count(state: dict[str, Any], device: torch.device) -> torch.Tensor:
    """The count of a parameter's steps (0-d, fp32), made or moved to where it is read.

    A loaded one lies where the file had it: torch moves the counts of its own classes only.
    """
    count: torch.Tensor | None = state.get("step")
    if count is None or count.device != device:
        count = torch.zeros((), dtype=torch.float32, device=device) if count is None else count.to(device)
        state["step"] = count
    return count


def fits_fused_kernel(*lists: Sequence[torch.Tensor]) -> bool:
    """Whether torch's fused kernels take lists of parameters, gradients and states.

    The kernels walk through memory, so tensors at equal places must lie alike (a state is made dense: a parameter
    with its strides is dense too).
    """
    return all(
        len({t.stride() for t in tensors}) == 1 and all(map(has_fused_kernel, tensors))
        for tensors in zip(*lists, strict=True)
    )
