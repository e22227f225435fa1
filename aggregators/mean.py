"""The mean: what an all-reduce does without any protection. The baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sentinel_bench.aggregators.geometry import combine
from sentinel_bench.api import Aggregator, AggregatorParams

if TYPE_CHECKING:
    from torch import Tensor


class Mean(Aggregator[AggregatorParams]):
    """Averages all rows; one faulty row can move it anywhere."""

    name = "mean"
    goal = "nothing: shows what an attack costs when every row counts"
    formula = "sum_i x_i / n"
    source = "baseline"
    spreads = True

    def aggregate(self, rows: Tensor, f: int) -> Tensor:
        """Return the mean of the rows `[n, d]`."""
        return combine([1 / len(rows)] * len(rows), rows)
