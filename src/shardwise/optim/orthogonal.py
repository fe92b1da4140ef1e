"""Newton-Schulz iterations: the nearest (semi-)orthogonal matrix, roughly, by matrix products alone."""

from __future__ import annotations

import torch

# Chosen by Keller Jordan for the steepest slope at zero; singular values end between about 0.7 and 1.2.
A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5
EPS = 1e-7
# The Gram iteration loses digits with the condition of its product; starting anew from the matrix gives them back.
RESTART = 2


def orthogonalized(matrix: torch.Tensor, method: str = "gram") -> torch.Tensor:
    """About ``U @ V.T`` of the singular value decomposition ``U @ S @ V.T`` of a matrix.

    Five iterations ``X <- (a + b * X X^T + c * (X X^T)^2) X`` on the matrix divided by its norm. ``"standard"``
    computes them as written, ``"gram"`` iterates on the smaller ``X X^T`` and multiplies ``X`` twice only: the same
    polynomial for less work where the matrix is far from square.

    On a GPU a matrix of fp32 is computed in bf16 (``"standard"``) or fp16 (``"gram"``), as upstream does, for the
    tensor cores; on a CPU, and in float64, in its own dtype.

    Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); for the Gram form
    https://tridao.me/blog/2026/gram-newton-schulz/.

    Args:
        matrix: (rows, columns).
        method: ``"gram"`` or ``"standard"``.

    Returns:
        A matrix of the same shape and dtype.
    """
    wide = matrix.float() if matrix.dtype == torch.float16 else matrix
    x = wide.mT if wide.size(0) > wide.size(1) else wide
    x = (x / (torch.linalg.vector_norm(x) + EPS)).to(_dtype(matrix, method))
    x = _gram(x) if method == "gram" and x.size(0) < x.size(1) else _standard(x)
    return (x.mT if wide.size(0) > wide.size(1) else x).to(matrix.dtype)


def _dtype(matrix: torch.Tensor, method: str) -> torch.dtype:
    if matrix.device.type == "cpu" or matrix.dtype == torch.float64:
        return matrix.dtype
    return torch.float16 if method == "gram" else torch.bfloat16


def _standard(x: torch.Tensor) -> torch.Tensor:
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x


def _gram(x: torch.Tensor) -> torch.Tensor:
    gram = x @ x.mT
    product: torch.Tensor | None = None
    for i in range(STEPS):
        if i == RESTART and product is not None:
            x = product @ x
            gram, product = x @ x.mT, None
        factor = torch.addmm(gram, gram, gram, beta=B, alpha=C)
        factor.diagonal().add_(A)
        # All factors are polynomials of one matrix: they commute.
        product = factor if product is None else factor @ product
        if i + 1 < STEPS and i + 1 != RESTART:
            gram = factor @ gram @ factor
    return x if product is None else product @ x
