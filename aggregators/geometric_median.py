"""The geometric median, by smoothed Weiszfeld steps (Pillutla et al., arXiv 1912.13445)."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from pydantic import Field

from sentinel_bench.aggregators.geometry import combine, gram
from sentinel_bench.aggregators.order import coordinate_median
from sentinel_bench.api import Aggregator, AggregatorParams

if TYPE_CHECKING:
    from torch import Tensor


class GeometricMedianParams(AggregatorParams):
    """Parameters of `geometric-median`."""

    nu: float = Field(
        1e-6, gt=0, lt=1, description="least distance, in median distances from the median"
    )
    iterations: int = Field(100, ge=1, description="Weiszfeld steps at most")
    tolerance: float = Field(
        1e-6, ge=0, description="a shorter step is the last, in median distances from the median"
    )


class GeometricMedian(Aggregator[GeometricMedianParams]):
    """Takes the point with the least sum of distances to all rows."""

    name = "geometric-median"
    goal = "withstand fewer than half of the rows, however far away, as whole vectors"
    formula = "z <- sum_i w_i x_i / sum_i w_i, w_i = 1 / max(nu, ||x_i - z||)"
    source = "Pillutla et al. 2019, arXiv 1912.13445, algorithm 2 (RFA)"
    Params = GeometricMedianParams

    def requires(self, n: int, f: int) -> str | None:
        """Return why n > 2f does not hold; relaxed, nothing changes."""
        return self.condition("n > 2f", 2 * f + 1, n, f)

    def aggregate(self, rows: Tensor, f: int) -> Tensor:
        """Return the geometric median of the rows `[n, d]`.

        The start is near the median of each coordinate, which no row, however far away, can move
        much: the mean of the rows, each weighed by 1 / max(median distance, distance) from there.
        The median itself may be one of the rows, where Weiszfeld's steps get stuck. Each z is a
        weighted sum of the rows, so the steps need no more than the inner products of the rows
        around the median, and change only the weights.
        """
        middle = coordinate_median(rows.unbind())
        products = gram(rows, middle)
        norms = products.diagonal()
        lengths = norms.sqrt().tolist()
        if not any(lengths):
            return middle
        typical = median(lengths) or min(x for x in lengths if x)
        weights = _weights(norms, typical)
        for _ in range(self.params.iterations):
            across = products @ weights
            squared = norms - 2 * across + weights @ across
            step = _weights(squared, self.params.nu * typical) - weights
            weights = weights + step
            if float(step @ products @ step) <= (self.params.tolerance * typical) ** 2:
                break
        return combine(weights.tolist(), rows)


def _weights(squared: Tensor, least: float) -> Tensor:
    """Return the inverses of distances, of which none is below `least`; their sum is 1."""
    inverse = 1 / squared.clamp(min=least**2).sqrt()
    return inverse / inverse.sum()
