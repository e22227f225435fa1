"""Deviations of each replica's signal from a reference (SENTINEL, arXiv 2603.03592, section 4).

Each takes `x` `[replicas, batch, tokens, hidden]` and a reference `m` `[batch, tokens, hidden]`,
both float32, and returns `[replicas]`.
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
    (_, x_std), (m_centred, m_std) = _standard(x), _standard(m)
    cross = x @ m_centred / m.numel() if axis == "tensor" else (x * m_centred).mean(-1)
    scale = x_std * m_std
    correlation = torch.where(scale > 0, cross / scale, 0.0)
    out = (x_std > 0).float() + (m_std > 0).float() - 2 * correlation
    per_replica: Tensor = out if axis == "tensor" else out.flatten(1).mean(1)
    return per_replica


def _standard(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` less its mean over the last axis, and its standard deviation there.

    A deviation that is no more than the rounding of the mean is 0.
    """
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    std: Tensor = torch.linalg.vector_norm(centred, dim=-1) / x.shape[-1] ** 0.5
    return centred, torch.where(std > 1e-6 * mean[..., 0].abs(), std, 0.0)


def sfr(x: Tensor, m: Tensor) -> Tensor:
    """Sign flip ratio: share of elements whose sign differs; the sign of 0 is 0."""
    return x.sign().sub_(m.sign()).abs_().clamp_(max=1).flatten(1).mean(1)


def swd(x: Tensor, m: Tensor, directions: Tensor) -> Tensor:
    """Sliced Wasserstein-1 distance between the two clouds of tokens in R^hidden.

    Args:
        x, m: as above.
        directions: `[hidden, n]` unit vectors; the distance is the mean over the n projections.
    """
    hidden, n = directions.shape
    # one product for all replicas, whose rows are already what has to be sorted
    a = (directions.T @ x.reshape(-1, hidden).T).view(n, len(x), -1)
    b = (directions.T @ m.reshape(-1, hidden).T).view(n, 1, -1)
    difference = sort_last(a) - sort_last(b)
    return difference.abs_().mean((0, 2))


def unit_directions(hidden: int, n: int, seed: int, device: str) -> Tensor:
    """Return `[hidden, n]` unit vectors drawn uniformly from a seed."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(hidden, n, generator=generator)
    lengths: Tensor = directions.norm(dim=0)
    return (directions / lengths).to(device)
