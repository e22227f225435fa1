"""Two runs: settings, scores, losses step by step, and bans."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sentinel_bench.errors import ConfigError, RunError
from sentinel_bench.provenance import differing
from sentinel_bench.record import encode, read_config, read_events
from sentinel_bench.score import score
from sentinel_bench.soundness import is_number, rows_of

SPEED = ("tokens_per_second", "relative_tps")
"""Scores that no two runs share; they are shown, and are no difference."""

Worker = tuple[int, int]  # stage, replica


@dataclass(frozen=True)
class _Run:
    identity: Mapping[str, Any]
    scores: Mapping[str, Any]
    losses: Mapping[int, float]
    bans: Mapping[Worker, int]


def compare_runs(a: Path, b: Path) -> dict[str, Any]:
    """Compare two run folders; an unfinished one by what it has recorded.

    Returns:
        * `settings`: those that differ, each with `key`, `a`, `b` (None: not recorded);
        * `scores`: all, each with `name`, `a`, `b`, `difference` (b - a; None unless both are
          numbers) and `equal`;
        * `losses`: training losses in nats per token: `steps` that both have and that one alone
          has (`only_a`, `only_b`), the `first` step at which they differ, the `largest` difference
          between finite losses and `at` which step it is;
        * `bans`: number of equal ones, those `only_a` and `only_b` has, and those `moved` to
          another step;
        * `differs`: whether scores but those of speed, losses or bans do.

    Raises:
        ConfigError: a folder cannot be read.
    """
    one, two = _open(a), _open(b)
    scores = _scores(one.scores, two.scores)
    losses, bans = _losses(one.losses, two.losses), _bans(one.bans, two.bans)
    apart = [item for item in scores if not item["equal"] and item["name"] not in SPEED]
    moved = (bans["only_a"], bans["only_b"], bans["moved"])
    return {
        "settings": _settings(one.identity, two.identity),
        "scores": scores,
        "losses": losses,
        "bans": bans,
        "differs": bool(apart) or losses["differ"] or any(moved),
    }


def _open(folder: Path) -> _Run:
    from sentinel_bench.config import flatten  # pydantic: not at import

    try:
        config, events = read_config(folder), read_events(folder)
    except RunError as error:
        raise ConfigError(str(error)) from error
    bans = [r for r in rows_of(events, "ban") if _whole(r, "stage", "replica", "step")]
    steps = [r for r in rows_of(events, "step") if _whole(r, "step") and is_number(r.get("loss"))]
    return _Run(
        identity=config["identity"],
        scores=flatten(score(events)),
        losses={row["step"]: row["loss"] for row in steps},
        bans={(row["stage"], row["replica"]): row["step"] for row in bans},
    )


def _whole(row: Mapping[str, Any], *names: str) -> bool:
    return all(type(row.get(name)) is int for name in names)


def _settings(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[dict[str, Any]]:
    from sentinel_bench.config import flatten

    ours, theirs = flatten(one), flatten(two)
    return [{"key": key, "a": ours.get(key), "b": theirs.get(key)} for key in differing(one, two)]


def _scores(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "a": one.get(name),
            "b": two.get(name),
            "difference": _difference(one.get(name), two.get(name)),
            "equal": equal(one.get(name), two.get(name)),
        }
        for name in dict.fromkeys([*one, *two])
    ]


def _difference(a: Any, b: Any) -> float | None:
    numbers = is_number(a) and is_number(b) and math.isfinite(a) and math.isfinite(b)
    return b - a if numbers else None


def equal(a: Any, b: Any) -> bool:
    """Tell whether two scores are, but for rounding."""
    if is_number(a) and is_number(b):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
    return type(a) is type(b) and bool(a == b)


def _losses(one: Mapping[int, float], two: Mapping[int, float]) -> dict[str, Any]:
    steps = sorted(one.keys() & two.keys())
    apart = [step for step in steps if repr(float(one[step])) != repr(float(two[step]))]
    sizes = {s: abs(two[s] - one[s]) for s in apart if math.isfinite(two[s] - one[s])}
    at = max(sizes, key=sizes.__getitem__, default=None)
    first = apart[0] if apart else None
    alone = (len(one.keys() - two.keys()), len(two.keys() - one.keys()))
    found = {
        "steps": len(steps),
        "only_a": alone[0],
        "only_b": alone[1],
        "apart": len(apart),
        "first": None if first is None else {"step": first, "a": one[first], "b": two[first]},
        "largest": None if at is None else sizes[at],
        "at": at,
        "differ": bool(apart) or any(alone),
    }
    return dict(encode(found))


def _bans(one: Mapping[Worker, int], two: Mapping[Worker, int]) -> dict[str, Any]:
    both = sorted(one.keys() & two.keys())
    return {
        "equal": sum(one[worker] == two[worker] for worker in both),
        "only_a": _workers(one, sorted(one.keys() - two.keys())),
        "only_b": _workers(two, sorted(two.keys() - one.keys())),
        "moved": [
            {"stage": worker[0], "replica": worker[1], "a": one[worker], "b": two[worker]}
            for worker in both
            if one[worker] != two[worker]
        ],
    }


def _workers(bans: Mapping[Worker, int], chosen: Sequence[Worker]) -> list[dict[str, int]]:
    return [{"stage": s, "replica": r, "step": bans[s, r]} for s, r in chosen]
