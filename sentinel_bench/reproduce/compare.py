"""A published table beside our results: numbers, signs, order, and what is missing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sentinel_bench.config import Cell, Component
from sentinel_bench.leaderboard import interval
from sentinel_bench.reproduce import agreement, published
from sentinel_bench.reproduce.cells import Key, Outcome, Reproduction, Trio, key_of, spelled
from sentinel_bench.reproduce.published import Row

Data = dict[str, Any]
_UNDER_DEFENSE = {
    "precision": "precision",
    "recall": "recall",
    "f1": "f1",
    "detection_steps": "detection_steps_mean",
    "tps": "relative_tps",
}
"""Our name of a metric of a protected run to its name in results."""
LARGEST = 700.0
"""Losses above it have no finite perplexity."""


def compare(found: Reproduction, outcomes: Mapping[Key, Outcome]) -> Data:
    """Return a table beside our results, JSON-able and a function of its arguments alone.

    Args:
        found: the rows and their cells.
        outcomes: what results say; cells that are not there are missing.

    Returns:
        `rows`: for each row `published` and `own` numbers (mean, half width of the 95 % interval,
        n, and how many diverged), `signs`, its `verdict`, `problems` with cells, or in
        `missing` why it has no counterpart; `order` by metric; `counts` of the verdicts;
        `cells`, how many there are and how many with a result; `settings`, `notes`, `versions`.
    """
    table, spread = published.get(found.name), published.load().spread
    rows = [_row(row, found, outcomes, spread) for row in found.rows]
    used = [outcomes[key] for key in map(key_of, found.plan.cells) if key in outcomes]
    sources = dict.fromkeys(row.source for row in found.rows)
    notes = [note for name in sources for note in published.get(name).notes]
    return {
        "schema": 1,
        "name": found.name,
        "title": table.title,
        "scale": found.scale,
        "seeds": list(found.seeds),
        "settings": list(dict.fromkeys(_setting(cell) for cell in found.plan.cells)),
        "cells": {"planned": len(found.plan.cells), "with_result": len(used)},
        "rows": rows,
        "order": {name: _order(name, rows) for name in agreement.ORDERS if _prints(name, rows)},
        "counts": _counts(rows),
        "notes": list(dict.fromkeys([*(table.notes if table.of else []), *notes])),
        "versions": _versions(used),
    }


def _row(row: Row, found: Reproduction, outcomes: Mapping[Key, Outcome], spread: float) -> Data:
    target = row.target(found.scale)
    told = agreement.published_signs(row, spread)
    trios = found.trios.get(row.number, [])
    data: Data = {
        "number": row.number,
        "source": row.source,
        "settings": row.settings,
        "mode": row.mode,
        "attack": row.attack and spelled(row.attack).label(),
        "defense": target.defense and _protection(target.defense, target.aggregator),
        "tuned": next((t.protected.tuned for t in trios if t.protected), {}),
        "note": target.note,
        "missing": target.missing,
        "published": _published(row),
        "own": None,
        "problems": [],
        "signs": {"published": told, "own": None},
        "verdicts": {},
        "verdict": None,
    }
    if target.missing:
        return data
    seeds = [_Seed(trio, seed, outcomes) for trio, seed in zip(trios, found.seeds, strict=True)]
    signs = agreement.own_signs(_own_sides(seeds))
    verdicts = agreement.judge(told, signs)
    data["own"] = _own(seeds)
    data["problems"] = _problems(seeds)
    data["signs"]["own"] = {name: signs[name] for name in verdicts}
    data["verdicts"] = verdicts
    data["verdict"] = agreement.whole(verdicts.values())
    return data


class _Seed:
    """What the results of one row say with one seed."""

    def __init__(self, trio: Trio, seed: int, outcomes: Mapping[Key, Outcome]) -> None:
        self.problems: list[str] = []
        self.seed = seed
        self._attacked = trio.unprotected not in (None, trio.baseline)
        self.baseline = self._find("without attack and defense", trio.baseline, outcomes)
        self.unprotected = self._find("without defense", trio.unprotected, outcomes)
        self.protected = self._find("with defense", trio.protected, outcomes)

    def _find(
        self, what: str, cell: Cell | None, outcomes: Mapping[Key, Outcome]
    ) -> Outcome | None:
        if cell is None:
            return None
        outcome = outcomes.get(key_of(cell))
        problem = _problem(cell, outcome)
        if problem:
            self.problems.append(f"{what}: {problem}")
        return None if problem else outcome

    def loss(self, outcome: Outcome | None) -> float | None:
        """Return the final loss; infinite if it is not finite."""
        if outcome is None:
            return None
        return math.inf if outcome.diverged else outcome.scores["validation_loss"]

    def excess(self, outcome: Outcome | None) -> float | None:
        """Return the loss less that of plain training; None also for a run that ended early."""
        loss, plain = self.loss(outcome), self.loss(self.baseline)
        if outcome is None or loss is None or plain is None:
            return None
        if outcome is self.baseline:
            return 0.0
        if not outcome.diverged and outcome.scores["excess_loss"] is None:
            return None
        return loss - plain

    @property
    def gain(self) -> float | None:
        """How much nearer the defense brings the loss to that of plain training."""
        bare, kept = self.excess(self.unprotected), self.excess(self.protected)
        if bare is None or kept is None or not self._attacked:
            return None
        return 0.0 if math.isinf(bare) and math.isinf(kept) else abs(bare) - abs(kept)


def _problem(cell: Cell, outcome: Outcome | None) -> str:
    """Return why a result says nothing about its cell, empty if it does."""
    if outcome is None:
        return "no result"
    if outcome.reason:
        return f"invalid: {outcome.reason}"
    if cell.attack.name != "none" and outcome.scores["acted"] == 0:
        return "no attacker acted"
    if not outcome.diverged and outcome.scores["validation_loss"] is None:
        return "no validation loss"
    return ""


def _problems(seeds: Sequence[_Seed]) -> list[str]:
    """Return what is missing, with the seeds in which it is."""
    found: dict[str, list[int]] = {}
    for one in seeds:
        for problem in one.problems:
            found.setdefault(problem, []).append(one.seed)
    return [
        f"{problem} (seed{'s' * (len(which) > 1)} {', '.join(map(str, which))})"
        for problem, which in found.items()
    ]


def _own_sides(seeds: Sequence[_Seed]) -> agreement.Own:
    protected = [seed.protected.scores for seed in seeds if seed.protected]
    return agreement.Own(
        precision=_known([scores["precision"] for scores in protected]),
        recall=_known([scores["recall"] for scores in protected]),
        excess=_known([seed.excess(seed.unprotected) for seed in seeds]),
        gain=_known([seed.gain for seed in seeds]),
        plain=_known([seed.loss(seed.baseline) for seed in seeds]),
    )


def _own(seeds: Sequence[_Seed]) -> Data:
    protected = [seed.protected.scores for seed in seeds if seed.protected]
    values = {
        ours: [scores.get(name) for scores in protected] for ours, name in _UNDER_DEFENSE.items()
    }
    for name, cell in (("", "protected"), ("_unprotected", "unprotected")):
        outcomes = [getattr(seed, cell) for seed in seeds]
        pairs = list(zip(seeds, outcomes, strict=True))
        values[f"val_loss{name}"] = [seed.loss(outcome) for seed, outcome in pairs]
        values[f"excess{name}"] = [seed.excess(outcome) for seed, outcome in pairs]
    values["val_loss_vanilla"] = [seed.loss(seed.baseline) for seed in seeds]
    for name, of in (("clean", "_vanilla"), ("attacked", "_unprotected"), ("defended", "")):
        values[f"perplexity_{name}"] = [_perplexity(loss) for loss in values[f"val_loss{of}"]]
    return {name: _spread(_known(found)) for name, found in values.items()}


def _spread(values: Sequence[float]) -> Data:
    finite = [value for value in values if math.isfinite(value)]
    return {**interval(finite), "diverged": len(values) - len(finite)}


def _perplexity(loss: float | None) -> float | None:
    return None if loss is None else math.exp(loss) if loss < LARGEST else math.inf


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _published(row: Row) -> Data:
    numbers = row.numbers.model_dump(exclude_none=True)
    if row.baseline is not None:
        if row.protected is not None:
            numbers["excess"] = row.protected - row.baseline
        if row.unprotected is not None:
            numbers["excess_unprotected"] = row.unprotected - row.baseline
    return numbers


def _order(metric: str, rows: Sequence[Data]) -> Data:
    pairs = []
    for row in rows:
        own = (row["own"] or {}).get(metric, {"mean": None, "diverged": 0})
        mean = math.inf if own["diverged"] else own["mean"]
        if metric in row["published"] and row["attack"] != "none" and mean is not None:
            pairs.append((row["published"][metric], mean))
    return agreement.order(pairs)


def _prints(metric: str, rows: Sequence[Data]) -> bool:
    return any(metric in row["published"] for row in rows)


def _counts(rows: Sequence[Data]) -> Data:
    """Count rows by verdict, and the signs of all rows by name and verdict."""
    measured = [row for row in rows if not row["missing"]]
    signs = {
        name: Counter(row["verdicts"][name] for row in measured if row["verdicts"].get(name))
        for name in agreement.SIGNS
    }
    return {
        "rows": len(rows),
        "no_counterpart": len(rows) - len(measured),
        "not_judged": sum(row["verdict"] is None for row in measured),
        **{v: sum(row["verdict"] == v for row in measured) for v in agreement.VERDICTS},
        "signs": {
            name: {verdict: found[verdict] for verdict in agreement.VERDICTS}
            for name, found in signs.items()
            if found
        },
    }


def _setting(cell: Cell) -> str:
    """Say a scenario in words."""
    s = cell.scenario
    return (
        f"{s.model.preset}, corpus {s.data.name}, {s.grid.stages} stages x {s.grid.replicas} "
        f"replicas, {s.train.steps} steps of which {s.train.warmup_steps} warm-up, batch "
        f"{s.train.batch_size} x {s.train.seq_len} tokens a worker, lr {s.train.lr:g}, "
        f"{s.threat.fraction:.1%} attackers, schedule {s.threat.schedule}, {s.device}"
    )


def _protection(defense: Component, aggregator: Component) -> str:
    robust = [] if aggregator.name == "mean" else [aggregator.label()]
    return " + ".join([defense.label(), *robust])


def _versions(used: Sequence[Outcome]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for outcome in used:
        for name, version in outcome.versions:
            found.setdefault(name, set()).add(version)
    return {name: sorted(found[name]) for name in sorted(found)}
