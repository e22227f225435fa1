"""The figure of statistics and fences over time, a panel for each of some workers.

matplotlib is imported when it is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sentinel_bench.plots import plain
from sentinel_bench.report._figures import GREY, MARKS, new_figure
from sentinel_bench.report._statistics import Line, Statistics, is_outside
from sentinel_bench.report._workers import Fate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = 16
"""Workers whose statistics are drawn."""
GAP = 2
"""Steps between two values that are joined by a line."""
REACH = 5.0
"""Heights of a fence that a panel shows above and below it: what is beyond is an arrow."""
Said = tuple[float, float, float]
FENCE, FLAG, BAN = "#9ecae1", "#d55e00", "#0072b2"


def statistics(
    found: Statistics, panels: Sequence[tuple[Fate, tuple[str, str]]], steps: tuple[int, int]
) -> Figure:
    """Draw statistics and fences over time.

    Args:
        found: all that is known.
        panels: workers, each with a direction and a statistic; at least one.
        steps: the first that is shown, and the number of all.
    """
    rows = math.ceil(len(panels) / 2)
    figure = new_figure(1.5 * rows + 0.9)
    grid = figure.subplots(rows, 2, squeeze=False, sharex=True)
    for axes, (fate, (direction, name)) in zip(grid.flat, panels, strict=False):
        _panel(axes, found, fate, direction, name)
        axes.set_xlim(steps[0] - 1, max(steps[1], steps[0] + 1))
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes in grid[-1]:
        axes.set_xlabel("step")
    if len(panels) % 2 and rows > 1:
        grid[-2, 1].tick_params(labelbottom=True)
        grid[-2, 1].set_xlabel("step")
    figure.legend(*_legend(traced=found.traced), loc="outside upper left", ncols=4, fontsize=8)
    return figure


def _panel(axes: Axes, found: Statistics, fate: Fate, direction: str, name: str) -> None:
    title = f"{fate.name}, {'attacker' if fate.attacker else 'honest'}: {name} ({direction})"
    axes.set_title(plain(title), fontsize=8, loc="left")
    axes.tick_params(labelsize=7)
    line = found.lines.get((direction, name, fate.worker), Line())
    low, high = found.fences.get((direction, name, fate.worker[0]), (Line(), Line()))
    flags = found.flags.get((fate.worker, direction), [])
    marks = [(flag.step, flag.said[name]) for flag in flags if name in flag.said]
    marks = marks[:: max(1, math.ceil(len(marks) / MARKS))]
    ends = [*low.values, *high.values, *(x for _, said in marks for x in said[1:])]
    window = _window(ends, [*line.values, *(said[0] for _, said in marks)])
    if window is not None:
        axes.set_ylim(*window)
        if found.traced:
            _band(axes, low, high, window)
        else:
            _bars(axes, marks, window)
    dot = "." if len(line.steps) <= MARKS else ""
    axes.plot(*_joined(line), color="#222222", linewidth=0.9, marker=dot, markersize=2)
    axes.plot(
        [s for s, _ in marks], [v for _, (v, *_) in marks], ".", color="#222222", markersize=3
    )
    at = [(step, said[0]) for step, said in marks if is_outside(said)]
    axes.plot([s for s, _ in at], [v for _, v in at], "o", color=FLAG, markersize=4,
              markerfacecolor="none", markeredgewidth=1.1)  # fmt: skip
    if window is not None:
        _arrows(axes, [*zip(line.steps, line.values, strict=True), *at], window)
    if fate.acted is not None:
        axes.axvline(fate.acted - 0.5, color=GREY, linestyle=":", linewidth=1.1, zorder=1)
    if fate.banned is not None:  # from the end of the step on
        axes.axvline(fate.banned + 0.5, color=BAN, linewidth=1.1, zorder=1)


def _joined(line: Line) -> tuple[list[float], list[float]]:
    """Return steps and values, with NaN between steps that are too far apart to be joined."""
    steps: list[float] = []
    values: list[float] = []
    for step, value in zip(line.steps, line.values, strict=True):
        if steps and step - steps[-1] > GAP:
            steps.append(math.nan)
            values.append(math.nan)
        steps.append(step)
        values.append(value)
    return steps, values


def _bars(axes: Axes, marks: Sequence[tuple[int, Said]], window: tuple[float, float]) -> None:
    """Draw the inside of the fence at each flag, as one path."""
    steps = [x for step, _ in marks for x in (step, step, math.nan)]
    ends = [y for _, (_, low, high) in marks for y in (*_drawn(low, high, window), math.nan)]
    axes.plot(steps, ends, color=FENCE, linewidth=2.5, solid_capstyle="butt")


def _drawn(low: float, high: float, window: tuple[float, float]) -> tuple[float, float]:
    """Return the ends of a fence within an axis: NaN for one that is open on both sides."""
    if not (math.isfinite(low) or math.isfinite(high)):
        return math.nan, math.nan
    least, most = window
    return min(max(low, least), most), min(max(high, least), most)


def _band(axes: Axes, low: Line, high: Line, window: tuple[float, float]) -> None:
    """Fill the inside of a fence, a step wide for each step in which it was asked."""
    steps: list[float] = []
    below: list[float] = []
    above: list[float] = []
    last = None
    for step, *bounds in zip(low.steps, low.values, high.values, strict=True):
        least, most = _drawn(bounds[0], bounds[1], window)
        if last is not None and step - last > 1:
            for line in (steps, below, above):
                line.append(math.nan)
        steps += [step - 0.5, step + 0.5]
        below += [least] * 2
        above += [most] * 2
        last = step
    axes.fill_between(steps, below, above, color=FENCE, alpha=0.45, linewidth=0)


def _window(bounds: Sequence[float], values: Sequence[float]) -> tuple[float, float] | None:
    """Return the ends of an axis: all values, but no more than some fences above and below."""
    fence = [x for x in bounds if math.isfinite(x)]
    known = [x for x in values if math.isfinite(x)]
    if not fence:
        return None
    low, high = min(fence), max(fence)
    reach = REACH * max(high - low, 1e-12)
    least = max(min([low, *known]), low - reach)
    most = min(max([high, *known]), high + reach)
    room = 0.08 * max(most - least, 1e-12)
    return least - room, most + room


def _arrows(axes: Axes, points: Sequence[tuple[float, float]], window: tuple[float, float]) -> None:
    """Mark at the edges what lies beyond the axis, or is not finite."""
    above = [x for x, y in points if not y <= window[1]]  # NaN is beyond too
    below = [x for x, y in points if y < window[0]]
    for where, mark, y in ((above, "^", 0.96), (below, "v", 0.04)):
        if where:
            thin = where[:: max(1, math.ceil(len(where) / MARKS))]
            axes.plot(thin, [y] * len(thin), mark, color=FLAG, markersize=3.5,
                      transform=axes.get_xaxis_transform())  # fmt: skip
    beyond = [y for _, y in points if not window[0] <= y <= window[1]]
    if beyond:
        text = (
            f"as far as {max(beyond, key=abs):.3g}"
            if all(map(math.isfinite, beyond))
            else ("not finite")
        )
        axes.text(0.99, 0.9 if above else 0.05, text, fontsize=7, color=FLAG, ha="right",
                  va="top" if above else "bottom", transform=axes.transAxes)  # fmt: skip


def _legend(*, traced: bool) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def line(style: Any, color: str, marker: str = "", **look: Any) -> Line2D:
        return Line2D([], [], linestyle=style, color=color, marker=marker, markersize=4, **look)

    entries = [
        (line("-" if traced else "none", "#222222", "."), "value"),
        (Patch(color=FENCE, alpha=0.45), "inside of the fence"),
        (line("none", FLAG, "o", markerfacecolor="none"), "flagged, outside of this fence"),
        (line("none", FLAG, "^"), "beyond the axis"),
        (line(":", GREY), "first lie"),
        (line("-", BAN), "ban"),
    ]
    return [handle for handle, _ in entries], [label for _, label in entries]
