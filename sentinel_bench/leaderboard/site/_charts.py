"""Charts as inline SVG: text is escaped, colours are never the only difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup, escape

Range = tuple[float, float]
Points = Sequence[tuple[float, float | None]]

WIDTH, HEIGHT = 440, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 10, 32
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which the colour-blind can tell apart, without their yellow."""
DASHES = ("", "6 3", "2 2", "8 3 2 3", "12 3")
SHAPES = (  # unit paths around 0, 0
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.6-3.6h7.2v7.2h-7.2z",
    "M0-4.6L4.3 3.4H-4.3z",
    "M0-5L5 0L0 5L-5 0z",
    "M0 4.6L4.3-3.4H-4.3z",
    "M-1.6-4.5h3.2v2.9h2.9v3.2h-2.9v2.9h-3.2v-2.9h-2.9v-3.2h2.9z",
    "M-4.6 0L3.4-4.3V4.3z",
)


@dataclass(frozen=True)
class Line:
    """A line of a chart. `stairs`: it holds its value until the next point."""

    points: Points
    color: str = COLORS[0]
    dash: str = ""
    stairs: bool = False


class Frame:
    """A plot with axes: from numbers to places, and the pieces of the SVG."""

    def __init__(
        self, x: Range, y: Range, width: int = WIDTH, height: int = HEIGHT, left: int = LEFT
    ) -> None:
        self.x_range, self.y_range = _wide(x), _wide(y)
        self.width, self.height, self.left = width, height, left
        self.parts: list[str] = []

    def x(self, value: float) -> float:
        """Return the place of a number; what is beyond is at the edge."""
        share = _share(value, self.x_range)
        return self.left + share * (self.width - self.left - RIGHT)

    def y(self, value: float) -> float:
        """Return the place of a number; what is beyond is at the edge."""
        share = _share(value, self.y_range)
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)

    def path(self, d: str, look: str, stroke: str = "", dash: str = "") -> None:
        """Add a path; `look` is its class."""
        more = f' stroke="{stroke}"' if stroke else ""
        more += f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<path d="{d}" class="{look}"{more}/>')

    def upright(self, at: float, look: str) -> None:
        """Add a line from top to bottom."""
        self.path(f"M{_n(self.x(at))} {TOP}V{self.height - BOTTOM}", look)

    def text(self, x: float, y: float, words: str, anchor: str = "middle", look: str = "") -> None:
        """Add a text."""
        kind = f' class="{look}"' if look else ""
        self.parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'
        )

    def axes(self, x_ticks: Iterable[tuple[float, str]], y_ticks: Iterable[float]) -> None:
        """Add grid, ticks and axes."""
        floor, end = self.height - BOTTOM, self.width - RIGHT
        for tick in y_ticks:
            self.path(f"M{self.left} {_n(self.y(tick))}H{end}", "v-grid")
            self.text(self.left - 5, self.y(tick) + 4, f"{tick:.12g}", "end")
        for value, words in x_ticks:
            self.path(f"M{_n(self.x(value))} {floor}v4", "v-axis")
            self.text(self.x(value), floor + 15, words)
        self.path(f"M{self.left} {TOP}V{floor}H{end}", "v-axis")

    def line(self, line: Line) -> None:
        """Add a line, in pieces where a number is missing; a single point is a dot."""
        d = ""
        for known, piece in groupby(line.points, key=lambda point: point[1] is not None):
            places = [(self.x(x), self.y(y)) for x, y in piece if y is not None]
            if not known:
                continue
            (x, y), *rest = places
            d += f"M{_n(x)} {_n(y)}"
            for x, y in rest:
                d += f"H{_n(x)}V{_n(y)}" if line.stairs else f"L{_n(x)} {_n(y)}"
            d += "" if rest else "h.1"
        if d:
            self.path(d, "v-line", line.color, line.dash)

    def svg(self, label: str) -> Markup:
        """Return the whole picture; `label` says what it shows to who cannot see it."""
        body = "".join(self.parts)
        return Markup(
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(label)}">{body}</svg>'
        )


def lines(
    label: str, found: Sequence[Line], x: Range, y: Range, marks: Iterable[float] = ()
) -> Markup:
    """Draw lines over steps, with dotted marks at some steps."""
    frame = Frame(x, y)
    frame.axes(step_ticks(x), ticks(*frame.y_range, 4))
    for mark in marks:
        frame.upright(mark, "v-act")
    for line in found:
        frame.line(line)
    frame.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 3, "step")
    return frame.svg(label)


def swatch(color: str, dash: str = "", shape: str = "") -> Markup:
    """Return a piece of a line, or a mark, for a legend."""
    look = f'fill="{color}"' if shape else f'class="v-line" stroke="{color}"'
    look += f' stroke-dasharray="{dash}"' if dash and not shape else ""
    d = shape or "M-13 0H13"
    return Markup(
        '<svg class="swatch" viewBox="-14 -7 28 14" aria-hidden="true">'
        f'<path d="{d}" {look}/></svg>'
    )


def ticks(low: float, high: float, n: int) -> list[float]:
    """Return about `n` round numbers in a range."""
    rough = (high - low) / n
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [float(f"{(first + i) * step:.10g}") for i in range(count)]


def step_ticks(x: Range, n: int = 5) -> list[tuple[float, str]]:
    """Return ticks at whole steps."""
    return [(tick, f"{tick:.0f}") for tick in ticks(*_wide(x), n) if tick == int(tick)]


def _wide(bounds: Range) -> Range:
    low, high = bounds
    least = max(abs(high), abs(low), 1e-9) * 1e-6
    return (low, high) if high - low > least else (low - least, high + least)


def _share(value: float, bounds: Range) -> float:
    low, high = bounds
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
