"""Two figures of a page: loss curves, and the grid of workers.

matplotlib is imported when a figure is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sentinel_bench.plots import plain
from sentinel_bench.report._numbers import number
from sentinel_bench.report._read import Partner, Run, steps_of
from sentinel_bench.report._workers import (
    FALSE_BAN,
    HONEST,
    STATES,
    Grid,
    starts_of,
)
from sentinel_bench.soundness import is_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_CELLS = 4096
"""Workers of the largest grid that is drawn."""
MARKS = 400
"""Marks of one kind in a panel."""
CLIMB = 0.5
"""What a training loss may lie above the first ones, in nats, to be shown: beyond is an arrow."""
WIDTH = 7.2  # inches
STRIP = 0.12
"""Share of the axis of losses that is kept for bans."""
LOOKS = (("#000000", "-", "o"), ("#d55e00", (0, (4, 1.5)), "s"), ("#0072b2", "-", "D"))
GREY = "#6b6b6b"


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """Return a figure of a size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


# Loss curves.


def losses(run: Run, others: Sequence[Partner], grid: Grid | None) -> Figure:
    """Draw training losses over steps, with warm-up, starts of attacks, bans, and the last loss."""
    figure = new_figure(3.7)
    axes = figure.subplots()
    warmup, steps = steps_of(run)
    curves = [_curve(p.run)[1] for p in others if p.run is not None]
    top = _top(curves)
    for i, partner in enumerate(others):
        if partner.run is not None:
            _loss(axes, partner.run, partner, LOOKS[-1 if partner.self else i], top)
    axes.axvspan(0, warmup, color="#f0f0ee", zorder=0, linewidth=0)
    if warmup:
        axes.text(warmup / 2, 0.985, "warm-up", transform=axes.get_xaxis_transform(), ha="center",
                  va="top", fontsize=8, color=GREY)  # fmt: skip
    starts = starts_of(run)
    for step in starts[:MARKS]:
        label = "attackers start" if step == starts[0] else None
        axes.axvline(step, color=GREY, linewidth=1, linestyle=":", zorder=1, label=label)
    axes.set_xlim(0, max(1, steps) * 1.02)
    axes.set_ylim(*_ends(curves, top))
    if grid is not None:
        _bans(axes, grid)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per token)")
    figure.legend(loc="outside upper left", ncols=2, fontsize=8)
    return figure


def _curve(run: Run) -> tuple[list[int], list[float]]:
    """Return steps and training losses, NaN where there is no finite one."""
    rows = run.of("step")
    found = [row.get("loss") for row in rows]
    return [row["step"] for row in rows], [
        float(x) if x is not None and is_number(x) and math.isfinite(x) else math.nan for x in found
    ]


def _top(curves: Sequence[Sequence[float]]) -> float | None:
    """Return the end of the axis, where a loss climbs far above where it began; None otherwise."""
    known = [[x for x in curve if math.isfinite(x)] for curve in curves]
    known = [curve for curve in known if curve]
    if not known:
        return None
    began = max(max(curve[:3]) for curve in known)
    highest = max(max(curve) for curve in known)
    return began + CLIMB if highest > began + CLIMB else None


def _ends(curves: Sequence[Sequence[float]], top: float | None) -> tuple[float, float]:
    """Return the ends of the axis of losses, with room below for bans."""
    known = [x for curve in curves for x in curve if math.isfinite(x)] or [0.0, 1.0]
    low, high = min(known), max(known) if top is None else top
    height = max(high - low, 1e-3)
    return low - STRIP * height, high + 0.04 * height


def _loss(
    axes: Axes, run: Run, partner: Partner, look: tuple[str, Any, str], top: float | None
) -> None:
    color, dashes, marker = look
    steps, values = _curve(run)
    end = run.validation_loss
    label = partner.role + ("" if end is None else f" (validation {number(end, '.3f')})")
    axes.plot(steps, values, color=color, linestyle=dashes, linewidth=1.5 if partner.self else 1,
              label=plain(label), zorder=3 if partner.self else 2)  # fmt: skip
    if end is not None and math.isfinite(end) and steps and (top is None or end < top):
        axes.plot([max(steps)], [end], marker, color=color, markerfacecolor="white", markersize=6,
                  zorder=4, clip_on=False)  # fmt: skip
    high = [] if top is None else [s for s, v in zip(steps, values, strict=True) if v > top]
    lost = [s for s, v in zip(steps, values, strict=True) if math.isnan(v)]
    for where, mark, words in ((high, "^", "above the axis"), (lost, "x", "not finite")):
        if where:
            thin = where[:: max(1, math.ceil(len(where) / MARKS))]
            axes.plot(thin, [0.97] * len(thin), mark, color=color, markersize=4, zorder=4,
                      transform=axes.get_xaxis_transform(),
                      label=plain(f"{words} since step {where[0]}"))  # fmt: skip


def _bans(axes: Axes, grid: Grid) -> None:
    """Draw a tick for each ban in a strip below the curves, of the honest above those of others."""
    kinds = (
        ("bans of attackers", [f for f in grid.fates.values() if f.attacker is not None]),
        ("bans of honest workers", [f for f in grid.fates.values() if f.state is FALSE_BAN]),
    )
    for (label, fates), color, y in zip(kinds, ("#0072b2", "#e69f00"), (0.03, 0.08), strict=True):
        at = [fate.banned for fate in fates if fate.banned is not None]
        if at:
            axes.plot(at, [y] * len(at), "|", color=color, markersize=8, markeredgewidth=1.6,
                      transform=axes.get_xaxis_transform(), label=label, zorder=4)  # fmt: skip


# The grid of workers.


def workers(grid: Grid) -> Figure:
    """Draw stages x replicas, coloured and lettered by state."""
    from matplotlib.patches import Rectangle

    side = min(0.46, 12 / grid.stages, 12 / grid.replicas)
    size = min(9.0, max(3.0, 25 * side))
    shown = [s for s in STATES if s is HONEST or grid.count(s)]
    width = max(WIDTH, grid.stages * side + 0.8)
    figure = new_figure(grid.replicas * side + 1.0 + 0.2 * math.ceil(len(shown) / 2), width)
    axes = figure.subplots()
    for stage in range(grid.stages):
        for replica in range(grid.replicas):
            fate = grid.of((stage, replica))
            state = fate.state
            dashed = state.key == "idle"
            axes.add_patch(
                Rectangle(
                    (stage - 0.46, replica - 0.46), 0.92, 0.92, facecolor=state.color,
                    edgecolor="#333333" if state is not HONEST else "#bbbbbb",
                    linewidth=1.2 if fate.notable else 0.6,
                    linestyle=(0, (2, 1.5)) if dashed else "-",
                )
            )  # fmt: skip
            text = state.letter if fate.delay is None else f"{state.letter}{fate.delay}"
            axes.text(stage, replica, text, ha="center", va="center", fontsize=size,
                      color=state.ink, fontweight="bold")  # fmt: skip
    axes.set_xlim(-0.6, grid.stages - 0.4)
    axes.set_ylim(grid.replicas - 0.4, -0.6)
    axes.set_aspect("equal")
    for axis, n in ((axes.xaxis, grid.stages), (axes.yaxis, grid.replicas)):
        axis.set_ticks(range(0, n, max(1, math.ceil(n / 16))))
        axis.set_tick_params(length=0)
    axes.set_xlabel("stage")
    axes.set_ylabel("replica")
    axes.spines[:].set_visible(False)
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=s.color, edgecolor="#333333", linewidth=0.8,
                  linestyle=(0, (2, 1.5)) if s.key == "idle" else "-")
        for s in shown
    ]  # fmt: skip
    labels = [f"{s.letter or 'blank'}: {s.words} ({grid.count(s)})" for s in shown]
    figure.legend(handles, labels, loc="outside upper left", ncols=2, fontsize=8)
    return figure
