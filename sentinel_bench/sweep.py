"""Damage against detectability: attacks over a range of strengths, and what comes of each.

A value `lo..hi` of one parameter of an attack stands for several strengths. Over the seeds, for
every defense, attack and strength:

* damage: excess loss under the defense. unprotected: excess loss without one.
* recall, f1, false_bans, validation_loss: as in `score`, under the defense.

Each is a spread: mean, min, max, and n, the number of seeds that it stands for. Where n is smaller
than the number of seeds, `missing` says why: invalid (the run says nothing), diverged (the final
loss is not finite), ended early (no rank was left to train), no baseline (nothing to compare with).

The number of a defense is its largest undetected damage: the largest mean damage among the points
with a mean recall below `RECALL_FLOOR`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sentinel_bench import registry
from sentinel_bench.config import Component, flatten, merge, set_dotted
from sentinel_bench.errors import ConfigError
from sentinel_bench.runner import Finished
from sentinel_bench.score import RECALL_FLOOR

Scale = Literal["log", "linear"]
Row = dict[str, Any]

METRICS = ("recall", "f1", "false_bans", "validation_loss")
_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})", re.ASCII)


@dataclass(frozen=True)
class Curve:
    """One attack as it was named: a single point, or one for each strength, in their order.

    Attributes:
        label: the attack with its range.
        name: the attack without the parameter that is swept.
        parameter: the one that is swept, dotted; None for a single point.
        points: strength (None for a single point) and the attack of that strength.
    """

    label: str
    name: str
    parameter: str | None
    points: tuple[tuple[float | None, Component], ...]


def curves(attacks: Sequence[Component], points: int, scale: Scale | None) -> list[Curve]:
    """Return the strengths of all attacks, validated.

    Args:
        attacks: as the user named them, each with at most one value `lo..hi`.
        points: number of strengths of a range, before equal ones are dropped.
        scale: geometric or linear; None: geometric if both ends are above 0.

    Raises:
        ConfigError: ranges that cannot be swept, or values that an attack refuses; the first
            problem of each attack.
    """
    found, problems = [], []
    for attack in attacks:
        try:
            found.append(_curve(attack, points, scale))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("; ".join(problems))
    return found


def refuse_ranges(defenses: Iterable[Component]) -> None:
    """Refuse a range in a defense.

    Raises:
        ConfigError: there is one.
    """
    for defense in defenses:
        for key in _ranges(defense):
            raise ConfigError(
                f"defense {defense.label()!r}: {key} is a range; only attacks are swept"
            )


def strengths(
    low: float, high: float, points: int, scale: Scale | None, *, whole: bool = False
) -> list[float]:
    """Return `points` values from `low` to `high`, which both are hit exactly.

    Values between them are rounded to 4 significant digits, or to whole numbers; equal ones are
    dropped. What is a whole number is an int.

    Raises:
        ConfigError: low >= high, fewer than 2 points, a logarithmic scale from 0 or below, or an
            end that is not whole where it must be.
    """
    low, high = float(low), float(high)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(
            f"a range goes from a smaller to a larger number, not {low:g} to {high:g}"
        )
    if points < 2:
        raise ConfigError(f"a range takes at least 2 points, not {points}")
    if scale == "log" and low <= 0:
        raise ConfigError(
            f"a logarithmic scale starts above 0, not at {low:g}; take --scale linear"
        )
    if whole and not (low.is_integer() and high.is_integer()):
        raise ConfigError(f"whole numbers are needed, not {low:g} to {high:g}")
    shares = [i / (points - 1) for i in range(1, points - 1)]
    if scale == "log" or (scale is None and low > 0):
        a, b = math.log(low), math.log(high)
        raw = [math.exp(a + share * (b - a)) for share in shares]
    else:
        raw = [low + share * (high - low) for share in shares]
    smallest = 1e-12 * (high - low)  # what is left of a zero
    between = [0.0 if abs(v) < smallest else float(round(v) if whole else f"{v:.4g}") for v in raw]
    values = [low, *(v for v in between if low < v < high), high]
    return list(dict.fromkeys(int(v) if v.is_integer() and abs(v) < 1e15 else v for v in values))


def _curve(attack: Component, points: int, scale: Scale | None) -> Curve:
    ranges = _ranges(attack)
    if not ranges:
        registry.attacks.params(attack)
        return Curve(attack.label(), attack.label(), None, ((None, attack),))
    where = f"attack {attack.label()!r}"
    if len(ranges) > 1:
        raise ConfigError(f"{where}: one range at a time, not {', '.join(ranges)}")
    ((key, text),) = ranges.items()
    ends = _RANGE.fullmatch(text.strip())
    if ends is None:
        raise ConfigError(f"{where}: {key}={text} is no range; write lo..hi, for example 0.01..3")
    path = key.split(".")
    whole = _is_whole(registry.attacks.get(attack.name).Params, attack.params, path)
    try:
        values = strengths(float(ends[1]), float(ends[2]), points, scale, whole=whole)
    except ConfigError as error:
        raise ConfigError(f"{where}: {key}: {error}") from None
    found = [(value, _with(attack, key, value)) for value in values]
    for _, component in found:
        registry.attacks.params(component)
    return Curve(attack.label(), _without(attack, key).label(), key, tuple(found))


def _ranges(component: Component) -> dict[str, str]:
    """Return the parameters, dotted, that are meant as ranges."""
    flat = flatten(component.params)
    return {key: v for key, v in flat.items() if isinstance(v, str) and ".." in v}


def _with(component: Component, key: str, value: float) -> Component:
    change: dict[str, Any] = {}
    set_dotted(change, key, value)
    return Component(name=component.name, params=merge(component.params, change))


def _without(component: Component, key: str) -> Component:
    params: dict[str, Any] = {}
    for other, value in flatten(component.params).items():
        if other != key:
            set_dotted(params, other, value)
    return Component(name=component.name, params=params)


def _is_whole(model: Any, given: Mapping[str, Any], path: Sequence[str]) -> bool:
    """Tell whether the parameter at `path` of a settings class takes whole numbers only."""
    first, *rest = path
    if model is Component and first == "params" and rest and "name" in given:
        model = registry.attacks.get(given["name"]).Params
        return _is_whole(model, given["params"], rest)
    fields = getattr(model, "model_fields", {})
    field = next((f for name, f in fields.items() if first in (name, f.alias)), None)
    if field is None:  # an unknown parameter is told by the validation of the values
        return False
    if rest:
        return _is_whole(field.annotation, given[first], rest)
    kinds = {field.annotation, *get_args(field.annotation)}
    return int in kinds and float not in kinds


# What came of it.


def summarize(
    curves: Sequence[Curve], defenses: Sequence[Component], finished: Sequence[Finished]
) -> dict[str, Any]:
    """Return what a sweep found, JSON-able and in the order of the attacks and the defenses.

    Returns:
        `baseline`: validation loss without attack and defense; `points`: one row per attack,
        strength and defense; `undetected`: the largest undetected damage per attack and defense;
        `unmeasured`: all runs that are missing from a mean.
    """
    cells: dict[tuple[str, str], list[Finished]] = defaultdict(list)
    for item in finished:
        cells[item.cell.attack.label(), item.cell.defense.label()].append(item)
    points = [
        _point(curve, strength, attack.label(), defense.label(), cells)
        for curve in curves
        for strength, attack in curve.points
        for defense in defenses
    ]
    baseline = [run.result["scores"]["validation_loss"] for run in cells["none", "none"]]
    return {
        "baseline": {"validation_loss": _spread(baseline)},
        "points": points,
        "undetected": [
            _undetected([p for p in points if (p["attack"], p["defense"]) == (label, defense)])
            for label in dict.fromkeys(c.label for c in curves if c.name != "none")
            for defense in dict.fromkeys(d.label() for d in defenses)
        ],
        "unmeasured": [_unmeasured(f) for f in finished if _excess(f)[1]],
    }


def missing_text(spread: Mapping[str, Any]) -> str:
    """Return what is missing from a spread in words, empty if nothing is: `1 of 3 diverged`."""
    seeds = spread["n"] + sum(spread["missing"].values())
    return ", ".join(f"{n} of {seeds} {why}" for why, n in spread["missing"].items())


def _point(
    curve: Curve,
    strength: float | None,
    attack: str,
    defense: str,
    cells: Mapping[tuple[str, str], list[Finished]],
) -> Row:
    runs, bare = cells[attack, defense], cells[attack, "none"]
    scores = [run.result["scores"] for run in runs]
    return {
        "attack": curve.label,
        "name": curve.name,
        "parameter": curve.parameter,
        "strength": strength,
        "cell": attack,
        "defense": defense,
        "outcomes": dict(Counter(s["outcome"] for s in scores)),
        "idle": sum(s["acted"] == 0 for s in scores),
        **{name: _spread([s[name] for s in scores]) for name in METRICS},
        "damage": _damage(runs),
        "unprotected": _damage(bare),
    }


def _spread(values: Iterable[float | None]) -> Row:
    known = [value for value in values if value is not None]
    if not known:
        return {"mean": None, "min": None, "max": None, "n": 0}
    return {"mean": statistics.fmean(known), "min": min(known), "max": max(known), "n": len(known)}


def _damage(runs: Sequence[Finished]) -> Row:
    found = [_excess(run) for run in runs]
    return {
        **_spread(v for v, _ in found),
        "missing": dict(Counter(why for _, why in found if why)),
    }


def _excess(run: Finished) -> tuple[float | None, str]:
    """Return the excess loss of a run, or why there is none."""
    scores = run.result["scores"]
    if scores["outcome"] == "invalid":
        return None, "invalid"
    if scores["diverged"]:
        return None, "diverged"
    if run.cell.is_baseline:
        return 0.0, ""
    if scores["excess_loss"] is None:
        return None, "ended early" if scores["outcome"] == "broken" else "no baseline"
    return scores["excess_loss"], ""


def _undetected(points: Sequence[Row]) -> Row:
    """Return the largest mean damage that went undetected; None if all was detected.

    Beside it: `undetected`, how many points were; `unmeasured`, those of them that lack the damage
    of a seed, so that the true number may be larger; `unknown`, points without a valid run.
    """
    known = [p for p in points if p["recall"]["mean"] is not None]
    passed = [p for p in known if p["recall"]["mean"] < RECALL_FLOOR]
    measured = [p for p in passed if p["damage"]["mean"] is not None]
    worst = max(measured, key=lambda p: p["damage"]["mean"], default=None)
    return {
        "attack": points[0]["attack"],
        "defense": points[0]["defense"],
        "damage": worst and worst["damage"]["mean"],
        "strength": worst and worst["strength"],
        "cell": worst and worst["cell"],
        "undetected": len(passed),
        "points": len(points),
        "unmeasured": {
            p["cell"]: missing_text(p["damage"]) for p in passed if p["damage"]["missing"]
        },
        "unknown": [p["cell"] for p in points if p["recall"]["mean"] is None],
    }


def _unmeasured(run: Finished) -> Row:
    scores = run.result["scores"]
    return {
        "attack": run.cell.attack.label(),
        "defense": run.cell.defense.label(),
        "seeds": run.cell.scenario.seeds.model_dump(),
        "why": _excess(run)[1],
        "outcome": scores["outcome"],
        "reason": scores["reason"],
        "folder": str(run.folder),
    }
