"""A track as its pages need it: the summary, the cells behind each row, and their curves."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from sentinel_bench.leaderboard._read import Result, read
from sentinel_bench.leaderboard._summary import summarize
from sentinel_bench.leaderboard.site._curves import Curves, read_curves

Row = Mapping[str, Any]
Key = tuple[str, str, str, int]  # defense, attack, mode, number of the setting
LONGEST = 48
"""Characters of a name in the name of a file."""


@dataclass(frozen=True)
class Seeded:
    """The curves of one cell with its seeds, or why there are none."""

    seeds: tuple[int, ...]
    curves: Curves | None
    reason: str = ""


@dataclass
class Board:
    """One track.

    Attributes:
        name: of the track.
        content: its part of `summarize`, with `problems` and `cells`; JSON-able.
        curves: of the cells of each row, in the order of their seeds.
    """

    name: str
    content: dict[str, Any]
    curves: Mapping[Key, Sequence[Seeded]] = field(default_factory=dict)

    @cached_property
    def defenses(self) -> list[str]:
        """All defenses, `none` first."""
        return _names(row["defense"] for row in self.content["rows"])

    @cached_property
    def attacks(self) -> list[str]:
        """All attacks, `none` first."""
        return _names(row["attack"] for row in self.content["rows"])

    @property
    def numbered(self) -> bool:
        """True if there are rows of more than one setting."""
        return len(self.content["settings"]) > 1


def load(results: Sequence[Path]) -> list[Board]:
    """Read all tracks below some folders.

    Raises:
        ConfigError: a path does not exist, or there is no usable result.
    """
    summary = summarize(results)
    by_track: dict[str, list[Result]] = defaultdict(list)
    for item in read(results)[0]:
        by_track[item.track].append(item)
    boards = []
    for name, content in summary["tracks"].items():
        settings = {s["digest"]: s["number"] for s in content["settings"]}
        kept = _newest(by_track[name])
        curves: dict[Key, list[Seeded]] = defaultdict(list)
        for item in kept:
            found = read_curves(item)
            good = found if isinstance(found, Curves) else None
            reason = found if isinstance(found, str) else ""
            curves[_key(item, settings)].append(Seeded(item.seeds, good, reason))
        cells = [_cell(item, settings) for item in kept]
        content |= {"cells": cells, "problems": summary["problems"]}
        boards.append(Board(name, content, curves))
    return boards


def _newest(results: Iterable[Result]) -> list[Result]:
    """Return the results that the summary keeps, in the order of their seeds."""
    found = {
        (r.defense, r.attack, r.mode, r.scenario, r.seeds): r
        for r in sorted(results, key=lambda r: (r.finished, r.place))
    }
    return sorted(found.values(), key=lambda r: (r.seeds, r.place))


def key_of(row: Row) -> Key:
    """Return what a row of the summary is about."""
    return row["defense"], row["attack"], row["mode"], row["setting"]


def _key(item: Result, settings: Mapping[str, int]) -> Key:
    return item.defense, item.attack, item.mode, settings[item.scenario]


def _cell(item: Result, settings: Mapping[str, int]) -> dict[str, Any]:
    return {
        "defense": item.defense,
        "attack": item.attack,
        "mode": item.mode,
        "setting": settings[item.scenario],
        "seeds": list(item.seeds),
        "digest": item.digest,
        "code": item.code,
        "outcome": item.outcome,
        "reason": item.reason,
        "place": item.place,
        "scores": dict(item.scores),
        "commands": list(item.commands),
    }


def _names(found: Iterable[str]) -> list[str]:
    return sorted({*found}, key=lambda name: (name != "none", name))


def file_of(kind: str, name: str) -> str:
    """Return the name of the file of an entry: plain, short, and another for each entry.

    What had to be changed for that is told apart by digits of a digest.
    """
    plain = re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-.")[:LONGEST]
    if plain != name or not name:
        plain = f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}".lstrip("-")
    return f"{kind}-{plain}.html"
