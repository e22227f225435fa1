"""The figure of a sweep, as PNG and SVG: how well attacks are found against what they cost.

Left: recall and F1 against damage, the strengths of one attack joined in their order. Right: damage
against strength with and without a defense; without strengths, F1 against validation loss. What has
no measured damage is a cross at the edge, and named below. The attack `none` is left out: nobody
can be found, and nothing is damaged.

matplotlib is imported when a figure is drawn, and its state is left as it was.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sentinel_bench.score import RECALL_FLOOR
from sentinel_bench.sweep import missing_text

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox, Transform

    _Mark = tuple[Transform, float, float, str]
    """coordinate system, place, label"""
    FloatArray = np.typing.NDArray[np.float64]

Row = Mapping[str, Any]

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which the colour-blind can tell apart, without their yellow."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h")
LINES = ("-", "--", "-.", ":")
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "sentinel-bench",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
WIDE = 0.5  # nats: damage beyond it is drawn on a symmetric logarithmic axis
LINEAR = 0.01  # nats: half width of its linear part
EDGE = 0.985  # where in the axes a cross is put that has no place
LIMITS = (-10, 114)  # percent: with room for labels
NAMED = 6  # points that are named below the figure
CROSSED = 8  # places in a line or a mark that a label may cover: a line, but no mark
NEAR = 9.0  # pixels: marks that share a label


@dataclass(frozen=True)
class _Series:
    """The points of one attack against one defense, and how they look."""

    label: str
    rows: Sequence[Row]
    color: str
    marker: str
    line: str
    bare: bool
    """True if the damage without a defense is shown in this look."""


@dataclass
class _Panel:
    """One set of axes, and the marks in it that wait for their labels."""

    axes: Axes
    marks: list[tuple[_Series, list[_Mark]]] = field(default_factory=list)


def render(summary: Row, title: str) -> dict[str, bytes]:
    """Draw what `sweep.summarize` returns; return the files by their kind, "png" and "svg".

    Args:
        summary: at least its `points` and `baseline`.
        title: one line on top.
    """
    return files_of(lambda: _draw(summary, title))


def files_of(draw: Callable[[], Figure]) -> dict[str, bytes]:
    """Return a figure as files, "png" and "svg", whatever matplotlib is set to."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = draw()
        settle(figure)
        files = {}
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, metadata=metadata)
            files[kind] = buffer.getvalue()
        return files


def settle(figure: Figure) -> None:
    """Lay a figure out once: what is placed now stays where it is."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")


def save(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old or the new content, never a part.

    Raises:
        OSError: nothing was changed.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _draw(summary: Row, title: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = _series(summary["points"])
    swept = any(row["strength"] is not None for row in summary["points"])
    handles = _handles(series, baseline=not swept)
    longest = max((len(label) for label, _ in handles), default=0)
    columns = max(1, min(len(handles), 160 // (longest + 9)))
    notes = _notes(summary["points"])
    height = 5.6 + 0.19 * (math.ceil(len(handles) / columns) + len(notes))
    figure = Figure(figsize=(11, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    layout: list[Any] = (
        [["recall", "strength"], ["f1", "strength"]] if swept else [["recall", "loss"]]
    )
    panels = {name: _Panel(axes) for name, axes in figure.subplot_mosaic(layout).items()}
    _detectability(panels["recall"], series, "recall")
    if swept:
        _detectability(panels["f1"], series, "f1")
        panels["recall"].axes.sharex(panels["f1"].axes)
        _strength(panels["strength"], series)
    else:
        _loss(panels["loss"], series, summary["baseline"]["validation_loss"])
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize=9)
    figure.legend(
        [handle for _, handle in handles],
        [plain(label) for label, _ in handles],
        loc="outside lower left",
        ncols=columns,
        title=plain("\n".join(notes)) or None,
        title_fontsize=7.5,
        alignment="left",
    )
    settle(figure)
    for panel in panels.values():
        _name(panel)
    return figure


def _series(points: Sequence[Row]) -> list[_Series]:
    rows: dict[tuple[str, str], list[Row]] = {}
    for row in points:
        if row["cell"] == "none":
            continue
        rows.setdefault((row["attack"], row["defense"]), []).append(row)
    found, shown = [], {attack for attack, defense in rows if defense == "none"}
    for i, ((attack, defense), own) in enumerate(rows.items()):
        found.append(
            _Series(
                label=f"{attack} vs {defense}",
                rows=own,
                color=COLORS[i % len(COLORS)],
                marker=MARKERS[i % len(MARKERS)],
                line=LINES[i % len(LINES)],
                bare=attack not in shown,
            )
        )
        shown.add(attack)
    return found


# The panels.


def _detectability(panel: _Panel, series: Sequence[_Series], metric: str) -> None:
    axes = panel.axes
    _percent(axes, metric)
    axes.axvline(0, color="0.6", linewidth=0.8, zorder=0)
    if metric == "recall":
        axes.axhspan(LIMITS[0], RECALL_FLOOR, color="0.93", zorder=-1, linewidth=0)
        axes.text(
            0.99, RECALL_FLOOR - 1, "undetected", color="0.4", fontsize=8, ha="right", va="top",
            transform=axes.get_yaxis_transform(),
        )  # fmt: skip
    for one in series:
        _curve(axes, one, "damage", metric)
        panel.marks.append((one, _marks(axes, one, metric)))
        if one.bare:
            bare = [r["unprotected"]["mean"] for r in one.rows]
            axes.plot(_gaps(bare), [0.0] * len(bare), **_hollow(one), linestyle="none")
    _damage_axis(axes, "x", _damages(series))


def _strength(panel: _Panel, series: Sequence[_Series]) -> None:
    axes = panel.axes
    swept = [s for s in series if s.rows[0]["strength"] is not None]
    values = [row["strength"] for s in swept for row in s.rows]
    if min(values) > 0 and max(values) / min(values) >= 10:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    names = dict.fromkeys(row["parameter"] for s in swept for row in s.rows)
    axes.set_xlabel(plain(f"strength ({', '.join(names)})"))
    axes.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    lost = 0
    for one in swept:
        lines = [("damage", {"linestyle": one.line})]
        if one.bare:
            lines += [("unprotected", {**_hollow(one), "linestyle": ":"})]
        for what, look in lines:
            spreads = [row[what] for row in one.rows]
            at = [{"mean": row["strength"], "min": None} for row in one.rows]
            _errorbars(axes, one, at, spreads, **look)
            gone = [r["strength"] for r in one.rows if r[what]["mean"] is None]
            for strength in gone:
                _cross(axes, one, strength, EDGE - 0.03 * lost, axes.get_xaxis_transform())
            lost += bool(gone)
    _damage_axis(axes, "y", _damages(swept))
    axes.margins(y=0.05 + 0.03 * lost)  # room for the crosses


def _loss(panel: _Panel, series: Sequence[_Series], baseline: Row) -> None:
    axes = panel.axes
    axes.set_xlabel("validation loss (nats per token)")
    axes.locator_params(axis="x", nbins=6)
    _percent(axes, "f1")
    for one in series:
        _curve(axes, one, "validation_loss", "f1")
    if baseline["mean"] is not None:
        axes.axvline(baseline["mean"], color="0.6", linewidth=0.8, zorder=0)


# Marks.


def _curve(axes: Axes, one: _Series, across: str, metric: str) -> None:
    """Draw a metric against damage or loss; where these are not known, a cross at the edge."""
    _errorbars(axes, one, [row[across] for row in one.rows], [row[metric] for row in one.rows])
    for row in one.rows:
        if row[across]["mean"] is None and row[metric]["mean"] is not None:
            _cross(axes, one, EDGE, row[metric]["mean"], axes.get_yaxis_transform())


def _marks(axes: Axes, one: _Series, metric: str) -> list[_Mark]:
    """Return where `_curve` has put the strengths."""
    marks: list[_Mark] = []
    for row in one.rows:
        x, y, strength = row["damage"]["mean"], row[metric]["mean"], row["strength"]
        if y is not None and strength is not None:
            transform = axes.transData if x is not None else axes.get_yaxis_transform()
            text = f"{float(f'{strength:.3g}'):g}"
            marks.append((transform, EDGE if x is None else x, y, text))
    return marks


def _errorbars(axes: Axes, one: _Series, x: Sequence[Row], y: Sequence[Row], **look: Any) -> None:
    axes.errorbar(
        _gaps(s["mean"] for s in x),
        _gaps(s["mean"] for s in y),
        xerr=_arms(x),
        yerr=_arms(y),
        **{
            "color": one.color,
            "marker": one.marker,
            "linestyle": one.line,
            "linewidth": 1.1,
            "markersize": 5.5,
            "elinewidth": 0.8,
            "capsize": 2,
            **look,
        },
    )


def _arms(spreads: Sequence[Row]) -> list[list[float]] | None:
    """Return how far a spread reaches below and above its mean; a mean may be rounded past it."""
    if all(s["min"] is None for s in spreads):
        return None
    known = [
        (s["min"], s["mean"], s["max"]) if s["min"] is not None else (0, 0, 0) for s in spreads
    ]
    return [
        [max(0.0, mean - low) for low, mean, _ in known],
        [max(0.0, high - mean) for _, mean, high in known],
    ]


def _hollow(one: _Series) -> dict[str, Any]:
    return {
        "color": one.color,
        "marker": one.marker,
        "markersize": 5.5,
        "markerfacecolor": "white",
        "zorder": 1.8,
    }


def _cross(axes: Axes, one: _Series, x: float, y: float, transform: Transform) -> None:
    axes.plot([x], [y], "x", color=one.color, markersize=6, transform=transform, clip_on=False)


def _percent(axes: Axes, metric: str) -> None:
    axes.set_ylabel({"recall": "recall (%)", "f1": "F1 (%)"}[metric])
    axes.set_ylim(*LIMITS)
    axes.set_yticks(range(0, 101, 25))


def _damages(series: Iterable[_Series]) -> list[float]:
    kinds = [row[what] for s in series for row in s.rows for what in ("damage", "unprotected")]
    return [spread[end] for spread in kinds for end in ("min", "max") if spread[end] is not None]


def _damage_axis(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    axis = {"x": axes.xaxis, "y": axes.yaxis}[which]
    axis.set_label_text("damage: excess loss (nats per token)")
    if max(map(abs, values), default=0.0) > WIDE:
        set_scale = {"x": axes.set_xscale, "y": axes.set_yscale}[which]
        set_scale("symlog", linthresh=LINEAR, linscale=0.6)
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.locator_params(axis=which, nbins=7)


def _gaps(values: Iterable[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


# Words.


def _handles(series: Sequence[_Series], *, baseline: bool) -> list[tuple[str, Any]]:
    from matplotlib.lines import Line2D

    def handle(color: str, marker: str, line: Any, **look: Any) -> Line2D:
        return Line2D([], [], color=color, marker=marker, linestyle=line, markersize=5.5, **look)

    rows = [row for s in series for row in s.rows]
    handles = [
        (s.label, handle(s.color, s.marker, s.line if len(s.rows) > 1 else "none")) for s in series
    ]
    if any(s.bare for s in series):
        handles.append(("hollow: no defense", handle("0.4", "o", "none", markerfacecolor="white")))
    if any(row[what]["mean"] is None for row in rows for what in ("damage", "unprotected")):
        handles.append(("at the edge: not measured", handle("0.4", "x", "none")))
    if baseline:
        handles.append(("no attack, no defense", handle("0.6", "none", "-")))
    return handles


def _notes(points: Sequence[Row]) -> list[str]:
    """Return which runs are missing from the means, a few by name."""
    found = {}
    for row in points:
        for what, defense in (("damage", row["defense"]), ("unprotected", "none")):
            if row[what]["missing"]:
                found[f"{row['cell']} vs {defense}"] = missing_text(row[what])
    if not found:
        return []
    lines = [f"{cell}: {text}" for cell, text in list(found.items())[:NAMED]]
    more = [f"and {len(found) - NAMED} more"] * (len(found) > NAMED)
    return ["Runs without a damage, left out of the means:", *lines, *more]


def _name(panel: _Panel) -> None:
    """Write the strengths beside their marks, where there is room; the right panel has them all."""
    ink = _ink(panel.axes)
    taken = [text.get_window_extent() for text in panel.axes.texts]
    for one, marks in panel.marks:
        spots = [(transform.transform((x, y)), text) for transform, x, y, text in marks]
        for at, text in _gather(spots):
            taken += _write(panel.axes, at, text, one.color, taken, ink)


def _ink(axes: Axes) -> FloatArray:
    """Return places in pixels `[n, 2]` that lines, marks and error bars cover, 4 pixels apart."""
    import numpy as np
    from matplotlib.collections import LineCollection

    paths = [line.get_transform().transform(line.get_xydata()) for line in axes.lines]
    for bars in axes.collections:
        if isinstance(bars, LineCollection):
            paths += [
                bars.get_transform().transform(part) for part in bars.get_segments() if len(part)
            ]
    covered = [np.empty((0, 2))]
    for path in paths:
        covered += [path] * 4  # marks count more than lines
        for a, b in itertools.pairwise(path):
            length = math.dist(a, b)
            if math.isfinite(length):
                shares = np.linspace(0, 1, 2 + int(min(length, 10_000) / 4))[:, None]
                covered.append(a + shares * (b - a))
    return np.concatenate(covered)


def _gather(spots: Sequence[tuple[FloatArray, str]]) -> list[tuple[FloatArray, str]]:
    """Give neighbours that lie on top of each other one label, from the first to the last."""
    groups: list[list[tuple[FloatArray, str]]] = []
    for spot in spots:
        if groups and math.dist(groups[-1][0][0], spot[0]) < NEAR:
            groups[-1].append(spot)
        else:
            groups.append([spot])
    return [
        (own[0][0], own[0][1] if len(own) == 1 else f"{own[0][1]} to {own[-1][1]}")
        for own in groups
    ]


def _write(
    axes: Axes,
    at: FloatArray,
    text: str,
    color: str,
    taken: Sequence[Bbox],
    ink: FloatArray,
) -> list[Bbox]:
    """Write a label near a place in pixels, and return its box; none where all is taken."""
    from matplotlib.transforms import Bbox

    label = axes.text(0, 0, text, fontsize=7, color=color, ha="center", va="center")
    label.set_in_layout(False)
    size = label.get_window_extent()
    dx, dy = size.width / 2 + 1, size.height / 2

    def free(box: Bbox) -> bool:
        inside = axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max)
        return inside and not any(box.overlaps(other) for other in taken)

    def covered(box: Bbox) -> int:
        return int(((ink > box.min) & (ink < box.max)).all(axis=1).sum())

    middles = [
        (at[0] + right * (dx + gap), at[1] + up * (dy + gap))
        for gap in (7, 13, 20)
        for right, up in ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1))
    ]
    boxes = [Bbox.from_extents(x - dx, y - dy, x + dx, y + dy) for x, y in middles]
    best = min(filter(free, boxes), key=covered, default=None)
    if best is None or covered(best) > CROSSED:
        label.remove()
        return []
    label.set_transform(axes.transAxes)
    middle = ((best.x0 + best.x1) / 2, (best.y0 + best.y1) / 2)
    x, y = axes.transAxes.inverted().transform(middle)
    label.set_position((x, y))
    return [best]


def plain(text: str) -> str:
    """Return text that matplotlib shows as it is: a dollar sign begins a formula."""
    return text.replace("$", r"\$")
