"""Krum: the rows closest to their neighbours (Blanchard et al., NeurIPS 2017)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from sentinel_bench.aggregators.geometry import combine, squared_distances
from sentinel_bench.api import Aggregator, AggregatorParams

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = "Blanchard et al. 2017, arXiv 1703.02757"


def ranking(squared: Tensor, f: int) -> list[int]:
    """Return the rows from the lowest score to the highest, the first one first where they tie.

    The score of a row is the sum of the squared distances to the `n - f - 2` rows that are nearest
    to it, itself left out; at least to one, where there is one.

    Args:
        squared: `[n, n]` squared distances.
        f: number of faulty rows.
    """
    n = len(squared)
    neighbours = max(1, n - f - 2)
    others = squared.clone().fill_diagonal_(math.inf)
    scores = others.sort(1).values[:, : min(neighbours, n - 1)].sum(1).tolist()
    return sorted(range(n), key=scores.__getitem__)


class Krum(Aggregator[AggregatorParams]):
    """Takes the one row that lies closest to its neighbours."""

    name = "krum"
    goal = "withstand f rows that lie apart from the others, as whole vectors"
    formula = "x_i with the least sum of ||x_i - x_j||^2 over its n - f - 2 nearest j != i"
    source = SOURCE

    def requires(self, n: int, f: int) -> str | None:
        """Return why n >= 2f+3 does not hold; relaxed, the nearest one neighbour is enough."""
        return self.condition("n >= 2f+3", 2 * f + 3, n, f)

    def aggregate(self, rows: Tensor, f: int) -> Tensor:
        """Return the best of the rows `[n, d]`."""
        return rows[ranking(squared_distances(rows), f)[0]].clone()


class MultiKrumParams(AggregatorParams):
    """Parameters of `multi-krum`."""

    m: int | None = Field(None, ge=1, description="rows that are averaged; default: n - f")


class MultiKrum(Aggregator[MultiKrumParams]):
    """Averages the m rows that Krum likes best."""

    name = "multi-krum"
    goal = "withstand f rows that lie apart, with less variance than Krum"
    formula = "mean of the m rows with the lowest Krum scores"
    source = SOURCE + ", section 5"
    Params = MultiKrumParams

    def requires(self, n: int, f: int) -> str | None:
        """Return why n >= 2f+3 or m <= n-f does not hold; relaxed, at most n rows are averaged."""
        m = self.params.m
        if m is not None and m > n - f:
            return f"{self.name} needs m <= n-f: at most {n - f} of {n} rows for f = {f}, not {m}"
        return self.condition("n >= 2f+3", 2 * f + 3, n, f)

    def aggregate(self, rows: Tensor, f: int) -> Tensor:
        """Return the mean of the best of the rows `[n, d]`."""
        n = len(rows)
        m = min(self.params.m or max(1, n - f), n)
        best = ranking(squared_distances(rows), f)[:m]
        return combine([1 / m if i in best else 0.0 for i in range(n)], rows)
