"""The charts of one row: losses, bans and flags over steps, and workers that tell something."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from sentinel_bench.leaderboard.site._board import Seeded
from sentinel_bench.leaderboard.site._charts import (
    BOTTOM,
    COLORS,
    DASHES,
    TOP,
    Frame,
    Line,
    Range,
    lines,
    step_ticks,
    ticks,
)
from sentinel_bench.leaderboard.site._curves import Curves, Reading, Worker

BLUE, ORANGE, GREY = COLORS[0], COLORS[1], "#6b6b6b"
BASE, FREE, OWN = (GREY, "2 2"), (ORANGE, "6 3"), (BLUE, "")
"""Colour and dashes of the runs without attack and defense, without defense, and of the row."""
REACH = 3.0
"""Heights of a fence that a chart shows above and below it."""
AROUND = 8.0
"""Steps before the first flag, and after the last."""
ROLES = {
    "detected": "the attacker that was banned first",
    "false-ban": "the honest worker that was banned first",
    "missed": "an attacker that was never banned",
}


@dataclass(frozen=True)
class Chart:
    """A picture and what is under it."""

    title: str
    svg: Markup


def found(cells: Sequence[Seeded]) -> list[Curves]:
    """Return the curves that there are."""
    return [cell.curves for cell in cells if cell.curves is not None]


def losses(groups: Sequence[tuple[Sequence[Curves], tuple[str, str]]]) -> Chart | None:
    """Draw training losses, a line for each cell, from the end of the warm-up on.

    What is far above the first of them is at the upper edge.

    Args:
        groups: cells that have one look; the first is what the others are held against.
    """
    every = [curves for cells, _ in groups for curves in cells]
    if not every:
        return None
    warmup, steps = min(c.warmup for c in every), max(c.steps for c in every)
    x = (0.8 * warmup, float(steps))
    drawn = [Line(_loss(curves, x[0]), *look) for cells, look in groups for curves in cells]
    known = [[y for _, y in line.points if y is not None] for line in drawn]
    if not any(known):
        return None
    first = next(values for values in known if values)
    high = max(first) + max(0.5, max(first) - min(first))
    y = (min(map(min, filter(None, known))), min(high, max(map(max, filter(None, known)))))
    return Chart("Training loss, nats per token", lines("Training loss over steps", drawn, x, y,
                 _starts(every)))  # fmt: skip


def _loss(curves: Curves, first: float) -> list[tuple[float, float | None]]:
    every = curves.loss.every
    points = [((i + 0.5) * every, value) for i, value in enumerate(curves.loss.values)]
    return [(step, value) for step, value in points if step >= first]


def _starts(every: Iterable[Curves]) -> list[int]:
    return sorted({start for c in every for _, _, start, _ in c.attackers if start is not None})[
        :12
    ]


def bans(cells: Sequence[Curves]) -> Chart | None:
    """Draw how many attackers and how many honest workers were banned, up to each step."""
    if not any(curves.bans or curves.attackers for curves in cells):
        return None
    x = (0.8 * min(c.warmup for c in cells), float(max(c.steps for c in cells)))
    drawn = []
    for attacked, color, dash in ((True, *OWN), (False, *FREE)):
        for curves in cells:
            steps = [step for step, _, _, truth in curves.bans if truth is attacked]
            points = [(x[0], 0.0), *((s, float(n)) for n, s in enumerate(steps, start=1))]
            drawn.append(Line([*points, (curves.steps, float(len(steps)))], color, dash, True))
    acted = max(sum(a is not None for *_, a in curves.attackers) for curves in cells)
    drawn.append(Line([(x[0], float(acted)), (x[1], float(acted))], *BASE))
    y = (0.0, max([1.0, *(count or 0.0 for line in drawn for _, count in line.points)]))
    return Chart("Workers banned", lines("Bans over steps", drawn, x, y, _starts(cells)))


def flags(cells: Sequence[Curves]) -> Chart | None:
    """Draw the share of the signals that were flagged, of attackers and of honest workers."""
    drawn = []
    for kind, color, dash in (("tampered", *OWN), ("honest", *FREE)):
        for curves in cells:
            pairs = getattr(curves.signals, kind)
            every, start = curves.signals.every, curves.signals.start
            points = [
                (start + (i + 0.5) * every, 100 * min(1.0, flagged / checked) if checked else None)
                for i, (checked, flagged) in enumerate(pairs)
            ]
            drawn.append(Line(points, color, dash))
    if not any(y is not None for line in drawn for _, y in line.points):
        return None
    x = (0.8 * min(c.warmup for c in cells), float(max(c.steps for c in cells)))
    title = "Signals flagged, percent"
    return Chart(title, lines("Share of signals flagged over steps", drawn, x, (0.0, 100.0)))


def workers(curves: Curves) -> list[Chart]:
    """Draw statistics and fences of the telling workers of one cell."""
    drawn = []
    for worker in curves.workers:
        for statistic in worker.statistics:
            svg = _fence(curves, worker, statistic.flags, statistic.trace)
            if svg is not None:
                role = ROLES.get(worker.role, worker.role)
                where = f"{role}: stage {worker.stage}, replica {worker.replica}"
                what = f"{statistic.name} ({worker.direction})"
                attack = f", {worker.attack}" if worker.attack else ""
                drawn.append(Chart(f"{what} of {where}{attack}", svg))
    return drawn


def _fence(
    curves: Curves, worker: Worker, marks: Sequence[Reading], trace: Sequence[Reading]
) -> Markup | None:
    y = _window([*marks, *trace])
    if y is None:
        return None
    frame = Frame(_steps(curves, worker, marks, trace), y)
    frame.axes(step_ticks(frame.x_range), ticks(*frame.y_range, 4))
    for step, _, low, high in [] if trace else marks:
        if low is not None or high is not None:
            ends = _end(frame, low, 0), _end(frame, high, 1)
            frame.path(f"M{frame.x(step):.1f} {ends[0]:.1f}V{ends[1]:.1f}", "v-bar")
    for one, two in pairwise(trace):
        if one[2:] != (None, None):
            ends = _end(frame, one[2], 0), _end(frame, one[3], 1)
            at, to = frame.x(one[0]), frame.x(two[0])
            frame.path(f"M{at:.1f} {ends[0]:.1f}H{to:.1f}V{ends[1]:.1f}H{at:.1f}z", "v-fence")
    frame.line(Line([(step, value) for step, value, _, _ in trace], "#222"))
    for step, value, low, high in marks:
        out = value is None or (low is not None and value <= low) or (
            high is not None and value >= high)  # fmt: skip
        shown = y[1] if value is None else value
        place = f"{frame.x(step) - 3:.1f} {frame.y(shown):.1f}"
        frame.path(f"M{place}a3 3 0 1 0 6 0a3 3 0 1 0-6 0z", "v-out" if out else "v-in")
    if worker.acted is not None:
        frame.upright(worker.acted - 0.5, "v-act")
    if worker.banned is not None:
        frame.upright(worker.banned + 0.5, "v-ban")
    frame.text((frame.left + frame.width) / 2, frame.height - 3, "step")
    return frame.svg(f"Statistic and fence of stage {worker.stage}, replica {worker.replica}")


def _steps(
    curves: Curves, worker: Worker, marks: Sequence[Reading], trace: Sequence[Reading]
) -> Range:
    """Return all steps after the warm-up, or without a trace what is around the flags."""
    if trace:
        return 0.8 * curves.warmup, float(curves.steps)
    known = [row[0] for row in marks]
    known += [step for step in (worker.acted, worker.banned) if step is not None]
    return min(known) - AROUND, max(known) + AROUND


def _window(rows: Sequence[Reading]) -> Range | None:
    """Return what is shown: the fences, and values that are not too far from them."""
    values = [row[1] for row in rows if row[1] is not None]
    fences = [bound for row in rows for bound in row[2:] if bound is not None]
    if not values and not fences:
        return None
    low, high = min([*values, *fences]), max([*values, *fences])
    if fences:
        reach = REACH * max(max(fences) - min(fences), 1e-12)
        low, high = max(low, min(fences) - reach), min(high, max(fences) + reach)
    room = 0.05 * (high - low)
    return (low - room, high + room) if math.isfinite(room) else None


def _end(frame: Frame, bound: float | None, side: int) -> float:
    """Return the place of one end of a fence: that of the plot where it is open."""
    if bound is None:
        return float(TOP if side else frame.height - BOTTOM)
    return frame.y(bound)


def by_defense(number: int) -> tuple[str, str]:
    """Return colour and dashes of a defense on the page of an attack."""
    return COLORS[number % len(COLORS)], DASHES[number % len(DASHES)]
