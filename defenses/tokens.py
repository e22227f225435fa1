"""Angles and sizes of vectors, one per token, that stay finite where a vector is zero.

What overflows is NaN: a signal so large cannot be measured.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sentinel_bench.api import Signals

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


class TokenSample:
    """Draws the same random tokens of all replicas and boundaries, anew in each step.

    Args:
        seed: of the drawing.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._order: tuple[tuple[int, int], Tensor] | None = None

    def __call__(self, signals: Signals, n: int | None) -> tuple[Tensor, Tensor]:
        """Return what n tokens were, `[replicas, n, hidden]` sent and received; None: all."""
        assert signals.received is not None
        sent, received = signals.sent.flatten(1, 2), signals.received.flatten(1, 2)
        if n is not None and n < sent.shape[1]:
            places = self._draw(signals.step, sent)[:n]
            sent, received = sent.index_select(1, places), received.index_select(1, places)
        return sent.float(), received.float()

    def _draw(self, step: int, like: Tensor) -> Tensor:
        """Return the places of all tokens in the random order of this step, for every replica."""
        drawn = step, like.shape[1]
        if self._order is None or self._order[0] != drawn:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
            order = torch.randperm(like.shape[1], generator=generator)
            self._order = drawn, order.to(like.device)
        return self._order[1]
