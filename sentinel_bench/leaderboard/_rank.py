"""Ranks: defenses by what passes them at the worst, attacks by what they do to the best one.

The cells that count are the complete set of the track: its attacks in its modes, an attack that has
no say in the mode once, no attack once, each with all seeds of the track and no others. Where
benchmark.yaml holds no attacks of the track, they are all that the board itself has measured.

Defenses are compared by, in this order:

1. the undetected damage in their worst cell (the largest mean; of equal ones the one with the lower
   F1): the excess loss of a run in which recall was below a half, else 0. A broken run that has no
   number there (the model diverged, or no worker was left to go on) counts as more than any number;
2. F1 in that cell;
3. mean F1 over the attacks;
4. mean relative TPS over all cells.

A defense has no rank if a cell is missing, invalid or has fewer seeds, if more than 1 % of the
workers were banned without an attack, with any seed, or if it is `none`, which is there for
reference.

Attacks are compared by the excess loss that they do to the first defense of rank 1; if none is
ranked, to the first of the list.

`_order` says what follows from a comparison.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sentinel_bench.leaderboard._interval import Interval, interval
from sentinel_bench.leaderboard._order import Contender, place
from sentinel_bench.leaderboard._read import Result
from sentinel_bench.score import FALSE_BAN_TOLERANCE, RECALL_FLOOR

UNPROTECTED = "none"
REFERENCE = "for reference: the model without a defense"
_NAMED = 4  # cells that a reason names

Seeds = tuple[int, ...]
Line = tuple[str, str]  # attack with parameters, mode
Cell = Mapping[Seeds, Result]


@dataclass(frozen=True)
class _Asked:
    """What a track asks for: lines of its table, and seeds.

    `once` holds the attacks that have no say in the mode, with the word in its place.
    """

    lines: list[Line]
    seeds: list[Seeds]
    once: dict[str, str]

    def line(self, item: Result) -> Line:
        """Return the line that a result belongs to."""
        return item.attack, self.once.get(item.attack, item.mode)


def rankings(
    results: Iterable[Result], scenarios: Sequence[str], track: str
) -> list[dict[str, Any]]:
    """Return `setting`, `defenses` and `attacks` for each setting, in the order of their ranks.

    Each entry has `rank` (None: it has none), `tie`, `status` ("ranked", "missing" or
    "disqualified") and `reason`. Numbers are means over seeds with intervals, without a mean where
    a run has no number; false bans are workers. `cells` are those complete, `of` the whole set;
    `broken` of the `attacked` runs have the outcome broken, whatever their recall.

    Args:
        results: of one track, one for each cell and seeds.
        scenarios: digests of the settings, in the order of their numbers.
        track: its name.
    """
    by_setting: dict[str, list[Result]] = defaultdict(list)
    for item in results:
        by_setting[item.scenario].append(item)
    return [
        {"setting": number, **_ranking(by_setting[scenario], track)}
        for number, scenario in enumerate(scenarios, start=1)
    ]


def _ranking(results: Sequence[Result], track: str) -> dict[str, Any]:
    asked = _asked(results, track)
    table: dict[str, dict[Line, dict[Seeds, Result]]] = defaultdict(dict)
    for item in results:
        table[item.defense].setdefault(asked.line(item), {})[item.seeds] = item
    own = sorted({item.defense for item in results if item.kind != "attack"})
    defenses = _placed([_defense(name, table[name], asked) for name in own])
    best = defenses[0]["defense"] if defenses else UNPROTECTED
    lines = sorted({*asked.lines, *map(asked.line, results)})
    attacks = [_attack(at, table[best].get(at, {}), best, asked) for at in lines if at[0] != "none"]
    return {"defenses": defenses, "attacks": _placed(attacks)}


def _placed(contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    """Return the entries: the ranked ones, what is missing, the disqualified ones, no defense."""
    able = [one for one in contenders if one.entry["status"] == "ranked"]
    others = [one for one in contenders if one.entry["status"] != "ranked"]
    others.sort(
        key=lambda one: (
            one.name == (UNPROTECTED,),
            one.entry["status"] == "disqualified",
            -one.entry.get("cells", 0),
            one.name,
        )
    )
    return place(able) + [{"rank": None, "tie": False, **one.entry} for one in others]


# What a track asks for.


def _asked(results: Sequence[Result], track: str) -> _Asked:
    from sentinel_bench import tracks  # pydantic: not at import
    from sentinel_bench.config import Component

    told = tracks.load().tracks.get(track)
    if told is None or not told.attacks:
        own = [item for item in results if item.kind != "attack"]
        lines = sorted({(item.attack, item.mode) for item in own})
        return _Asked(lines, sorted({item.seeds for item in own}), {})
    asked = _Asked([], [(seed, seed, seed) for seed in told.seeds], {})
    modes: dict[str, set[str]] = defaultdict(set)
    for item in results:
        modes[item.attack].add(item.mode)
    for label, found in modes.items():
        if found.isdisjoint(told.modes):
            asked.once[label] = ", ".join(sorted(found))
    for attack in map(Component.parse, told.attacks):
        label = attack.label()
        if label not in modes and _on_weights(attack.name):
            asked.once[label] = "update"
        once = "" if label == "none" else asked.once.get(label)
        asked.lines.extend((label, m) for m in (told.modes if once is None else [once]))
    return asked


def _on_weights(attack: str) -> bool:
    from sentinel_bench import registry

    return attack in registry.attacks.builtins() and registry.attacks.get(attack).axis == "weights"


# What is compared.


@dataclass(frozen=True)
class _Numbers:
    """A complete cell, a number for each seed.

    Damage is inf where a run has none; `speed` is empty where that of a run is not known.
    """

    damage: list[float]
    f1: list[float]
    speed: list[float]


def _defense(name: str, cells: Mapping[Line, Cell], asked: _Asked) -> Contender:
    found: dict[Line, _Numbers] = {}
    lacking: dict[str, list[Line]] = defaultdict(list)
    for line in asked.lines:
        numbers = _numbers(cells.get(line, {}), asked.seeds)
        if isinstance(numbers, str):
            lacking[numbers].append(line)
        else:
            found[line] = numbers
    attacked = {line: numbers for line, numbers in found.items() if line[0] != "none"}
    worst = max(
        attacked, key=lambda at: (fmean(attacked[at].damage), -fmean(attacked[at].f1)), default=None
    )
    attacks = [cells.get(line, {}) for line in asked.lines if line[0] != "none"]
    runs = [cell[seeds] for cell in attacks for seeds in asked.seeds if seeds in cell]
    unharmed = list(filter(_is_valid, cells.get(("none", ""), {}).values()))
    status, reason = _standing(name, unharmed, lacking)
    f1 = _over_cells([numbers.f1 for numbers in attacked.values()])
    speed = _over_cells([numbers.speed for numbers in found.values()])
    at_worst = attacked[worst] if worst else _Numbers([], [], [])
    entry = {
        "defense": name,
        "status": status,
        "reason": reason,
        "worst": worst and {
            **_named(worst), "damage": _shown(at_worst.damage), "f1": interval(at_worst.f1)
        },
        "mean_f1": interval(f1),
        "relative_tps": interval(speed),
        "false_bans": interval(_known(item.scores["false_bans"] for item in unharmed)),
        "broken": sum(map(_is_broken, runs)),
        "attacked": sum(map(_is_valid, runs)),
        "cells": len(found),
        "of": len(asked.lines),
    }  # fmt: skip
    damage = [-value for value in at_worst.damage]
    return Contender(entry, (name,), [damage, at_worst.f1, f1, speed])


def _attack(line: Line, cell: Cell, defense: str, asked: _Asked) -> Contender:
    """Return an attack with what it does to a defense."""
    lacking = _lacks(cell, asked.seeds)
    runs = [] if lacking else [cell[seeds] for seeds in asked.seeds]
    losses = _known(_loss(item, "excess_loss") for item in runs)
    if len(losses) < len(runs):
        lacking, losses = "no number for the excess loss", []
    entry = {
        **_named(line),
        "status": "missing" if lacking else "ranked",
        "reason": lacking,
        "defense": defense,
        "excess_loss": _shown(losses),
    }
    return Contender(entry, line, [losses])


def _standing(
    name: str, unharmed: Iterable[Result], lacking: Mapping[str, list[Line]]
) -> tuple[str, str]:
    """Return status and reason of a defense; `unharmed` are its valid runs without an attack."""
    parts = [f"{what}: {_list(lines)}" for what, lines in lacking.items()]
    if name == UNPROTECTED:
        return "missing", "; ".join([REFERENCE, *parts])
    for item in unharmed:
        bans = item.scores["false_bans"]
        if bans is None or item.workers is None:
            parts.append("not known which share of the workers was banned without an attack")
        elif bans > FALSE_BAN_TOLERANCE * item.workers:
            text = f"{bans:g} of {item.workers} workers banned without an attack"
            return "disqualified", f"{text}, seeds {'/'.join(map(str, item.seeds))}"
    return "missing" if parts else "ranked", "; ".join(dict.fromkeys(parts))


def _numbers(cell: Cell, seeds: Sequence[Seeds]) -> _Numbers | str:
    """Return the numbers of a cell, or what it lacks."""
    lacking = _lacks(cell, seeds)
    if lacking:
        return lacking
    runs = [cell[one] for one in seeds]
    damage = _known(map(_damage, runs))
    f1, speed = (_known(r.scores[name] for r in runs) for name in ("f1", "relative_tps"))
    if len(damage) < len(runs) or len(f1) < len(runs):
        return "no number for damage or F1"
    return _Numbers(damage, f1, speed if len(speed) == len(runs) else [])


def _lacks(cell: Cell, seeds: Sequence[Seeds]) -> str:
    """Return what a cell lacks; empty if it has a valid run with every seed."""
    valid = sum(one in cell and _is_valid(cell[one]) for one in seeds)
    if valid == len(seeds):
        return ""
    if not cell:
        return "not measured"
    return f"valid with {valid} of {len(seeds)} seeds"


def _is_valid(item: Result) -> bool:
    return item.outcome != "invalid"


def _is_broken(item: Result) -> bool:
    return _is_valid(item) and (item.diverged or item.outcome == "broken")


def _damage(item: Result) -> float | None:
    recall = item.scores["recall"]
    if recall is None or recall >= RECALL_FLOOR:
        return None if recall is None else 0.0
    return _loss(item, "undetected_damage")


def _loss(item: Result, name: str) -> float | None:
    """Return a loss, inf where a broken run has none."""
    value = item.scores[name]
    return math.inf if value is None and _is_broken(item) else value


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _over_cells(cells: Sequence[list[float]]) -> list[float]:
    """Return the mean over cells for each seed; empty if one does not know it."""
    return [fmean(values) for values in zip(*cells, strict=True)] if all(cells) else []


def _shown(values: list[float]) -> Interval:
    return interval([] if any(map(math.isinf, values)) else values)


def _named(line: Line) -> dict[str, str]:
    return dict(zip(("attack", "mode"), line, strict=True))


def _list(lines: Sequence[Line]) -> str:
    names = [f"{attack} ({mode})" if mode else attack for attack, mode in lines[:_NAMED]]
    more = len(lines) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
