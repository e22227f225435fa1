"""Centered clipping (Karimireddy et al., arXiv 2012.10333)."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from pydantic import Field

from sentinel_bench.aggregators.geometry import combine, gram
from sentinel_bench.aggregators.order import coordinate_median
from sentinel_bench.api import Aggregator, AggregatorParams

if TYPE_CHECKING:
    from torch import Tensor


class CenteredClippingParams(AggregatorParams):
    """Parameters of `centered-clipping`."""

    tau: float | None = Field(
        None, gt=0, description="radius; default: the median distance of a row from the start"
    )
    iterations: int = Field(3, ge=1, description="times that the centre moves")


class CenteredClipping(Aggregator[CenteredClippingParams]):
    """Moves a centre by the mean of all rows, each clipped to a radius around it."""

    name = "centered-clipping"
    goal = "bound how far any one row can pull, and still listen to all"
    formula = "v <- v + mean_i (x_i - v) min(1, tau / ||x_i - v||), from the median"
    source = (
        "Karimireddy et al. 2021, arXiv 2012.10333, algorithm 2 (there from the last aggregate)"
    )
    Params = CenteredClippingParams

    def requires(self, n: int, f: int) -> str | None:
        """Return why n > 2f does not hold; relaxed, nothing changes."""
        return self.condition("n > 2f", 2 * f + 1, n, f)

    def aggregate(self, rows: Tensor, f: int) -> Tensor:
        """Return the centre of the rows `[n, d]`.

        Nothing is kept from step to step: the start is the median of each coordinate. Each v is
        the start and a weighted sum of the rows around it, so that the inner products are enough.
        """
        n = len(rows)
        start = coordinate_median(rows.unbind())
        products = gram(rows, start)
        norms = products.diagonal()
        tau = self.params.tau or median(norms.sqrt().tolist())
        weights = norms.new_zeros(n)
        for _ in range(self.params.iterations):
            across = products @ weights
            distances = (norms - 2 * across + weights @ across).clamp(min=0).sqrt()
            kept = (tau / distances.clamp(min=tau)).nan_to_num(1.0)  # 0 / 0: it is the centre
            weights = weights + (kept - kept.sum() * weights) / n
        return start * (1 - float(weights.sum())) + combine(weights.tolist(), rows)
