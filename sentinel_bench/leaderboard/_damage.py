"""What each defense lets through, attacks weighted by the damage that they do without a defense."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from sentinel_bench.leaderboard._read import Result
from sentinel_bench.score import RECALL_FLOOR

UNPROTECTED = "none"

Seeds = tuple[int, ...]
Attack = tuple[str, str]  # name with parameters, mode
Attacks = Mapping[Attack, Mapping[Seeds, Result]]


def defenses(results: Iterable[Result], scenarios: Sequence[str]) -> list[dict[str, Any]]:
    """Return one entry for each defense in each setting, in the order of the results.

    * `damage_weighted_recall`: sum(harm_a * recall_a) / sum(harm_a) over the `attacks` that were
      measured with and without the defense, over the seeds that are valid in both. harm_a is the
      mean excess loss of the attack without a defense, at least 0. None if no attack does harm.
    * `diverged`: attacks left out of it, because a model without a defense diverged: their harm has
      no number.
    * `undetected`: the largest mean undetected damage over all `attacks` that the defense was
      measured against, the `attack` that does it, and `diverged`: attacks that made a model
      diverge with a recall below one half, whose damage has no number.

    Args:
        results: of one track, one for each cell and seeds.
        scenarios: digests of the settings, in the order of their numbers.
    """
    tables: dict[tuple[str, str], dict[Attack, dict[Seeds, Result]]] = defaultdict(dict)
    for item in results:
        if item.outcome != "invalid" and item.attack != "none":
            table = tables[item.defense, item.scenario]
            table.setdefault((item.attack, item.mode), {})[item.seeds] = item
    return [
        {
            "defense": defense,
            "setting": scenarios.index(scenario) + 1,
            **_weighted(attacks, tables.get((UNPROTECTED, scenario), {})),
            "undetected": _undetected(attacks),
        }
        for (defense, scenario), attacks in tables.items()
    ]


def _weighted(attacks: Attacks, unprotected: Attacks) -> dict[str, Any]:
    harms, recalls, diverged = [], [], []
    for attack, protected in attacks.items():
        free = unprotected.get(attack, {})
        seeds = [s for s in protected if s in free and _measured(protected[s], free[s])]
        if any(free[s].diverged for s in seeds):
            diverged.append(_name(attack))
        elif seeds:
            harms.append(max(0.0, fmean(free[s].scores["excess_loss"] or 0.0 for s in seeds)))
            recalls.append(fmean(protected[s].scores["recall"] or 0.0 for s in seeds))
    total = sum(harms)
    weighted = sum(harm * recall for harm, recall in zip(harms, recalls, strict=True))
    return {
        "damage_weighted_recall": weighted / total if total else None,
        "attacks": len(harms),
        "diverged": sorted(diverged),
    }


def _measured(protected: Result, free: Result) -> bool:
    known = free.diverged or free.scores["excess_loss"] is not None
    return known and protected.scores["recall"] is not None


def _undetected(attacks: Attacks) -> dict[str, Any]:
    damages: dict[str, float] = {}
    diverged = []
    for attack, by_seeds in attacks.items():
        found = [v for r in by_seeds.values() if (v := r.scores["undetected_damage"]) is not None]
        if found:
            damages[_name(attack)] = fmean(found)
        if any(_lost_unseen(item) for item in by_seeds.values()):
            diverged.append(_name(attack))
    worst = max(sorted(damages), key=damages.__getitem__, default=None)
    return {
        "damage": None if worst is None else damages[worst],
        "attack": worst if worst is not None and damages[worst] > 0 else None,
        "attacks": len(damages.keys() | set(diverged)),
        "diverged": sorted(diverged),
    }


def _lost_unseen(item: Result) -> bool:
    recall = item.scores["recall"]
    return item.diverged and recall is not None and recall < RECALL_FLOOR


def _name(attack: Attack) -> str:
    label, mode = attack
    return f"{label} ({mode})" if mode else label
