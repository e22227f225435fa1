"""Rules that look at each coordinate by itself (Yin et al., arXiv 1803.01498)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sentinel_bench.aggregators.order import average, coordinate_median, reduce_sorted
from sentinel_bench.api import Aggregator, AggregatorParams

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = "Yin et al. 2018, arXiv 1803.01498"


class Median(Aggregator[AggregatorParams]):
    """Takes the median of each coordinate."""

    name = "median"
    goal = "withstand fewer than half of the rows, coordinate by coordinate"
    formula = "median_i x_i[k] for each k; n even: mean of the two middle ones"
    source = SOURCE + ", definition 1"

    def requires(self, n: int, f: int) -> str | None:
        """Return why n > 2f does not hold; relaxed, it is the median all the same."""
        return self.condition("n > 2f", 2 * f + 1, n, f)

    def aggregate(self, rows: Tensor, f: int) -> Tensor:
        """Return the median of the rows `[n, d]`."""
        return coordinate_median(rows.unbind())


class TrimmedMean(Aggregator[AggregatorParams]):
    """Drops the f lowest and the f highest values of each coordinate, and averages the rest."""

    name = "trimmed-mean"
    goal = "withstand f rows, coordinate by coordinate, with less variance than the median"
    formula = "mean of x_(f+1)[k] .. x_(n-f)[k] for each k"
    source = SOURCE + ", definition 2 (beta = f / n)"

    def requires(self, n: int, f: int) -> str | None:
        """Return why n > 2f does not hold; relaxed, it is the median."""
        return self.condition("n > 2f", 2 * f + 1, n, f)

    def aggregate(self, rows: Tensor, f: int) -> Tensor:
        """Return the trimmed mean of the rows `[n, d]`."""
        n = len(rows)
        trimmed = min(f, (n - 1) // 2)
        return reduce_sorted(rows.unbind(), range(trimmed, n - trimmed), average)
