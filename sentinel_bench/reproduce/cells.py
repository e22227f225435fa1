"""From the rows of a published table to cells of ours, and from results back to these cells."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sentinel_bench import leaderboard, registry, suite, tracks
from sentinel_bench.config import Cell, Component, Scenario, merge
from sentinel_bench.errors import ConfigError
from sentinel_bench.reproduce.published import Row, Scale, rows
from sentinel_bench.score import scenario_digest

Key = tuple[str | int, ...]
"""What names a cell in results: attack, mode, protection, settings, scenario, seeds."""
LONGEST = 200  # characters of a reason
_DEALERS = ("none", "mixed")
"""Attacks for which the mode of the scenario does not count."""


@dataclass(frozen=True)
class Trio:
    """The cells of a row with one seed.

    Attributes:
        baseline: neither attack nor defense.
        unprotected: the attack alone, the baseline if there is none; None where no table prints it.
        protected: the attack against the defense; None if no defense was published.
    """

    baseline: Cell
    unprotected: Cell | None
    protected: Cell | None


@dataclass(frozen=True)
class Outcome:
    """What a result says of its cell.

    Attributes:
        scores: numbers by name, None where there is none; those of `leaderboard.read`.
        diverged: the final loss is not finite.
        reason: why it says nothing, empty if it does.
        versions: of the software that made it.
    """

    scores: Mapping[str, float | None]
    diverged: bool
    reason: str
    versions: tuple[tuple[str, str], ...] = ()


@dataclass
class Reproduction:
    """What is held against a table at one scale.

    Attributes:
        rows: the chosen rows, in order.
        trios: number of a row to its cells, one item per seed; none without a counterpart.
        plan: every cell once.
    """

    name: str
    scale: Scale
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    trios: dict[int, list[Trio]] = field(default_factory=dict)
    plan: suite.Plan = field(default_factory=suite.Plan)


def reproduction(
    name: str, scale: Scale, seeds: Sequence[int], numbers: Iterable[int] = (), device: str = "cpu"
) -> Reproduction:
    """Return the cells of a table.

    Args:
        name: of the table.
        scale: which counterparts.
        seeds: each for model, data and threat alike.
        numbers: of the rows, from 1; none: all.
        device: where they are to run.

    Raises:
        ConfigError: no such table or row, no row with a counterpart, or cells that cannot be run.
    """
    found = Reproduction(name, scale, tuple(seeds), tuple(_chosen(name, set(numbers))))
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in found.rows:
        target = row.target(scale)
        if not target.missing:
            alike = (
                target.model_dump_json(exclude={"note"}),
                _scenario(row, scale, device).model_dump_json(),
            )
            groups.setdefault(alike, []).append(row)
    if not groups:
        raise ConfigError(_nothing(found))
    bare = any(row.unprotected is not None for row in found.rows)
    for members in groups.values():
        plan = _plan(members, scale, seeds, device, bare)
        for row in members:
            found.trios[row.number] = [_trio(row, scale, cells) for _, cells in plan.groups]
        found.plan.groups += plan.groups
    found.plan = suite.share_warmups(found.plan)
    return found


def spelled(attack: Component) -> Component:
    """Return an attack as the tracks spell it: results are found by name."""
    whole = registry.attacks.params(attack)
    texts = dict.fromkeys(text for track in tracks.load().tracks.values() for text in track.attacks)
    for other in map(Component.parse, texts):
        if other.name == attack.name and registry.attacks.params(other) == whole:
            return other
    return attack


def key_of(cell: Cell) -> Key:
    """Return what names a cell in results."""
    given = {} if "values" in cell.defense.params else cell.tuned
    seeds = cell.scenario.seeds
    return (
        cell.attack.label(),
        "" if cell.attack.name in _DEALERS else cell.scenario.threat.mode,
        cell.protection,
        json.dumps(given, sort_keys=True),
        scenario_digest(cell.scenario),
        *(seeds.model, seeds.data, seeds.threat),
    )


def of_runs(finished: Iterable[suite.Finished]) -> dict[Key, Outcome]:
    """Return what cells that were just run, or reused, say."""
    return {key_of(item.cell): _outcome(item.result) for item in finished}


def of_files(roots: Sequence[Path]) -> tuple[dict[Key, Outcome], list[str]]:
    """Return what all `result.json` below some folders say, and which were left out and why.

    Of one cell the newest is taken.

    Raises:
        ConfigError: a folder does not exist.
    """
    found: dict[Key, Outcome] = {}
    results, problems = leaderboard.read(roots)
    for item in sorted(results, key=lambda r: (r.finished, r.place)):
        if item.entry:  # of a submission, under another name
            continue
        mode = "" if item.attack.partition(":")[0] in _DEALERS else item.mode
        key: Key = (item.attack, mode, item.defense, item.tuned, item.scenario, *item.seeds)
        reason = _plain(item.reason or "no reason") if item.outcome == "invalid" else ""
        found[key] = Outcome(item.scores, item.diverged, reason, item.versions)
    return found, [_plain(f"{problem.place}: {problem.reason}") for problem in problems]


def _plain(text: str) -> str:
    """Return text of a file of others as one short line that a terminal shows as it is."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def _outcome(result: Mapping[str, Any]) -> Outcome:
    scores, source = result["scores"], result["provenance"]
    reason = (scores["reason"] or "no reason") if scores["outcome"] == "invalid" else ""
    versions = {**source["packages"], "python": source["python"]}
    return Outcome(
        scores=scores,
        diverged=scores["diverged"] is True,
        reason=reason,
        versions=tuple(sorted((k, v) for k, v in versions.items() if v is not None)),
    )


def _chosen(name: str, numbers: set[int]) -> list[Row]:
    known = rows(name)
    wrong = sorted(numbers - {row.number for row in known})
    if wrong:
        raise ConfigError(f"{name} has rows 1 to {len(known)}, not {', '.join(map(str, wrong))}")
    return [row for row in known if not numbers or row.number in numbers]


def _scenario(row: Row, scale: Scale, device: str) -> Scenario:
    target = row.target(scale)
    changes: dict[str, Any] = {"device": device}
    if row.mode in ("activation", "gradient"):
        changes["threat"] = {"mode": row.mode}
    return tracks.scenario(target.track, merge(target.scenario, changes))


def _plan(
    members: Sequence[Row], scale: Scale, seeds: Sequence[int], device: str, bare: bool
) -> suite.Plan:
    """Return the cells of rows with the same scenario, defense and aggregator."""
    target = members[0].target(scale)
    defenses = [] if target.defense is None else [target.defense]
    return suite.make_plan(
        suite.with_seeds(_scenario(members[0], scale, device), seeds),
        [spelled(row.attack) for row in members if row.attack],
        defenses,
        {d.name: tracks.tuned(target.track, d) for d in defenses},
        [target.aggregator],
        unprotected=bare or not defenses,
    )


def _trio(row: Row, scale: Scale, cells: Sequence[Cell]) -> Trio:
    target, attack = row.target(scale), spelled(row.attack or suite.NONE)
    own = [cell for cell in cells if cell.attack == attack]
    baseline = next(cell for cell in cells if cell.is_baseline)
    return Trio(
        baseline=baseline,
        unprotected=next((c for c in own if c.protection == "none"), None),
        protected=next((c for c in own if target.defense and c.defense == target.defense), None),
    )


def _nothing(found: Reproduction) -> str:
    reasons = dict.fromkeys(row.target(found.scale).missing for row in found.rows)
    other: Scale = "paper" if found.scale == "tiny" else "tiny"
    there = any(not row.target(other).missing for row in found.rows)
    hint = f"; --scale {other} has one" if there else ""
    return f"{found.name} has no counterpart at scale {found.scale}: {'; '.join(reasons)}{hint}"
