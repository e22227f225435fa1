"""Inner products and distances of a few very long rows, by matrix products.

A product of rows `[n, d]` around a centre costs one look at them, whatever is done with it: n^2
numbers then stand for all geometry. It is accurate as far as the rows are about as far from the
centre as from each other. The mean is no such centre: one outlier moves it away from all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sentinel_bench.aggregators.order import width

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SAMPLE = 4096
"""Coordinates that tell which row lies in the middle."""
RESOLVED = 1e-3
"""A squared distance below this share of the two squared norms is lost in their rounding."""


def combine(weights: Sequence[float], rows: Tensor) -> Tensor:
    """Return the sum of the rows `[n, d]`, each times its weight, `[d]`."""
    return rows.new_tensor(weights) @ rows


def gram(rows: Tensor, centre: Tensor) -> Tensor:
    """Return the inner products of rows around a centre, `[n, n]` float64.

    Where squares overflow or vanish in the dtype of the rows, float64 is used throughout. That in
    turn overflows for float64 rows with norms above 1e150.

    Args:
        rows: `[n, d]`, finite.
        centre: `[d]`.
    """
    import torch

    products = _products(rows, centre, rows.dtype)
    info = torch.finfo(rows.dtype)
    least = info.tiny / info.eps * len(centre)
    norms = products.diagonal().tolist()
    if all(least < a < math.inf or x.equal(centre) for a, x in zip(norms, rows, strict=True)):
        return products
    return _products(rows, centre, torch.float64)


def squared_distances(rows: Tensor) -> Tensor:
    """Return the squared distances between all rows `[n, d]`, `[n, n]` float64, 0 on the diagonal.

    They are taken around a row in the middle. Rows that lie close together but far from it, as
    colluding outliers do, are then taken once more by themselves.
    """
    products = gram(rows, rows[_central(rows)])
    norms = products.diagonal()
    scale = norms[:, None] + norms
    squared = _squared(products).fill_diagonal_(0)
    # the row in the middle is in none of the groups, so that each is smaller than the whole
    for group in _groups((squared < RESOLVED * scale).tolist()):
        index = squared.new_tensor(group).long()
        squared[index[:, None], index] = squared_distances(rows[group])
    return squared


def _products(rows: Tensor, centre: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum the products of the blocks, each taken in `dtype`, in float64."""
    n = len(rows)
    products = rows.new_zeros(n, n).double()
    columns = width(n, rows)
    for start in range(0, len(centre), columns):
        part = slice(start, start + columns)
        block = rows[:, part].to(dtype) - centre[part].to(dtype)
        products += block @ block.T
    return products


def _squared(products: Tensor) -> Tensor:
    """Return squared distances `[n, n]` from inner products."""
    norms = products.diagonal()
    return (norms[:, None] + norms - (products + products.T)).clamp_(min=0)


def _central(rows: Tensor) -> int:
    """Return a row that is close to more than half of the others, judged by a sample."""
    n, d = rows.shape
    sample = rows[:, :: max(1, d // SAMPLE)].double()
    sample = sample - sample[0]
    to_half = _squared(sample @ sample.T).sort(1).values[:, n // 2].tolist()
    return min(range(n), key=to_half.__getitem__)


def _groups(close: list[list[bool]]) -> list[list[int]]:
    """Return the sets of two and more that are connected by `close` pairs, in order."""
    groups = []
    left = set(range(len(close)))
    while left:
        first = min(left)
        group, todo = set(), {first}
        while todo:
            i = todo.pop()
            group.add(i)
            todo |= {j for j in left - group if close[i][j]}
        left -= group
        if len(group) > 1:
            groups.append(sorted(group))
    return groups
