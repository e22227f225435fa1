"""The picture of a table of single attacks: F1 against validation loss, published beside ours.

matplotlib is imported when it is drawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sentinel_bench import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Data = Mapping[str, Any]
COLORS = (*plots.COLORS, "#882255")
_MODES = {"activation": "o", "gradient": "^", None: "*"}


def render(data: Data) -> dict[str, bytes]:
    """Draw what `compare.compare` returns; return the files by their kind, "png" and "svg"."""
    return plots.files_of(lambda: _draw(data))


def _draw(data: Data) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    names = dict.fromkeys((row["attack"] or "").partition(":")[0] for row in data["rows"])
    others = [name for name in names if name != "none"]
    colors = dict(zip(others, itertools.cycle(COLORS), strict=False)) | {"none": "0.5"}
    for row in data["rows"]:
        _mark(left, row, colors, published=True)
        _mark(right, row, colors, published=False)
    _finish(left, f"published ({_shown(data, published=True)} set-ups)")
    seeds = len(data["seeds"])
    _finish(
        right,
        f"ours, scale {data['scale']}, mean of {seeds} seed{'s' * (seeds > 1)} "
        f"({_shown(data, published=False)} set-ups)",
    )
    left.set_ylabel("F1 of the defense (%)")
    figure.suptitle(plots.plain(f"{data['name']}: {data['title']}"), x=0.01, ha="left", fontsize=9)
    _legend(figure, colors)
    return figure


def _mark(axes: Axes, row: Data, colors: Mapping[str, str], *, published: bool) -> None:
    """Draw the protected run of a row, and hollow, at F1 0, the loss without a defense."""
    color = colors[(row["attack"] or "").partition(":")[0]]
    look: dict[str, Any] = {"color": color, "marker": _MODES.get(row["mode"], "s"), "alpha": 0.8}
    loss, f1, bare = (
        _value(row, m, published=published) for m in ("val_loss", "f1", "val_loss_unprotected")
    )
    if bare is not None:
        axes.plot([bare], [0], **look, markerfacecolor="white", linestyle="none", zorder=1.8)
    if loss is not None and f1 is not None:
        axes.plot([loss], [f1], **look, linestyle="none")


def _value(row: Data, metric: str, *, published: bool) -> float | None:
    if published:
        found: float | None = row["published"].get(metric)
        return found
    mean: float | None = row["own"][metric]["mean"] if row["own"] else None
    return mean


def _shown(data: Data, *, published: bool) -> int:
    return sum(_value(row, "f1", published=published) is not None for row in data["rows"])


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(plots.plain(title), fontsize=9, loc="left")
    axes.set_xlabel("validation loss (nats per token)")
    axes.set_ylim(-6, 106)


def _legend(figure: Figure, colors: Mapping[str, str]) -> None:
    from matplotlib.lines import Line2D

    def handle(marker: str, color: str = "0.4", **look: Any) -> Line2D:
        return Line2D([], [], color=color, marker=marker, linestyle="none", **look)

    entries = [(name, handle("s", color)) for name, color in colors.items()]
    entries += [("activation", handle("o")), ("gradient", handle("^")), ("no attack", handle("*"))]
    entries.append(("hollow: loss without a defense", handle("o", markerfacecolor="white")))
    figure.legend(
        [mark for _, mark in entries],
        [plots.plain(name) for name, _ in entries],
        loc="outside lower left",
        ncols=7,
    )
