"""The form of a record: which events a run writes, in which order, with which fields.

Stricter than `soundness`: a record of another make is scored, but is no submission.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, get_args

from sentinel_bench.api import Place
from sentinel_bench.config import Scenario
from sentinel_bench.soundness import is_number

Row = Mapping[str, Any]
Problem = tuple[int, str]
"""Number of an event, from 1, and what is wrong with it."""
Fits = Callable[[Any], bool]

SHORTEST = 1e-6  # seconds of a training step
LARGEST = 2**53


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _large(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**80


def _loss(value: Any) -> bool:
    """Tell whether a value can be a mean cross entropy: at least 0, or not finite."""
    return is_number(value) and not value < 0


def _finite(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1e12


def _seconds(value: Any) -> bool:
    return _finite(value) and value >= SHORTEST


def _share(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


def _pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_count, value))


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_count, value))


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _place(value: Any) -> bool:
    return value in get_args(Place)


def _reason(value: Any) -> bool:
    return value in ("violations", "severe")


def _time(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).utcoffset() is not None
    except (TypeError, ValueError):
        return False


_AT: dict[str, Fits] = {"step": _count, "stage": _count}
_WORKER: dict[str, Fits] = {**_AT, "replica": _count}
_FIELDS: dict[str, dict[str, Fits]] = {
    "start": {
        "time": _time,
        **dict.fromkeys(("stages", "replicas", "steps", "warmup_steps"), _count),
        "tokens_per_step": _count,
        "attackers": lambda value: isinstance(value, list),
        "state_bytes": _count,
    },
    "baseline": {"digest": _text, "validation_loss": _loss, "tokens_per_second": _finite},
    "step": {
        "step": _count,
        **dict.fromkeys(("loss", "grad_norm"), _loss),
        "seconds": _seconds,
        **dict.fromkeys(("checked", "flagged"), _pair),
        **dict.fromkeys(("tampered", "excluded"), _count),
    },
    "act": {**_WORKER, "direction": _place},
    "flag": {**_WORKER, "direction": _place, "tampered": _flag},
    "amnesty": {**_AT, "direction": _place, "replicas": _count},
    "ban": {**_WORKER, "reason": _reason},
    "recovery": {
        "step": _count,
        **dict.fromkeys(("suspects", "bypass", "freeze"), _counts),
        "skip": _flag,
    },
    "resync": {**_AT, "distance": _loss},
    "exhausted": _AT,
    "tamper": {"stage": _count, "replica": _count, "signals": _count, "size": _share},
    "trigger": {"step": _count, "rate": _share, "base": _share},
    "eval": {"step": _count, "loss": _loss, "tokens": _count},
    "cost": {**dict.fromkeys(("flops", "step_flops", "bytes"), _large), "steps": _count},
    "end": {"status": _text, "time": _time, "seconds": _finite},
}
_MAY = {"step": {"skipped": _flag}}
_TAIL = ("exhausted", "tamper", "trigger", "eval", "cost", "end")
_ONCE = ("start", "eval", "cost", "end")


def malformed(events: Sequence[Any]) -> Iterator[Problem]:
    """Yield the events that are of no kind that a run writes, and their fields that do not fit."""
    for number, row in enumerate(events, start=1):
        kind = row.get("type") if isinstance(row, dict) else None
        fields = _FIELDS.get(kind) if isinstance(kind, str) else None
        if fields is None:
            yield number, "is no event of a run"
            continue
        optional = _MAY.get(str(kind), {})
        missing, unknown = fields.keys() - row.keys(), row.keys() - fields.keys() - {"type"}
        for key in sorted(missing):
            yield number, f"{kind}: {key} is missing"
        for key in sorted(unknown - optional.keys()):
            yield number, f"{kind}: {key} does not belong there"
        for key, fits in {**fields, **optional}.items():
            if key in row and not fits(row[key]):
                yield number, f"{kind}: {key} is {row[key]!r}"


def disordered(events: Sequence[Row], has_baseline: bool) -> Iterator[Problem]:
    """Yield the events that a run would not write at their place; all are well-formed."""
    kinds = [row["type"] for row in events]
    for kind in (*_ONCE, *["baseline"] * has_baseline):
        if kinds.count(kind) != 1:
            yield len(events), f"{kinds.count(kind)} {kind} events instead of one"
    head = ["start", "baseline"] if has_baseline else ["start"]
    if kinds[: len(head)] != head:
        yield 1, f"a record begins with {' and '.join(head)}"
    now, tail = 0, -1
    for number, row in enumerate(events[len(head) :], start=len(head) + 1):
        kind = row["type"]
        if kind in _TAIL:
            if _TAIL.index(kind) < tail:
                yield number, f"{kind} comes after {_TAIL[tail]}"
            tail = max(tail, _TAIL.index(kind))
        elif tail >= 0 or kind in ("start", "baseline"):
            yield number, f"{kind} at a place where there is none"
        expected = now - (tail >= 0)
        if row.get("step", expected) != expected:
            yield number, f"{kind} of step {row['step']} among those of step {expected}"
            return
        now += kind == "step"


def unlike(events: Sequence[Row], scenario: Scenario) -> Iterator[Problem]:
    """Yield what the start event says otherwise than the settings; all is in order."""
    grid, train = scenario.grid, scenario.train
    told = {
        "stages": grid.stages,
        "replicas": grid.replicas,
        "steps": train.steps,
        "warmup_steps": train.warmup_steps,
        "tokens_per_step": grid.replicas * train.batch_size * train.seq_len,
    }
    for key, value in told.items():
        if events[0][key] != value:
            yield 1, f"start: {key} is {events[0][key]}, and {value} by the settings"
    start, end = (datetime.fromisoformat(events[i]["time"]) for i in (0, -1))
    if end < start:
        yield len(events), "end: is before the start"
    warm = train.warmup_steps
    seconds = math.fsum(r["seconds"] for r in events if r["type"] == "step" and r["step"] >= warm)
    if seconds > events[-1]["seconds"]:
        yield len(events), f"end: the steps took {seconds:.3f} s, longer than the run"
