"""Orthogonalization of matrices by a Newton-Schulz iteration. Pure arithmetic.

Each step computes p(X) = a X + b (X X^T) X + c (X X^T)^2 X. The coefficients move every singular value of a
matrix of norm 1 toward 1. After five steps the singular values are between about 0.7 and 1.2 (Jordan et al.,
"Muon", 2024).
"""

from __future__ import annotations

from typing import Final

import torch

METHODS: Final = ("gram", "standard")
STEPS: Final = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
_SMALLEST_NORM: Final = 1e-7
# After this number of steps, "gram" starts again from the matrix itself, so that rounding errors do not accumulate.
_RESTART: Final = 2


def orthogonalized(matrix: torch.Tensor, method: str = "gram", steps: int = STEPS) -> torch.Tensor:
    """Return a matrix with the singular vectors of ``matrix`` and singular values near 1.

    Args:
        matrix: A matrix, or a batch of matrices in the leading dimensions. The last two dimensions are rows and
            columns.
        method: ``standard`` iterates on the matrix, in bf16. ``gram`` iterates on its smaller Gram matrix, in
            fp16 on CUDA and in fp32 elsewhere.
        steps: The number of steps of the iteration.

    Returns:
        A tensor of the shape of ``matrix``, in the dtype of the iteration.
    """
    tall = matrix.size(-2) > matrix.size(-1)
    wide = matrix.mT if tall else matrix
    wide = wide.to(torch.promote_types(wide.dtype, torch.float32))
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True)
    wide = (wide / (norm + _SMALLEST_NORM)).to(_dtype(matrix.device, method))
    if method == "gram" and wide.size(-2) < wide.size(-1):
        for count in (min(_RESTART, steps), max(0, steps - _RESTART)):
            wide = _through_gram(wide, count)
    else:
        for _ in range(steps):
            wide = _polynomial(wide @ wide.mT) @ wide
    return wide.mT if tall else wide


def _through_gram(wide: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the result of ``steps`` steps at once.

    The polynomials of the steps commute with the Gram matrix, so the iteration runs on the Gram matrix alone.
    """
    if not steps:
        return wide
    gram = wide @ wide.mT
    product = _polynomial(gram)
    latest = product
    for _ in range(steps - 1):
        gram = latest @ gram @ latest
        latest = _polynomial(gram)
        product = latest @ product
    return product @ wide


def _polynomial(gram: torch.Tensor) -> torch.Tensor:
    """Return a I + b G + c G^2."""
    result = _B * gram + _C * (gram @ gram)
    result.diagonal(dim1=-2, dim2=-1).add_(_A)
    return result


def _dtype(device: torch.device, method: str) -> torch.dtype:
    if method == "standard":
        return torch.bfloat16
    return torch.float16 if device.type == "cuda" else torch.float32
