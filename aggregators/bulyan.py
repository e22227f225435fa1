"""Bulyan: rows chosen by Krum, then a trimmed mean (El Mhamdi et al., ICML 2018)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sentinel_bench.aggregators.geometry import squared_distances
from sentinel_bench.aggregators.krum import ranking
from sentinel_bench.aggregators.order import average, reduce_sorted
from sentinel_bench.api import Aggregator, AggregatorParams

if TYPE_CHECKING:
    from torch import Tensor


class Bulyan(Aggregator[AggregatorParams]):
    """Chooses rows by Krum again and again, then averages what lies around their median.

    The last rows are chosen from `2f + 1`, with `f - 1` neighbours. With a single one (f up to 2)
    the two rows that are nearest to each other always tie: the first of them is chosen.
    """

    name = "bulyan"
    goal = "withstand f rows that hide one large coordinate among many ordinary ones"
    formula = (
        "theta = n - 2f rows, each the Krum of those that remain; for each coordinate the mean of "
        "the theta - 2f values closest to the median"
    )
    source = "El Mhamdi et al. 2018, arXiv 1802.07927, section 4"

    def requires(self, n: int, f: int) -> str | None:
        """Return why n >= 4f+3 does not hold.

        Relaxed, at least one row is chosen, and where `theta - 2f` is below 1 the median of the
        chosen rows is taken.
        """
        return self.condition("n >= 4f+3", 4 * f + 3, n, f)

    def aggregate(self, rows: Tensor, f: int) -> Tensor:
        """Return the Bulyan of the rows `[n, d]`."""
        chosen = choose(squared_distances(rows), f, max(1, len(rows) - 2 * f))
        theta = len(chosen)
        around = max(theta - 2 * f, 2 - theta % 2)
        return reduce_sorted(
            [rows[i] for i in chosen], range(theta), lambda v: average(closest(v, around))
        )


def choose(squared: Tensor, f: int, count: int) -> list[int]:
    """Return the rows that Krum takes one after the other, from the distances `[n, n]`."""
    left, chosen = list(range(len(squared))), []
    for _ in range(count):
        index = squared.new_tensor(left).long()
        best = ranking(squared[index[:, None], index], f)[0]
        chosen.append(left.pop(best))
    return chosen


def closest(ordered: list[Tensor], count: int) -> list[Tensor]:
    """Return the `count` values of each coordinate closest to its median, the lower of two equal.

    They are neighbours in `ordered` (lowest first): a window, which moves up for as long as the
    next value above it is closer than the lowest in it and takes its place.
    """
    n = len(ordered)
    median = average(ordered[(n - 1) // 2 : n // 2 + 1])
    window = ordered[:count]
    for low, high in zip(ordered, ordered[count:], strict=False):
        window.append(high.where(high - median < median - low, window.pop(0)))
    return window
