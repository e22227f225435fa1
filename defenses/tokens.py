"""Angles and sizes of vectors, one per token, that stay finite where a vector is zero.

What overflows is NaN: a signal so large cannot be measured.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TINY = 1e-15
"""Norms below are taken for zero: their squares are at the end of float32."""
LIMIT = math.log(1e6)
"""Log ratios end here, so that one vanished token cannot outweigh all others."""


def norms(x: Tensor) -> Tensor:
    """Return the norms of the vectors along the last axis."""
    out: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return out


def dots(x: Tensor, y: Tensor) -> Tensor:
    """Return the inner products of the vectors along the last axis."""
    return (x * y).sum(-1)


def over(x: Tensor, norm: Tensor) -> Tensor:
    """Return `x / norm`; a norm of zero counts as `TINY`."""
    return x / norm.clamp_min(TINY)


def cosine(dot: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the cosines of vectors with these inner products and norms; 0 where one is zero."""
    return dot / (x * y).clamp_min(TINY**2)


def log_ratio(x: Tensor, y: Tensor) -> Tensor:
    """Return `log(x / y)` of two norms, within +- `LIMIT`; 0 where both are zero."""
    return over(x.clamp_min(TINY), y).log_().clamp_(-LIMIT, LIMIT)


def across(norm: Tensor, along: Tensor) -> Tensor:
    """Return the norm of what a vector has orthogonal to another, `along` being its part along it.

    A difference of squares: below a thousandth of `norm` it is rounding.
    """
    return torch.addcmul(norm.square(), along, along, value=-1).clamp_min_(0).sqrt_()
