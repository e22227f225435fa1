"""What a run did over its steps, in a few KB: `curves.json`, which lies beside a `result.json`.

    {"schema": 1, "digest": ..., "steps": 350, "warmup": 140,
     "loss": {"every": 6, "values": [...]}       mean of each 6 steps; null: one was not finite
     "attackers": [[stage, replica, first step of the attack, first corrupted signal], ...],
     "bans": [[step, stage, replica, whether it had attacked], ...],
     "signals": {"every": 9, "from": 140, "honest": [[checked, flagged], ...], "tampered": ...},
     "workers": [{"role": "detected", "stage": 2, "replica": 5, "acted": 140, "banned": 144,
                  "attack": ..., "direction": "activation", "statistics":
                  [{"name": "l1", "flags": [[step, value, low, high], ...], "trace": the same}]}],
     "more": {"attackers": 0, "bans": 0}}        how many were left out

Numbers have four digits; what is not finite is null. `workers` are telling ones: the attacker and
the honest worker that were banned first, and the first attacker that was never banned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from sentinel_bench.report._read import Run, steps_of
from sentinel_bench.report._statistics import Statistics, statistics_of
from sentinel_bench.report._workers import (
    DETECTED,
    FALSE_BAN,
    MISSED,
    Fate,
    Grid,
    grid_of,
    label_of,
)
from sentinel_bench.soundness import is_number

CURVES, SCHEMA = "curves.json", 1
POINTS = 60
"""Values of the loss."""
BINS = 24
"""Pairs of checked and flagged signals."""
WORKERS = 128
"""Attackers, and bans, that are listed."""
STATISTICS, FLAGS, TRACED = 2, 20, 40
"""Statistics of a telling worker, and flags and values of the trace of each."""
LONGEST = 80
"""Characters of a name."""

Numbers = list[list[float | None]]


def curves_of(run: Run) -> dict[str, Any]:
    """Return the content of `curves.json`, JSON-able and without NaN."""
    grid, (warmup, steps) = grid_of(run), steps_of(run)
    fates = [] if grid is None else [grid.fates[worker] for worker in sorted(grid.fates)]
    attackers = [
        [*fate.worker, _index(fate.attacker.get("start")), fate.acted]
        for fate in fates
        if fate.attacker is not None
    ]
    bans = sorted(
        [fate.banned, *fate.worker, fate.state is DETECTED]
        for fate in fates
        if fate.banned is not None
    )
    return {
        "schema": SCHEMA,
        "digest": run.config["digest"],
        "steps": steps,
        "warmup": warmup,
        "loss": _loss(run, steps),
        "attackers": attackers[:WORKERS],
        "bans": bans[:WORKERS],
        "signals": _signals(run, warmup, steps),
        "workers": [] if grid is None else _workers(grid, statistics_of(run)),
        "more": {"attackers": len(attackers[WORKERS:]), "bans": len(bans[WORKERS:])},
    }


def short(value: float) -> float | None:
    """Return a number with four digits; None if it is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _index(value: Any) -> int | None:
    return value if type(value) is int else None


def _width(steps: int, parts: int) -> int:
    return max(1, math.ceil(steps / parts))


def _loss(run: Run, steps: int) -> dict[str, Any]:
    """Return means of as many steps each; the last is that in which the run ended."""
    every = _width(steps, POINTS)
    found: list[list[float]] = [[] for _ in range(POINTS)]
    for row in run.of("step"):
        if row["step"] < steps and is_number(row.get("loss")):
            found[row["step"] // every].append(row["loss"])
    last = max((number for number, losses in enumerate(found) if losses), default=-1)
    return {"every": every, "values": [_mean(losses) for losses in found[: last + 1]]}


def _mean(values: Sequence[float]) -> float | None:
    return short(math.fsum(values) / len(values)) if values and all(
        map(math.isfinite, values)
    ) else None  # fmt: skip


def _signals(run: Run, warmup: int, steps: int) -> dict[str, Any]:
    every = _width(steps - warmup, BINS)
    sums = {"honest": [[0, 0] for _ in range(BINS)], "tampered": [[0, 0] for _ in range(BINS)]}
    used = 0
    for row in run.of("step"):
        if not warmup <= row["step"] < steps:
            continue
        number = (row["step"] - warmup) // every
        used = max(used, number + 1)
        for truth, kind in enumerate(sums):
            sums[kind][number][0] += row["checked"][truth]
            sums[kind][number][1] += row["flagged"][truth]
    return {"every": every, "from": warmup, **{kind: s[:used] for kind, s in sums.items()}}


def _workers(grid: Grid, statistics: Statistics) -> list[dict[str, Any]]:
    """Return the telling workers, each as far as there is one."""
    found = []
    for state in (DETECTED, FALSE_BAN, MISSED):
        fates = [fate for fate in grid.fates.values() if fate.state is state]
        if fates:
            first = min(fates, key=lambda fate: (fate.banned or 0, fate.acted or 0, fate.worker))
            found.append(_worker(first, statistics))
    return found


def _worker(fate: Fate, statistics: Statistics) -> dict[str, Any]:
    told = statistics.telling(fate)
    return {
        "role": fate.state.key,
        "stage": fate.worker[0],
        "replica": fate.worker[1],
        "acted": fate.acted,
        "banned": fate.banned,
        "attack": label_of(fate.attacker)[:LONGEST] if fate.attacker else "",
        "direction": told[0] if told else "",
        "statistics": _statistics(fate, statistics, *told) if told else [],
    }


def _statistics(
    fate: Fate, statistics: Statistics, direction: str, first: str
) -> list[dict[str, Any]]:
    """Return the most telling statistic, and others that the flags hold, of one direction."""
    flags = statistics.flags.get((fate.worker, direction), [])
    others = [
        name
        for name in statistics.names[direction]
        if name != first and any(name in flag.said for flag in flags)
    ]
    return [
        {
            "name": name[:LONGEST],
            "flags": _thinned(
                [(flag.step, *flag.said[name]) for flag in flags if name in flag.said], FLAGS
            ),
            "trace": _thinned(_traced(statistics, (direction, name), fate), TRACED),
        }
        for name in [first, *others][:STATISTICS]
    ]


def _traced(
    statistics: Statistics, what: tuple[str, str], fate: Fate
) -> list[tuple[int, float, float, float]]:
    """Return step, value, low and high of a worker in the trace; none without one."""
    line = statistics.lines.get((*what, fate.worker))
    fence = statistics.fences.get((*what, fate.worker[0]))
    if line is None or fence is None:
        return []
    low, high = (dict(zip(side.steps, side.values, strict=True)) for side in fence)
    return [
        (step, value, low.get(step, -math.inf), high.get(step, math.inf))
        for step, value in zip(line.steps, line.values, strict=True)
    ]


def _thinned(rows: Sequence[tuple[int, float, float, float]], most: int) -> Numbers:
    """Return every so many of some rows, so that `most` are left, with the last one."""
    every = _width(len(rows), most)
    kept: Iterable[tuple[int, float, float, float]] = rows[::-1][::every][::-1]
    return [[step, *map(short, numbers)] for step, *numbers in kept]
