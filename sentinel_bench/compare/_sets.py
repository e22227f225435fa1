"""Two sets of results: cell by cell, paired by seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sentinel_bench.compare._read import Cell, Key, Seeds, Set, open_set
from sentinel_bench.compare._runs import equal
from sentinel_bench.errors import ConfigError
from sentinel_bench.leaderboard._interval import decided, interval

METRICS = ("f1", "excess_loss", "undetected_damage", "false_bans")
"""What is compared if nothing else is asked for."""
CHANCE = 0.05
"""Share of 95 % intervals that miss what they are of, if nothing differs."""


def compare_sets(
    a: Path, b: Path, metrics: Sequence[str] = METRICS, force: bool = False
) -> dict[str, Any]:
    """Compare the cells that two sets share, over the seeds that are valid in both.

    Args:
        a, b: folders of runs or results, or `board.json` files.
        metrics: names of scores.
        force: match cells by attack, mode and defense alone.

    Returns:
        * `cells`: number of matched cells; `only_a`, `only_b`: those without a partner;
        * `seeds`: matched cells with seeds that are valid on one side only, each with these seeds
          as `only_a` and `only_b`;
        * `outcomes`: matched cells that did not end alike, with the counts of `a` and `b`;
        * `differences`: for each metric and matched cell the means `a` and `b` over the common
          seeds, `difference` (mean of b - a with its 95 % t-interval, paired by seed), `decided`
          (its sign where the interval does not hold 0, else 0), `equal`, and `lost`: common seeds
          for which one side alone has a number. Of a metric, those come first, then the largest;
        * `intervals`, `decided`, `by_chance`: number of intervals of cells that are not equal, how
          many do not hold 0, and how many would not by chance alone;
        * `problems`: files that could not be read, of `a` and `b`;
        * `differs`: whether a metric, an outcome, or the seeds or cells that are there do.

    Raises:
        ConfigError: one cannot be read, or no cell has the same track and setting in both.
    """
    ours, theirs = open_set(a), open_set(b)
    one, two = (_cells(told, path, force) for told, path in ((ours, a), (theirs, b)))
    _check_common(ours, theirs, a, b, force)
    both = sorted(one.keys() & two.keys())
    differences = [
        {"metric": name, **_cell(key), **_difference(one[key], two[key], name)}
        for name in metrics
        for key in both
    ]
    differences.sort(
        key=lambda d: (
            metrics.index(d["metric"]),
            not d["lost"],
            -abs(d["difference"]["mean"] or 0.0),
        )
    )
    known = [d for d in differences if d["difference"]["half"] is not None and not d["equal"]]
    found: dict[str, Any] = {
        "cells": len(both),
        "only_a": [_cell(key) for key in sorted(one.keys() - two.keys())],
        "only_b": [_cell(key) for key in sorted(two.keys() - one.keys())],
        "seeds": [entry for key in both if (entry := _unpaired(key, one[key], two[key]))],
        "outcomes": [
            {**_cell(key), "a": dict(one[key].outcomes), "b": dict(two[key].outcomes)}
            for key in both
            if one[key].outcomes != two[key].outcomes
        ],
        "differences": differences,
        "intervals": len(known),
        "decided": sum(d["decided"] != 0 for d in known),
        "by_chance": CHANCE * len(known),
        "problems": {"a": ours.problems, "b": theirs.problems},
    }
    apart = any(found[name] for name in ("only_a", "only_b", "seeds", "outcomes"))
    return {**found, "differs": apart or not all(d["equal"] for d in differences)}


def _cells(told: Set, path: Path, force: bool) -> dict[Key, Cell]:
    """Return the cells, by attack, mode and defense alone if `force` is given.

    Raises:
        ConfigError: then two of them have the same name.
    """
    if not force:
        return told.cells
    cells: dict[Key, Cell] = {}
    for key, cell in told.cells.items():
        bare = key._replace(track="", scenario="")
        if bare in cells:
            raise ConfigError(
                f"{path}: holds {_name(key)} in several tracks or settings; "
                "name a folder of one of them to use --force"
            )
        cells[bare] = cell
    return cells


def _check_common(ours: Set, theirs: Set, a: Path, b: Path, force: bool) -> None:
    """Refuse sets of which no cell can be matched.

    Raises:
        ConfigError: what each is of.
    """
    if force or ours.settings.keys() & theirs.settings.keys():
        return
    raise ConfigError(
        f"{a} is of {_places(ours)}; {b} is of {_places(theirs)}: numbers of different settings "
        "say little side by side; --force matches cells by attack, mode and defense alone"
    )


def _places(told: Set) -> str:
    words = [f"{track} ({text}, {d[:12]})" for (track, d), text in sorted(told.settings.items())]
    return ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")


def _cell(key: Key) -> dict[str, str]:
    return key._asdict()


def _name(key: Key) -> str:
    return f"{key.attack} {key.mode}".strip() + f" against {key.defense}"


def _unpaired(key: Key, one: Cell, two: Cell) -> dict[str, Any] | None:
    ours, theirs = one.values.keys() - two.values.keys(), two.values.keys() - one.values.keys()
    if not ours and not theirs:
        return None
    return {**_cell(key), "only_a": _lists(ours), "only_b": _lists(theirs)}


def _lists(seeds: Iterable[Seeds]) -> list[list[int]]:
    return [list(one) for one in sorted(seeds)]


def _difference(one: Cell, two: Cell, metric: str) -> dict[str, Any]:
    seeds = sorted(one.values.keys() & two.values.keys())
    pairs = [(one.values[s].get(metric), two.values[s].get(metric)) for s in seeds]
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    lost = sum((x is None) != (y is None) for x, y in pairs)
    found = interval([y - x for x, y in known])
    return {
        "a": interval([x for x, _ in known])["mean"],
        "b": interval([y for _, y in known])["mean"],
        "difference": found,
        "decided": decided(found),
        "equal": not lost and all(equal(x, y) for x, y in known),
        "lost": lost,
    }
