"""Mean and 95 % t-interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict

# Student's t for 1 to 30 degrees of freedom: the textbook two-sided 95 % values.
T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
DUST = 1e-9
"""Differences below it are those of rounding."""


class Interval(TypedDict):
    """Mean, half width of the interval (None below two values), and number of values."""

    mean: float | None
    half: float | None
    n: int


def interval(values: Sequence[float]) -> Interval:
    """Return mean, half width of the 95 % t-interval (None below two values) and number.

    Beyond 31 values the quantile of 30 degrees of freedom is used, which is slightly too wide.
    """
    n = len(values)
    if n == 0:
        return {"mean": None, "half": None, "n": 0}
    mean = math.fsum(values) / n
    if n == 1:
        return {"mean": mean, "half": None, "n": 1}
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return {"mean": mean, "half": T_95[min(n - 1, 30) - 1] * deviation / math.sqrt(n), "n": n}


def decided(found: Interval) -> int:
    """Return the sign of a mean whose interval does not hold 0; else, and below two values, 0."""
    mean, half = found["mean"], found["half"]
    if mean is None or half is None or abs(mean) <= half + DUST:
        return 0
    return 1 if mean > 0 else -1
