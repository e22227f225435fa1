"""Order statistics of each coordinate, by a sorting network over the rows.

To sort n numbers for each of d coordinates is slow: d tiny sorts. A sorting network compares whole
rows instead: Batcher's merge exchange takes 63 pairs of minimum and maximum for 16 rows. It is done
block by block, so that a block of all rows stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ELEMENTS = 2**18
"""Elements of one block of all rows: 1 MB in float32."""


def width(rows: int, like: Tensor) -> int:
    """Return how many columns of so many rows make one block; on a GPU all of `like` `[..., d]`."""
    return max(1, ELEMENTS // rows) if like.device.type == "cpu" else max(1, like.shape[-1])


def coordinate_median(rows: Sequence[Tensor]) -> Tensor:
    """Return the median of each coordinate, `[d]`; for even n the mean of the two middle ones."""
    n = len(rows)
    return reduce_sorted(rows, range((n - 1) // 2, n // 2 + 1), average)


def reduce_sorted(
    rows: Sequence[Tensor], ranks: range, reduce: Callable[[list[Tensor]], Tensor]
) -> Tensor:
    """Sort the values of each coordinate and reduce those of some ranks to one.

    Args:
        rows: n tensors `[d]`, finite.
        ranks: the ranks wanted, from 0 for the lowest.
        reduce: turns their values, a list of tensors `[columns]`, lowest first, into `[columns]`,
            and changes none of them.

    Returns:
        `[d]`.
    """
    steps = _network(len(rows), ranks.start, ranks.stop)
    out = rows[0].new_empty(rows[0].shape)
    columns = width(len(rows), out)
    for start in range(0, len(out), columns):
        values = [row[start : start + columns] for row in rows]
        for i, j, lower, upper in steps:
            a, b = values[i], values[j]
            if lower:
                values[i] = a.minimum(b)
            if upper:
                values[j] = a.maximum(b)
        out[start : start + columns] = reduce(values[ranks.start : ranks.stop])
    return out


def average(values: Sequence[Tensor]) -> Tensor:
    """Return the mean of some tensors of one shape."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total.div_(len(values))


@lru_cache
def _network(n: int, start: int, stop: int) -> tuple[tuple[int, int, bool, bool], ...]:
    """Return the comparisons that bring the ranks from `start` to below `stop` to their places.

    Each is two places, and whether the minimum (to the first) and the maximum (to the second) is
    ever looked at again.
    """
    wanted = set(range(start, stop))
    steps = []
    for i, j in reversed([*_merge_exchange(n)]):
        if i in wanted or j in wanted:
            steps.append((i, j, i in wanted, j in wanted))
            wanted |= {i, j}
    return tuple(reversed(steps))


def _merge_exchange(n: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs that sort n values (Knuth, TAOCP vol. 3, algorithm 5.2.2M; Batcher 1968)."""
    top = 1 << max(0, (n - 1).bit_length() - 1)
    p = top
    while p > 0:
        q, r, distance = top, 0, p
        while True:
            for i in range(n - distance):
                if i & p == r:
                    yield i, i + distance
            if q == p:
                break
            distance, q, r = q - p, q >> 1, p
        p >>= 1
