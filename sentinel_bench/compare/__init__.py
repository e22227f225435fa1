"""Two runs, or two sets of results, side by side: in what they differ, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sentinel_bench.compare._runs import compare_runs
from sentinel_bench.compare._sets import METRICS, compare_sets
from sentinel_bench.errors import ConfigError
from sentinel_bench.record import CONFIG

__all__ = ["METRICS", "compare", "compare_runs", "compare_sets"]


def compare(
    a: Path, b: Path, *, metrics: Sequence[str] = METRICS, force: bool = False
) -> dict[str, Any]:
    """Compare two run folders, or two sets: folders of runs or results, or `board.json` files.

    Args:
        a, b: what is compared; differences are those of `b` to `a`.
        metrics: of sets, those that are compared.
        force: match cells of sets by attack, mode and defense alone, whatever their track and
            setting.

    Returns:
        What `compare_runs` or `compare_sets` says, JSON-able; `kind` is "runs" or "sets", and
        `differs` says whether any number but those of speed and settings does.

    Raises:
        ConfigError: one cannot be read, they are of two kinds, or no cell of two sets has the same
            track and setting.
    """
    runs = [(path / CONFIG).is_file() for path in (a, b)]
    if all(runs):
        return {"kind": "runs", "a": str(a), "b": str(b), **compare_runs(a, b)}
    if any(runs):
        run, other = (a, b) if runs[0] else (b, a)
        raise ConfigError(
            f"{run} is a run folder, and {other} is not: compare two run folders, or two folders "
            "of runs or results"
        )
    return {"kind": "sets", "a": str(a), "b": str(b), **compare_sets(a, b, metrics, force)}
