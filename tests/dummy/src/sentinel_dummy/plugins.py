"""One plugin of each kind, and one that says odd things of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sentinel_bench.api import (
    Aggregator,
    AggregatorParams,
    Attack,
    AttackContext,
    Defense,
    NoParams,
    ResponseParams,
    Signals,
    Verdict,
)
from sentinel_dummy.helper import FACTOR

if TYPE_CHECKING:
    from torch import Tensor


class Halve(Attack[NoParams]):
    """Sends half of the signal."""

    name = "halve"
    goal = formula = source = "test"

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        return x * FACTOR


class Odd(Attack[NoParams]):
    """Does not know what knowledge is."""

    name = "odd"
    goal = formula = source = "test"
    knowledge = None  # type: ignore[assignment]


class Still(Defense[ResponseParams]):
    """Flags nobody."""

    name = "still"
    goal = formula = source = "test"

    def check(self, signals: Signals) -> Verdict:
        nobody = signals.active.new_zeros(signals.active.shape)
        return Verdict(nobody, nobody)


class First(Aggregator[AggregatorParams]):
    """Takes the first row, which is wrong."""

    name = "first"
    goal = formula = source = "test"

    def aggregate(self, rows: Tensor, f: int) -> Tensor:
        return rows[0].clone()
