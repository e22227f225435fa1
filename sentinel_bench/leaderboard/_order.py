"""Order and ties of what was measured with the same seeds.

*A beats B* if the first criterion in which they differ is better. They differ in one if the 95 %
t-interval of the differences, paired by seed, does not hold 0, or if one alone has a run without a
number. One seed shows no difference.

This relation is not transitive. So order and ties are defined like this:

* order: of those left, the one with the best means among those that no other one left beats comes
  next (among all left, if each is beaten);
* ties: the first has rank 1. The next one shares the rank of the first of its group, unless that
  one beats it: then it opens a group of its own, and its rank is its place.

Whoever shares a rank has not been shown to be worse than the first that has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sentinel_bench.leaderboard._interval import decided, interval


@dataclass(frozen=True, eq=False)
class Contender:
    """What is placed.

    Attributes:
        entry: what is shown of it.
        name: decides where means are equal.
        criteria: the most important one first; each a number for each seed, the higher the better,
            inf or -inf where a run has none; empty if it is not known.
    """

    entry: dict[str, Any]
    name: tuple[str, ...]
    criteria: Sequence[Sequence[float]]

    @property
    def key(self) -> tuple[Any, ...]:
        """The means, so that the best comes first, then the name."""
        return *(-fmean(values) if values else math.inf for values in self.criteria), *self.name

    def beats(self, other: Contender) -> bool:
        """Tell whether the first criterion in which the two differ is better."""
        signs = (_compare(*pair) for pair in zip(self.criteria, other.criteria, strict=True))
        return next((sign > 0 for sign in signs if sign), False)


def place(contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    """Return the entries in order, each with `rank` and `tie`, as the module says."""
    order = _ordered(contenders)
    ranks: list[int] = []
    leader = None
    for number, one in enumerate(order, start=1):
        if leader is None or leader.beats(one):
            leader, rank = one, number
        ranks.append(rank)
    return [
        {"rank": rank, "tie": ranks.count(rank) > 1, **one.entry}
        for rank, one in zip(ranks, order, strict=True)
    ]


def _ordered(contenders: Sequence[Contender]) -> list[Contender]:
    left, order = sorted(contenders, key=lambda one: one.key), []
    beaten_by = {one: {other for other in left if other.beats(one)} for one in left}
    while left:
        first = next((one for one in left if beaten_by[one].isdisjoint(left)), left[0])
        order.append(first)
        left.remove(first)
    return order


def _compare(ours: Sequence[float], theirs: Sequence[float]) -> int:
    """Return 1 if the first numbers are better, -1 if they are worse, 0 if neither is shown."""
    if len(ours) != len(theirs) or len(ours) < 2:
        return 0
    ends = [next(filter(math.isinf, values), 0.0) for values in (ours, theirs)]
    if any(ends):
        return (ends[0] > ends[1]) - (ends[0] < ends[1])
    return decided(interval([a - b for a, b in zip(ours, theirs, strict=True)]))
