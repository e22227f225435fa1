"""When a published number and ours agree: the one place where this is defined.

Absolute losses of two models say little about each other, so two things are compared.

Signs, for each row. Each is yes, no, or not known, for the published numbers and for ours:

* harm: the attack alone does harm. Published: the loss without defense exceeds that of plain
  training by more than `spread`, the standard deviation of the loss over seeds that the paper
  prints. Ours: the interval of the excess loss lies above the spread of plain training, half the
  width of the interval of its loss (yes), or not above it (no).
* helped: the protected loss is nearer to that of plain training than the unprotected one.
  Published: by more than `spread` (yes), further by more than it (no). Ours: the interval of the
  difference of the two distances, paired by seed, lies above zero, or below.
* detected: recall is at least 50 %. Ours: the interval of the recall lies there, or below.
* precise: at least 50 % of the banned are attackers; not known where the paper finds nobody. Ours:
  the interval of the precision lies there, or below.
* quiet, in rows without attack alone: nobody is banned, so precision is 100 %. Ours: in all seeds,
  or not in all.

A sign agrees if both are the same and differs if they are not. It cannot be said (`unclear`) if
ours is not known: the interval covers both, or there are fewer than two seeds. It is not judged if
the paper says nothing: it prints no number, or two that lie within its spread. A row differs if one
of its signs does, else is unclear if one is, else agrees.

Order, for the whole table: Kendall's tau-b, which allows for ties, between published numbers and
our means over the rows with an attack that have both: of the excess loss without defense, of F1 and
of throughput. It agrees if tau is above zero and differs if it is below, each at p < 0.05; else it
is unclear, as for fewer than 3 rows or where one side has but one value.

Intervals are 95 % t-intervals over seeds. A loss that is not finite counts as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sentinel_bench.leaderboard import interval
from sentinel_bench.reproduce.published import Row
from sentinel_bench.score import RECALL_FLOOR

Verdict = Literal["agrees", "differs", "unclear"]
Signs = dict[str, bool | None]
"""Name of a sign to yes, no, or not known."""
VERDICTS: tuple[Verdict, ...] = ("agrees", "differs", "unclear")
SIGNS = ("harm", "helped", "detected", "precise", "quiet")
ORDERS = ("excess_unprotected", "f1", "tps")
PRECISION_FLOOR = 50.0
SIGNIFICANT = 0.05
LEAST_ROWS = 3


@dataclass(frozen=True)
class Own:
    """What we measured for a row; each list holds the seeds for which there is a number.

    Attributes:
        precision, recall: percent, under the defense.
        excess: loss under the attack alone, less that of plain training; may be infinite.
        gain: how much nearer the defense brings the loss to that of plain training; may be
            infinite.
        plain: loss of plain training.
    """

    precision: Sequence[float] = ()
    recall: Sequence[float] = ()
    excess: Sequence[float] = ()
    gain: Sequence[float] = ()
    plain: Sequence[float] = ()


def published_signs(row: Row, spread: float) -> Signs:
    """Return the signs of the published numbers; `spread` in nats per token."""
    if row.attack is not None and row.attack.name == "none":
        precision = row.numbers.precision
        return {"quiet": None if precision is None else precision == 100}
    signs: Signs = dict.fromkeys(SIGNS[:4])
    if row.baseline is not None and row.unprotected is not None:
        excess = row.unprotected - row.baseline
        signs["harm"] = excess > spread
        if row.protected is not None:
            gain = abs(excess) - abs(row.protected - row.baseline)
            signs["helped"] = None if abs(gain) <= spread + 1e-9 else gain > 0
    if row.numbers.recall is not None:
        signs["detected"] = row.numbers.recall >= RECALL_FLOOR
    if row.numbers.precision is not None and row.numbers.recall:
        signs["precise"] = row.numbers.precision >= PRECISION_FLOOR
    return signs


def own_signs(own: Own) -> Signs:
    """Return the signs of our numbers."""
    plain = bounds(own.plain)
    floor = None if plain is None else (plain[1] - plain[0]) / 2
    quiet = all(value == 100 for value in own.precision) if len(own.precision) > 1 else None
    return {
        "harm": _above(own.excess, floor, at_floor=False),
        "helped": _above(own.gain, 0.0, at_floor=None),
        "detected": _above(own.recall, RECALL_FLOOR, at_floor=True),
        "precise": _above(own.precision, PRECISION_FLOOR, at_floor=True),
        "quiet": quiet,
    }


def bounds(values: Sequence[float]) -> tuple[float, float] | None:
    """Return both ends of the 95 % t-interval, None below two values.

    With infinite values it reaches from the smallest value to infinity.
    """
    if len(values) < 2:
        return None
    if not all(map(math.isfinite, values)):
        return min(values), math.inf
    found = interval(values)
    mean, half = found["mean"] or 0.0, found["half"] or 0.0
    return mean - half, mean + half


def judge(published: Mapping[str, bool | None], own: Mapping[str, bool | None]) -> dict[str, Any]:
    """Return the verdict on each sign, None where the paper says nothing, in the order of SIGNS."""
    return {
        name: _same(published[name], own[name]) if published[name] is not None else None
        for name in SIGNS
        if name in published
    }


def whole(verdicts: Iterable[Verdict | None]) -> Verdict | None:
    """Return the verdict on a row with these signs; None if none is judged."""
    found = set(verdicts)
    order: tuple[Verdict, ...] = ("differs", "unclear", "agrees")
    return next((verdict for verdict in order if verdict in found), None)


def order(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return Kendall's tau of published and own numbers: tau, p, rows, verdict.

    tau and p are None where they are not defined.
    """
    tau = p = None
    sides = list(zip(*pairs, strict=True))
    if len(pairs) >= LEAST_ROWS and all(len(set(side)) > 1 for side in sides):
        from scipy.stats import kendalltau

        found = kendalltau(*sides, variant="b")
        tau, p = float(found.statistic), float(found.pvalue)
    verdict: Verdict = "unclear"
    if tau is not None and p is not None and p < SIGNIFICANT:
        verdict = "agrees" if tau > 0 else "differs"
    return {"tau": tau, "p": p, "rows": len(pairs), "verdict": verdict}


def _same(published: bool | None, own: bool | None) -> Verdict:
    if own is None:
        return "unclear"
    return "agrees" if published == own else "differs"


def _above(values: Sequence[float], floor: float | None, *, at_floor: bool | None) -> bool | None:
    """Tell whether an interval lies above a floor; None if it covers both sides, or is not known.

    `at_floor` says what an interval is that only touches the floor.
    """
    ends = bounds(values)
    if ends is None or floor is None:
        return None
    low, high = ends
    if low > floor or (low == floor and at_floor is True):
        return True
    if high < floor or (high == floor and at_floor is False):
        return False
    return None
