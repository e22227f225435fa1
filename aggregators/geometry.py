"""Inner products and distances of a few very long rows, by matrix products.

A product of rows `[n, d]` around a centre costs one look at them, whatever is done with it: n^2
numbers then stand for all geometry. It is accurate as far as the rows are about as far from the
centre as from each other; `squared_distances` sees to that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sentinel_bench.aggregators.order import width

if TYPE_CHECKING:
    import torch
    from torch import Tensor

RESOLVED = 1e-3
"""A squared distance below this share of the two squared norms is lost in their rounding."""


def combine(weights: Sequence[float], rows: Tensor) -> Tensor:
    """Return the sum of the rows `[n, d]`, each times its weight, `[d]`."""
    return rows.new_tensor(weights) @ rows


def squared_distances(rows: Tensor) -> Tensor:
    """Return the squared distances between all rows `[n, d]`, `[n, n]` float64, 0 on the diagonal.

    Around the mean of all rows at first. Rows that lie close together but far from it, as the
    honest ones do beside an outlier, are then taken by themselves, around their own mean.
    """
    return _distances(rows, list(range(len(rows))))


def gram(
    rows: Tensor, centre: Tensor | None = None, members: Sequence[int] | None = None
) -> Tensor:
    """Return the inner products of rows around a centre, `[n, n]` float64.

    Where squares overflow or vanish in the dtype of the rows, float64 is used throughout. That in
    turn overflows for float64 rows with norms above 1e150.

    Args:
        rows: `[n, d]`, finite.
        centre: `[d]`; their own mean if it is None.
        members: which rows are meant; all if it is None.
    """
    import torch

    products = _products(rows, centre, members, rows.dtype)
    largest = float(products.diagonal().amax())
    info = torch.finfo(rows.dtype)
    if info.tiny / info.eps * rows.shape[1] < largest < math.inf:
        return products
    return _products(rows, centre, members, torch.float64)


def _products(
    rows: Tensor, centre: Tensor | None, members: Sequence[int] | None, dtype: torch.dtype
) -> Tensor:
    """Sum the products of the blocks, each taken in `dtype`, in float64."""
    n = len(rows) if members is None else len(members)
    products = rows.new_zeros(n, n).double()
    columns = width(n, rows)
    for start in range(0, rows.shape[1], columns):
        block = rows[:, start : start + columns].to(dtype)
        if members is not None:
            block = block[members]
        if centre is None:
            middle = combine([1 / n] * n, block)
        else:
            middle = centre[start : start + columns].to(dtype)
        block = block - middle
        products += block @ block.T
    return products


def _distances(rows: Tensor, members: list[int]) -> Tensor:
    everybody = len(members) == len(rows)
    products = gram(rows, members=None if everybody else members)
    norms = products.diagonal()
    scale = norms[:, None] + norms
    squared = (scale - products - products.T).clamp_(min=0)
    squared.fill_diagonal_(0)
    close = (squared < RESOLVED * scale).tolist()
    for group in _groups(close):
        if len(group) < len(members):
            index = squared.new_tensor(group).long()
            squared[index[:, None], index] = _distances(rows, [members[i] for i in group])
    return squared


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
