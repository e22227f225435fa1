"""The rows of a track as CSV, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from sentinel_bench.leaderboard._read import NUMBERS

OUTCOMES = ("defended", "broken", "invalid")
COLUMNS = (
    *("attack", "mode", "knowledge", "defense", "setting", "seeds"),
    *(f"{name}_{part}" for name in NUMBERS for part in ("mean", "half", "n")),
    *(*OUTCOMES, "diverged", "marks"),
)
_FORMULA = ("=", "+", "-", "@")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one line for each row, after one of titles; what is not known is empty.

    Names that a spreadsheet would take for a formula get an apostrophe in front of them.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        metrics = [row["metrics"][name] for name in NUMBERS]
        writer.writerow(
            [
                *(harmless(row[name]) for name in ("attack", "mode", "knowledge", "defense")),
                *(row["setting"], row["n"]),
                *(metric[part] for metric in metrics for part in ("mean", "half", "n")),
                *(row["outcomes"][name] for name in OUTCOMES),
                *(row["diverged"], harmless("; ".join(row["marks"]))),
            ]
        )
    return text.getvalue()


def harmless(text: str) -> str:
    """Return text in one line that no spreadsheet takes for a formula."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return f"'{line}" if line.startswith(_FORMULA) else line
