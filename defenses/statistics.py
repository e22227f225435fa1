"""Deviations of each replica's signal from a reference (SENTINEL, arXiv 2603.03592, section 4).

Each takes `x` `[replicas, batch, tokens, hidden]` and a reference `m` `[batch, tokens, hidden]`
(or `[replicas, ...]`-broadcastable), both float32, and returns `[replicas]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sentinel_bench.defenses.fence import sort_last


def l1(x: Tensor, m: Tensor) -> Tensor:
    """Mean absolute difference."""
    return (x - m).abs_().flatten(1).mean(1)


def l2(x: Tensor, m: Tensor, axis: str = "tensor") -> Tensor:
    """Mean squared difference after standardising each of the two.

    `axis` is "tensor" (all elements of one replica together) or "token" (over hidden). With
    correlation r between them this is `2 - 2 r`; a constant standardises to zeros.
    """
    if axis == "tensor":
        x, m = x.flatten(1), m.flatten()
    m = m - m.mean(-1, keepdim=True)
    m_power = m.square().mean(-1)
    x_power = x.var(-1, correction=0) if axis == "token" else _variance(x)
    cross = (x * m).mean(-1) if axis == "token" else x @ m / m.numel()
    scale = (x_power * m_power).sqrt()
    correlation = torch.where(scale > 0, cross / scale, 0.0)
    out = (x_power > 0).float() + (m_power > 0).float() - 2 * correlation
    per_replica: Tensor = out if axis == "tensor" else out.flatten(1).mean(1)
    return per_replica


def _variance(x: Tensor) -> Tensor:
    """Population variance of each row `[replicas, n]`, by two fast passes."""
    mean = x.mean(1, keepdim=True)
    return (x - mean).square_().mean(1)


def sfr(x: Tensor, m: Tensor) -> Tensor:
    """Sign flip ratio: share of elements whose sign differs; the sign of 0 is 0."""
    return (x.sign() - m.sign()).abs_().clamp_(max=1).flatten(1).mean(1)


def swd(x: Tensor, m: Tensor, directions: Tensor) -> Tensor:
    """Sliced Wasserstein-1 distance between the two clouds of tokens in R^hidden.

    Args:
        x, m: as above.
        directions: `[hidden, n]` unit vectors; the distance is the mean over the n projections.
    """
    hidden = x.shape[-1]
    a, b = (directions.T @ y.reshape(-1, y[0, ..., 0].numel(), hidden).mT for y in (x, m[None]))
    return (sort_last(a) - sort_last(b)).abs_().flatten(1).mean(1)


def unit_directions(hidden: int, n: int, seed: int, device: str) -> Tensor:
    """Return `[hidden, n]` unit vectors drawn uniformly from a seed."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(hidden, n, generator=generator)
    return (directions / directions.norm(dim=0)).to(device)
