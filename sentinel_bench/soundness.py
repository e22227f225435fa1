"""Whether the events of a run can be scored: complete, well-formed and free of contradiction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_WORKERS = 1_000_000  # a grid beyond it is a malformed row

Row = Mapping[str, Any]
Worker = tuple[int, int]


def problem(events: Sequence[Row]) -> str | None:
    """Return why a run is invalid; the party that failed comes before its consequences."""
    errors = rows_of(events, "error")
    if errors:
        return f"{errors[0].get('party', 'unknown')}: {errors[0].get('message', 'no message')}"
    ends = rows_of(events, "end")
    if not ends:
        return "killed: the run has no end event"
    status = ends[-1].get("status")
    if status in ("interrupted", "error"):
        return f"{status}: the run did not reach its last step"
    return _malformed(events) or _contradiction(events) or _incomplete(events)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _large(value: Any) -> bool:
    """Say whether a value counts operations or bytes, of which a step of a large model has many."""
    return type(value) is int and 0 <= value < 2**80


def is_number(value: Any) -> bool:
    """Say whether a value is a number that JSON and a float can hold."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**53)


def _optional(value: Any) -> bool:
    return value is None or is_number(value)


def _seconds(value: Any) -> bool:
    return is_number(value) and 0 <= value < math.inf


def _pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_count, value))


def _share(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


def _attackers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_attacker, value))


def _attacker(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and all(_count(value.get(key)) for key in ("stage", "replica"))
        and all(isinstance(value.get(key, ""), str) for key in ("mode", "knowledge"))
    )


_Check = Callable[[Any], bool]
_AT_WORKER: dict[str, _Check] = {"step": _count, "stage": _count, "replica": _count}
_FIELDS: dict[str, dict[str, _Check]] = {
    "start": {
        **dict.fromkeys(("stages", "replicas", "steps", "warmup_steps"), _count),
        "tokens_per_step": _seconds,
        "attackers": _attackers,
        "state_bytes": lambda value: value is None or _count(value),
    },
    "baseline": {"validation_loss": _optional, "tokens_per_second": _optional},
    "step": {
        "step": _count,
        "seconds": _seconds,
        "checked": _pair,
        "flagged": _pair,
        "excluded": _count,
    },
    "act": _AT_WORKER,
    "flag": _AT_WORKER,
    "ban": _AT_WORKER,
    "tamper": {"stage": _count, "replica": _count, "signals": _count, "size": _share},
    "trigger": {"step": _count, "rate": _share, "base": _share},
    "cost": dict.fromkeys(("flops", "step_flops", "bytes"), _large),
    "traffic": {
        "sent": lambda value: isinstance(value, Mapping) and all(map(_large, value.values()))
    },
    "exhausted": {"step": _count, "stage": _count},
    "eval": {"step": _count, "loss": _optional},
    "end": {"status": lambda value: value in ("complete", "exhausted")},
}


def _malformed(events: Sequence[Row]) -> str | None:
    """Say which field of which row is missing or of a wrong kind, as far as it is scored."""
    for number, row in enumerate(events, start=1):
        field = misfit(row)
        if field is not None:
            return f"malformed: event {number} ({row['type']}): {field} is {row.get(field)!r}"
    starts = rows_of(events, "start")
    if len(starts) != 1:
        return f"malformed: {len(starts)} start events instead of one"
    if not 1 <= starts[0]["stages"] * starts[0]["replicas"] <= MAX_WORKERS:
        return "malformed: the grid of the start event is not usable"
    for kind in ("baseline", "cost", "traffic", "end"):
        if len(rows_of(events, kind)) > 1:
            return f"malformed: more than one {kind} event"
    return None


def misfit(row: Row) -> str | None:
    """Return the first field of a row that is missing or of a wrong kind, as far as it counts."""
    fields = _FIELDS.get(str(row.get("type")), {})
    return next((name for name, fits in fields.items() if not fits(row.get(name))), None)


_ONCE = {"ban": "is banned a second time", "tamper": "has a second tamper event"}


def _contradiction(events: Sequence[Row]) -> str | None:
    """Say which row cannot be true, given the others."""
    start = start_of(events)
    attackers, acted = planned(start), acting(events)
    seen: set[tuple[str, Worker]] = set()
    for number, row in enumerate(events, start=1):
        kind, reason = row.get("type"), None
        if kind in ("act", "flag", "ban", "tamper"):
            worker, reason = worker_of(row), _outside(row, start)
            if kind != "tamper":
                reason = reason or _misplaced(row, start)
            if kind == "act" and worker not in attackers:
                reason = reason or "acted, but is no attacker"
            if kind == "tamper" and worker not in acted:
                reason = reason or "never acted"
            if kind in _ONCE and (kind, worker) in seen:
                reason = reason or _ONCE[kind]
            seen.add((kind, worker))
        elif kind == "step" and any(
            f > c for f, c in zip(row["flagged"], row["checked"], strict=True)
        ):
            return f"contradiction: step {row['step']}: more signals flagged than checked"
        if reason:
            return f"contradiction: event {number} ({kind}): worker {worker_of(row)} {reason}"
    if any(s >= start["stages"] or r >= start["replicas"] for s, r in attackers):
        return "contradiction: an attacker of the start event is outside of the grid"
    exhausted = rows_of(events, "end")[0]["status"] == "exhausted"
    if exhausted != bool(rows_of(events, "exhausted")):
        return "contradiction: the end status and the exhausted events disagree"
    return None


def _outside(row: Row, start: Row) -> str | None:
    if row["stage"] >= start["stages"] or row["replica"] >= start["replicas"]:
        return f"is outside of the grid of {start['stages']} x {start['replicas']}"
    return None


def _misplaced(row: Row, start: Row) -> str | None:
    if row["step"] >= start["steps"]:
        return f"at step {row['step']} of {start['steps']}"
    if row["step"] < start["warmup_steps"]:
        return f"at step {row['step']}, in the warm-up of {start['warmup_steps']}"
    return None


def _incomplete(events: Sequence[Row]) -> str | None:
    """Say which steps, evaluations or tamper rows are missing, or that the paired run is void."""
    start, steps = start_of(events), sorted(row["step"] for row in rows_of(events, "step"))
    expected = len(steps) if rows_of(events, "exhausted") else start["steps"]
    if len(steps) != expected or steps != list(range(expected)) or expected > start["steps"]:
        return f"incomplete: the step rows are not 0 to {start['steps'] - 1}, once each"
    evals = rows_of(events, "eval")
    if not evals:
        return "incomplete: the run has no evaluation"
    if steps and evals[-1]["step"] < steps[-1]:
        return f"incomplete: the last evaluation is of step {evals[-1]['step']}, before the end"
    for baseline in rows_of(events, "baseline"):
        if not finite(baseline["validation_loss"]):
            return "baseline: its validation loss is not finite"
    tampered = {worker_of(row) for row in rows_of(events, "tamper")}
    if tampered and acting(events) - tampered:
        return f"incomplete: no tamper event of worker {min(acting(events) - tampered)}, who acted"
    return None


def rows_of(events: Sequence[Row], kind: str) -> list[Row]:
    """Return the rows of one kind, in order."""
    return [row for row in events if row.get("type") == kind]


def start_of(events: Sequence[Row]) -> Row:
    """Return the start event."""
    return rows_of(events, "start")[0]


def worker_of(row: Row) -> Worker:
    """Return stage and replica of a row."""
    return row["stage"], row["replica"]


def planned(start: Row) -> set[Worker]:
    """Return the attackers of a start event."""
    return {worker_of(attacker) for attacker in start["attackers"]}


def acting(events: Sequence[Row]) -> set[Worker]:
    """Return the workers that sent a corrupted signal at some time."""
    return {worker_of(row) for row in rows_of(events, "act")}


def attackers_of(events: Sequence[Row]) -> Sequence[Row]:
    """Return the attackers of the start event; none if there is no such row of a sound form."""
    found = next((row.get("attackers") for row in rows_of(events, "start")), None)
    return found if _attackers(found) else []  # type: ignore[return-value]


def finite(value: Any) -> bool:
    """Say whether a value is there and finite."""
    return value is not None and math.isfinite(value)
