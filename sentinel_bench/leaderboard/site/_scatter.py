"""Damage against detectability: what each attack does to each defense, and how well it is found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from sentinel_bench.leaderboard.site._board import Board
from sentinel_bench.leaderboard.site._charts import BOTTOM, COLORS, RIGHT, SHAPES, Frame, swatch
from sentinel_bench.leaderboard.site._metrics import interval
from sentinel_bench.score import RECALL_FLOOR

Row = Mapping[str, Any]
WIDTH, HEIGHT = 760, 420
LINEAR = 0.01
"""Nats: half width of the linear part of the axis of damage."""
TICKS = (-1.0, -0.1, -0.01, 0.0, 0.01, 0.1, 1.0, 10.0, 100.0)
LABELS = 8
"""Points with a name: those that do the most damage unseen."""
LETTER = 5.6
"""Pixels of a letter, about."""


def look(defenses: Sequence[str], name: str) -> tuple[str, str]:
    """Return colour and mark of a defense; the pairs repeat after 49 defenses."""
    number = defenses.index(name)
    return COLORS[number % len(COLORS)], SHAPES[(number + number // len(COLORS)) % len(SHAPES)]


def legend(board: Board) -> list[tuple[str, Markup]]:
    """Return name and mark of each defense that is drawn."""
    drawn = {row["defense"] for row in board.content["rows"] if _place(row) is not None}
    found = []
    for name in board.defenses:
        if name in drawn:
            color, shape = look(board.defenses, name)
            found.append((name, swatch(color, shape=shape)))
    return found


def scatter(board: Board, setting: int) -> Markup | None:
    """Draw excess loss against F1, a mark for each attack, mode and defense of a setting.

    The axis of damage is linear up to `LINEAR`, and logarithmic beyond. A model that diverged is at
    the right edge. None if nothing can be drawn.
    """
    rows = [row for row in board.content["rows"] if row["setting"] == setting]
    placed = [(row, place) for row in rows if (place := _place(row)) is not None]
    if not placed:
        return None
    known = [damage for _, (damage, _) in placed if math.isfinite(damage)]
    low, high = min([*known, 0.0]), max([*known, 0.1])
    frame = Frame((_symlog(low) - 0.1, _symlog(high) + 0.3), (-4, 104), WIDTH, HEIGHT)
    frame.axes(
        [(_symlog(tick), f"{tick:g}") for tick in TICKS if low <= tick <= high * 1.5],
        range(0, 101, 20),
    )
    frame.text((frame.left + WIDTH) / 2, HEIGHT - 3, "excess loss under the defense, nats")
    frame.text(4, 8, "F1, percent", "start")
    for row, place in placed:
        _mark(frame, board, row, place)
    _labels(frame, placed)
    return frame.svg(f"Scatter of excess loss and F1 of {len(placed)} pairs of attack and defense")


def _place(row: Row) -> tuple[float, float] | None:
    """Return damage and F1; infinite damage if the model diverged; None if one is not known."""
    if row["attack"] == "none" or row["defense"] == "none" or not row["n"]:
        return None
    damage, f1 = row["metrics"]["excess_loss"]["mean"], row["metrics"]["f1"]["mean"]
    if damage is None and row["diverged"]:
        damage = math.inf
    return None if damage is None or f1 is None else (damage, f1)


def _symlog(value: float) -> float:
    return math.copysign(math.log10(1 + abs(value) / LINEAR), value)


def _mark(frame: Frame, board: Board, row: Row, place: tuple[float, float]) -> None:
    color, shape = look(board.defenses, row["defense"])
    damage = interval(row["metrics"]["excess_loss"], "+z.3f")
    words = (
        f"{_name(row)} against {row['defense']}: F1 {interval(row['metrics']['f1'], '.1f')}, "
        f"excess loss {damage if math.isfinite(place[0]) else 'without a number: diverged'}"
    )
    frame.parts.append(
        f'<path d="{shape}" class="v-mark" fill="{color}" transform="translate('
        f'{_x(frame, place):.1f} {frame.y(place[1]):.1f})"><title>{escape(words)}</title></path>'
    )


def _labels(frame: Frame, placed: Sequence[tuple[Row, tuple[float, float]]]) -> None:
    """Name the worst of what was not found, where there is room."""
    unseen = [
        (row, place)
        for row, place in placed
        if (row["metrics"]["recall"]["mean"] or 0) < RECALL_FLOOR and place[0] > LINEAR
    ]
    unseen.sort(key=lambda item: (-item[1][0], _name(item[0]), item[0]["defense"]))
    taken: list[tuple[float, float, float]] = []
    for row, place in unseen:
        x, y, words = _x(frame, place), frame.y(place[1]) + 4, _name(row)[:40]
        width = LETTER * len(words)
        left = x - 8 - width if x + 8 + width > WIDTH - RIGHT else x + 8
        crowded = any(abs(y - b) < 12 and left < c and left + width > a for a, b, c in taken)
        if crowded or y > HEIGHT - BOTTOM + 4 or len(taken) == LABELS:
            continue
        taken.append((left, y, left + width))
        frame.text(left, y, words, "start", "v-name")


def _x(frame: Frame, place: tuple[float, float]) -> float:
    return frame.x(_symlog(place[0])) if math.isfinite(place[0]) else WIDTH - RIGHT - 6.0


def _name(row: Row) -> str:
    return f"{row['attack']} ({row['mode']})" if row["mode"] else str(row["attack"])
