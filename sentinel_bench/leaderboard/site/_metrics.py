"""The numbers of a row in words, and how bad they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sentinel_bench.leaderboard._markdown import BUSY
from sentinel_bench.report._numbers import number
from sentinel_bench.score import RECALL_FLOOR

Row = Mapping[str, Any]
DASH = "–"  # noqa: RUF001
WORST = 1e9
"""How a model that diverged is sorted: its damage has no number."""


@dataclass(frozen=True)
class Metric:
    """A number of a row.

    Attributes:
        key: in the summary.
        title: in the head of a column.
        style: format of its mean.
        bounds: five values, from good to bad, at which a colour ends; none: not in the matrix.
        unit: of the bounds, in words.
    """

    key: str
    title: str
    style: str
    bounds: tuple[float, ...] = ()
    unit: str = ""

    @property
    def falling(self) -> bool:
        """True if lower is worse."""
        return bool(self.bounds) and self.bounds[0] > self.bounds[-1]


METRICS = (
    Metric("f1", "F1", "z.1f", (99.0, 95.0, 80.0, 50.0, 20.0), "percent"),
    Metric("excess_loss", "excess loss", "+z.3f", (0.01, 0.05, 0.2, 0.5, 1.0), "nats"),
    Metric("undetected_damage", "undetected damage", "+z.3f", (0.01, 0.05, 0.2, 0.5, 1.0), "nats"),
    Metric("false_bans", "false bans", "z.1f", (0.0, 1.0, 2.0, 4.0, 8.0), "workers"),
    Metric(
        "detection_steps_mean", "detection steps", "z.1f", (2.0, 5.0, 10.0, 20.0, 50.0), "steps"
    ),
    Metric("capacity", "capacity", "z.2f", (0.99, 0.9, 0.8, 0.65, 0.5), "share"),
    Metric("relative_tps", "relative TPS", "z.2f", (0.95, 0.85, 0.7, 0.5, 0.25), "share"),
)
"""Those of the matrix."""
COLUMNS = (
    *METRICS,
    Metric("recall", "recall", "z.1f"),
    Metric("precision", "precision", "z.1f"),
    Metric("harm_weighted_recall", "harm-weighted recall", "z.1f"),
    Metric("validation_loss", "validation loss", "z.3f"),
)
"""Those of the tables."""
BACKDOOR = (
    Metric("attack_success_rate", "attack success", "z.1f"),
    Metric("attack_success_base", "success before", "z.1f"),
)


@dataclass(frozen=True)
class Cell:
    """A number in a table: its text, with spread, what it is sorted by, and how bad it is (0-5)."""

    text: str
    spread: str
    value: float | None
    level: int | None = None


def cell(row: Row, metric: Metric) -> Cell:
    """Return one number of a row."""
    found = row["metrics"][metric.key]
    mean, lost = found["mean"], row["diverged"] if _is_damage(row, metric) else 0
    if mean is None:
        if not row["n"]:
            return Cell("invalid", "invalid", None)
        return Cell("diverged", "diverged", WORST, 5) if lost else Cell(DASH, DASH, None)
    if metric.key == "relative_tps" and speed(found) == "busy":
        return Cell("busy", "busy", None)
    text = number(mean, metric.style)
    more = f" ({lost} diverged)" if lost else ""
    return Cell(
        text + more, interval(found, metric.style, row["n"]) + more, mean,
        5 if lost else level(mean, metric),
    )  # fmt: skip


def speed(found: Row | None) -> str:
    """Return a relative speed; "busy" where it is not known well enough to say anything."""
    if found and (found.get("half") or 0) > BUSY:
        return "busy"
    return interval(found, "z.2f")


def interval(found: Row | None, style: str, expected: int = 0) -> str:
    """Return mean, half width of the interval, and the number of seeds if some are missing."""
    if not found or found.get("mean") is None:
        return DASH
    text = number(found["mean"], style)
    if found.get("half") is not None:
        text += f" ± {number(found['half'], style.lstrip('+'))}"
    return f"{text} (n={found['n']})" if 0 < found["n"] < expected else text


def level(value: float, metric: Metric) -> int | None:
    """Return how many bounds a value is beyond; None for a number that has none."""
    if not metric.bounds:
        return None
    if metric.falling:
        return sum(value < bound for bound in metric.bounds)
    return sum(value > bound for bound in metric.bounds)


def legend(metric: Metric) -> list[str]:
    """Return what each colour means, from good to bad."""
    at = [f"{bound:g}" for bound in metric.bounds]
    sign, beyond = ("≥", "<") if metric.falling else ("≤", ">")
    return [*(f"{sign} {bound}" for bound in at), f"{beyond} {at[-1]}"]


def _is_damage(row: Row, metric: Metric) -> bool:
    if metric.key == "undetected_damage":
        recall = row["metrics"]["recall"]["mean"]
        return recall is not None and recall < RECALL_FLOOR
    return metric.key == "excess_loss"
