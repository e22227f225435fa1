"""Group results into rows, one for each attack, mode and defense in a setting, with spread."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sentinel_bench.errors import ConfigError, nearest
from sentinel_bench.leaderboard._cost import costs
from sentinel_bench.leaderboard._damage import defenses
from sentinel_bench.leaderboard._interval import T_95, interval
from sentinel_bench.leaderboard._rank import rankings
from sentinel_bench.leaderboard._read import NUMBERS, Result, read

__all__ = ["T_95", "interval", "newest", "summarize"]


def summarize(results: Sequence[Path], track: str | None = None) -> dict[str, Any]:
    """Return what the leaderboards show, JSON-able and in their order.

    Args:
        results: folders that are searched for `result.json`, or such files.
        track: only this one; default: all.

    Returns:
        `problems`: files left out, each with `path` and `reason`; `tracks`: for each track
        `settings`, `seeds` (the most that a row has), `rankings` (see `_rank.rankings`), `rows`,
        `defenses` (see `_damage.defenses`), `costs` (see `_cost.costs`), `entries` (submissions),
        `notes`, `versions`, `commands`. `values` of a row are those of its `seeds`, in their
        order; None where a cell is invalid or has no number.

    Raises:
        ConfigError: a path does not exist, or there is no usable result (of the track).
    """
    found, problems = read(results)
    by_track: dict[str, list[Result]] = defaultdict(list)
    for item in found:
        by_track[item.track].append(item)
    if not by_track:
        reason = f"; {problems[0].place}: {problems[0].reason}" if problems else ""
        raise ConfigError(f"no usable result.json below {', '.join(map(str, results))}{reason}")
    if track is not None and track not in by_track:
        raise ConfigError(f"no result is of track {track!r}{nearest(track, by_track)}")
    names = sorted(by_track) if track is None else [track]
    return {
        "schema": 1,
        "problems": [{"path": p.place, "reason": p.reason} for p in problems],
        "tracks": {name: _track(name, by_track[name]) for name in names},
    }


def _track(name: str, results: list[Result]) -> dict[str, Any]:
    kept, notes = newest(results)
    groups: dict[tuple[str, str, str, str], list[Result]] = defaultdict(list)
    for item in kept:
        groups[item.defense, item.attack, item.mode, item.scenario].append(item)
    settings: dict[str, str] = {}
    for item in sorted(kept, key=lambda r: (r.scenario, r.setting)):
        settings.setdefault(item.scenario, item.setting)
    rows = [_row(groups[key], list(settings)) for key in sorted(groups, key=_order)]
    most = max(row["n"] for row in rows)
    measured = [item for item in kept if item.kind != "attack"]  # a guest changes no other row
    for row in rows:
        if row["n"] < most:
            row["marks"].append(f"fewer seeds: {row['n']} of {most}")
    return {
        "settings": [
            {"number": number, "digest": digest, "text": text}
            for number, (digest, text) in enumerate(settings.items(), start=1)
        ],
        "seeds": most,
        "rankings": rankings(kept, list(settings), name),
        "rows": rows,
        "defenses": defenses(measured, list(settings)),
        "costs": costs(measured, list(settings)),
        "entries": _entries(kept),
        "notes": notes,
        "versions": _versions(kept),
        "commands": sorted({command for item in kept for command in item.commands}),
    }


def _entries(results: Iterable[Result]) -> list[dict[str, str]]:
    """Return the submissions among the results: what each is called, and its level."""
    found = {
        (item.defense if item.kind == "defense" else item.attack): item.level
        for item in results
        if item.entry
    }
    return [{"subject": subject, "level": level} for subject, level in sorted(found.items())]


def newest(results: Iterable[Result]) -> tuple[list[Result], list[str]]:
    """Keep the newest result of each digest, then of each cell and seeds; note what is left out."""
    notes = []
    kept = list(results)
    for what, key in (
        ("one digest", lambda r: (r.digest, r.entry)),
        ("the same seeds and other versions", _cell),
    ):
        groups: dict[tuple[Any, ...], list[Result]] = defaultdict(list)
        for item in kept:
            groups[key(item)].append(item)
        kept = [max(group, key=lambda r: (r.finished, r.place)) for group in groups.values()]
        for group, newest in zip(groups.values(), kept, strict=True):
            if len(group) > 1:
                seeds = "/".join(map(str, newest.seeds))
                name = f"{newest.attack} {newest.mode}".strip()
                notes.append(
                    f"{name} against {newest.defense}, seeds {seeds}: {len(group)} results of "
                    f"{what}; the newest is kept, {newest.place}"
                )
    return sorted(kept, key=lambda r: (_cell(r), r.place)), sorted(notes)


def _cell(item: Result) -> tuple[Any, ...]:
    return item.defense, item.attack, item.mode, item.scenario, item.seeds


def _order(key: tuple[str, str, str, str]) -> tuple[Any, ...]:
    defense, attack, mode, scenario = key
    return defense != "none", defense, attack != "none", attack, mode, scenario


def _row(results: list[Result], scenarios: list[str]) -> dict[str, Any]:
    valid = [item for item in results if item.outcome != "invalid"]
    first, outcomes = results[0], Counter(item.outcome for item in results)
    invalid = [
        {"seeds": list(item.seeds), "reason": item.reason, "path": item.place}
        for item in results
        if item.outcome == "invalid"
    ]
    marks = [f"{len(invalid)} invalid"] if invalid else []
    marks += sorted({item.level for item in results} - {""})
    if any(item.scores["attackers"] and not item.scores["acted"] for item in valid):
        marks.append("no attacker acted")
    if len({(item.tuned, item.code) for item in valid}) > 1:
        marks.append("seeds of different code or settings")
    bare = first.attack == "none" and first.defense == "none"
    if not bare and any(item.scores["excess_loss"] is None for item in valid):
        marks.append("excess loss unknown for some seeds")
    values = {
        name: interval([v for item in valid if (v := item.scores[name]) is not None])
        for name in NUMBERS
    }
    return {
        "defense": first.defense,
        "attack": first.attack,
        "mode": first.mode,
        "knowledge": ", ".join(sorted({item.knowledge for item in results} - {""})),
        "tuned": sorted({item.tuned for item in results} - {"{}"}),
        "setting": scenarios.index(first.scenario) + 1,
        "seeds": [dict(zip(("model", "data", "threat"), r.seeds, strict=True)) for r in results],
        "n": len(valid),
        "metrics": values,
        "values": {
            name: [None if r.outcome == "invalid" else r.scores[name] for r in results]
            for name in NUMBERS
        },
        "diverged": sum(item.diverged for item in valid),
        "outcomes": {name: outcomes[name] for name in ("defended", "broken", "invalid")},
        "invalid": invalid,
        "marks": marks,
    }


def _versions(results: Iterable[Result]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for item in results:
        for name, version in item.versions:
            found[name].add(version)
    return {name: sorted(found[name]) for name in sorted(found)}
