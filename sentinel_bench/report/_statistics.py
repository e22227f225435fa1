"""Statistics and fences over time, from the trace of a run or else from its flags alone."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from sentinel_bench.report._read import Run
from sentinel_bench.report._workers import Fate, Grid
from sentinel_bench.soundness import Row, Worker, is_number, worker_of

DIRECTIONS = ("activation", "gradient", "update")
MAX_FLOATS = 2_000_000
"""Values of a trace that a page holds: what is beyond is thinned out over the steps."""
MAX_FLAGS = 20_000
"""Flags that a page holds with their statistics."""
MAX_BUTTONS = 40
"""Workers that a page offers first."""
MAX_NAMES = 50
"""Statistics of a direction that a page shows."""

Said = Mapping[str, tuple[float, float, float]]
"""Statistic to value, low and high."""


@dataclass
class Line:
    """Numbers over steps, which may repeat where a step was done again."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("f"))

    def add(self, step: int, value: float) -> None:
        """Add one number."""
        self.steps.append(step)
        self.values.append(value)


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag, and what the defense said about the signal."""

    step: int
    lied: bool
    said: Said


@dataclass
class Statistics:
    """Everything that is known of statistics.

    Attributes:
        traced: True if there is a line for every tested worker.
        lines: direction, statistic and worker to its values.
        fences: direction, statistic and stage to low and high.
        flags: worker and direction to its flags, in order.
    """

    traced: bool
    lines: dict[tuple[str, str, Worker], Line] = field(default_factory=dict)
    fences: dict[tuple[str, str, int], tuple[Line, Line]] = field(default_factory=dict)
    flags: dict[tuple[Worker, str], list[Flag]] = field(default_factory=dict)

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """Direction to its first `MAX_NAMES` statistics, in the order in which they came."""
        found: dict[str, dict[str, None]] = {}
        for direction, name, _ in self.fences:
            found.setdefault(direction, {})[name] = None
        for (_, direction), flags in self.flags.items():
            known = found.setdefault(direction, {})
            for flag in flags:
                known.update(dict.fromkeys(flag.said))
        return {d: [*islice(found[d], MAX_NAMES)] for d in DIRECTIONS if d in found}

    def telling(self, fate: Fate) -> tuple[str, str] | None:
        """Return direction and statistic that were outside of their fence most often, or furthest.

        Without a flag: where the worker acts, and the first statistic; None if nothing is known.
        """
        outside: dict[tuple[str, str], list[float]] = {}
        for direction in self.names:
            for flag in self.flags.get((fate.worker, direction), ()):
                for name, numbers in flag.said.items():
                    if is_outside(numbers):
                        outside.setdefault((direction, name), []).append(distance(numbers))
        if outside:
            return max(outside, key=lambda key: (len(outside[key]), max(outside[key])))
        mode = fate.attacker.get("mode") if fate.attacker else None
        for direction in sorted(self.names, key=lambda d: d != mode):
            for name in self.names[direction]:
                if (direction, name, fate.worker) in self.lines:
                    return direction, name
        return None


def is_outside(numbers: tuple[float, float, float]) -> bool:
    """Tell whether a value lies outside of its open interval; NaN lies outside of a closed one."""
    value, low, high = numbers
    return not low < value < high and (math.isfinite(low) or math.isfinite(high))


def distance(numbers: tuple[float, float, float]) -> float:
    """Return how far a value lies from the middle of its fence, in half widths."""
    value, low, high = numbers
    found = abs(value - (low + high) / 2) / max((high - low) / 2, 1e-30)
    return math.inf if math.isnan(found) else found


def statistics_of(run: Run) -> Statistics:
    """Return all that the record says of statistics."""
    found = Statistics(traced=run.trace is not None)
    for boundary in run.trace or ():
        if boundary.direction not in DIRECTIONS:
            continue
        bounds = boundary.low.tolist(), boundary.high.tolist()
        numbers = zip(boundary.names, boundary.values.tolist(), *bounds, strict=True)
        for name, values, low, high in numbers:
            fence = (boundary.direction, name, boundary.stage)
            for line, bound in zip(
                found.fences.setdefault(fence, (Line(), Line())), (low, high), strict=True
            ):
                line.add(boundary.step, bound)
            for replica, value in zip(boundary.replicas, values, strict=True):
                key = (boundary.direction, name, (boundary.stage, replica))
                found.lines.setdefault(key, Line()).add(boundary.step, value)
    for row in run.of("flag"):
        if row.get("direction") not in DIRECTIONS:
            continue
        where = (worker_of(row), str(row.get("direction")))
        flag = Flag(row["step"], row.get("tampered") is True, _said(row))
        found.flags.setdefault(where, []).append(flag)
    return found


def _said(row: Row) -> dict[str, tuple[float, float, float]]:
    """Return the statistics of a flag, as far as they have a form."""
    given = row.get("statistics")
    if not isinstance(given, Mapping):
        return {}
    return {
        str(name): (float(numbers[0]), float(numbers[1]), float(numbers[2]))
        for name, numbers in given.items()
        if isinstance(numbers, Sequence) and len(numbers) == 3 and all(map(is_number, numbers))
    }


# What the page draws from.


def payload(statistics: Statistics, grid: Grid, steps: tuple[int, int]) -> dict[str, Any]:
    """Return what the page's script draws, JSON-able and without NaN.

    `lines` and `fences` hold steps as numbers and values as base64 of little-endian float32; keys
    are joined by newlines. In `flags` what is not finite is null.

    Args:
        statistics: over time.
        grid: what became of the workers.
        steps: the first that is verified, and the number of all.
    """
    floats = sum(len(line.steps) for line in statistics.lines.values())
    floats += sum(2 * len(low.steps) for low, _ in statistics.fences.values())
    stride = max(1, math.ceil(floats / MAX_FLOATS))
    flags = sum(map(len, statistics.flags.values()))
    every = max(1, math.ceil(flags / MAX_FLAGS))
    timelines = _Timelines()
    return {
        "stages": grid.stages,
        "replicas": grid.replicas,
        "from": steps[0],
        "to": steps[1],
        "traced": statistics.traced,
        "stride": stride,
        "flagStride": every,
        "names": statistics.names,
        "lines": {
            _key(d, name, *worker): {"at": timelines.add(line.steps[::stride]),
                                     "values": _base64(line.values[::stride])}
            for (d, name, worker), line in statistics.lines.items()
            if name in statistics.names[d]
        },
        "fences": {
            _key(d, name, stage): {"at": timelines.add(low.steps[::stride]),
                                   "low": _base64(low.values[::stride]),
                                   "high": _base64(high.values[::stride])}
            for (d, name, stage), (low, high) in statistics.fences.items()
            if name in statistics.names[d]
        },
        "flags": _flags(statistics, every),
        "timelines": timelines.lists,
        "workers": {_key(*worker): _worker(fate) for worker, fate in grid.fates.items()},
        "telling": {
            _key(*fate.worker): told
            for fate in grid.interesting()[:MAX_BUTTONS]
            if (told := statistics.telling(fate))
        },
    }  # fmt: skip


class _Timelines:
    """Steps of lines: many lines have the same."""

    def __init__(self) -> None:
        self.lists: list[list[int]] = []
        self._known: dict[bytes, int] = {}

    def add(self, steps: array[int]) -> int:
        """Return the number of a list of steps."""
        number = self._known.setdefault(steps.tobytes(), len(self.lists))
        if number == len(self.lists):
            self.lists.append(steps.tolist())
        return number


def _flags(statistics: Statistics, every: int) -> dict[str, Any]:
    """Return worker and direction to steps, whether it lied, and statistic to number triples."""
    found = {}
    for (worker, direction), flags in statistics.flags.items():
        kept = flags[::every]
        found[_key(direction, *worker)] = {
            "count": len(flags),
            "steps": [flag.step for flag in kept],
            "lied": [int(flag.lied) for flag in kept],
            "said": {
                name: [_finite(flag.said.get(name)) for flag in kept]
                for name in statistics.names[direction]
                if any(name in flag.said for flag in kept)
            },
        }
    return found


def _finite(numbers: Sequence[float] | None) -> list[float | None] | None:
    return None if numbers is None else [x if math.isfinite(x) else None for x in numbers]


def _worker(fate: Fate) -> dict[str, Any]:
    return {
        "letter": fate.state.letter,
        "words": fate.state.words,
        "acted": fate.acted,
        "banned": fate.banned,
        "delay": fate.delay,
    }


def _key(*parts: object) -> str:
    return "\n".join(map(str, parts))


def _base64(values: Iterable[float]) -> str:
    import numpy as np

    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()
