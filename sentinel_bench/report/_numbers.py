"""Numbers in words."""

from __future__ import annotations

import math
from typing import Any


def number(value: Any, style: str = "g") -> str:
    """Return a number in a format, a dash for None, and words for what is not finite."""
    if value is None:
        return "-"
    if isinstance(value, float) and not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    try:
        return format(value, style)
    except (ValueError, TypeError):  # a record may hold anything
        return str(value)


def count(n: int, word: str) -> str:
    """Return a count with its word: "1 flag", "1,200 flags"."""
    return f"{n:,} {word}" if n == 1 else f"{n:,} {word}s"
