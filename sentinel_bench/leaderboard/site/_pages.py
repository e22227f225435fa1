"""Renders the pages of the site from its templates."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from sentinel_bench import __version__
from sentinel_bench.leaderboard._cost import price
from sentinel_bench.leaderboard.site import _over_time, _tables
from sentinel_bench.leaderboard.site._board import Board, file_of, key_of
from sentinel_bench.leaderboard.site._charts import swatch
from sentinel_bench.leaderboard.site._metrics import METRICS, legend
from sentinel_bench.leaderboard.site._scatter import legend as scatter_legend
from sentinel_bench.leaderboard.site._scatter import scatter
from sentinel_bench.report._numbers import count, number

if TYPE_CHECKING:
    from jinja2 import Environment

Row = Mapping[str, Any]
KINDS = ("defense", "attack")


@cache
def environment() -> Environment:
    """Return the templates, with escaping."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("sentinel_bench.leaderboard.site"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"number": number, "count": count}
    found.globals |= {"version": __version__}
    return found


def index(boards: Sequence[Board]) -> str:
    """Return the first page."""
    tracks = [
        {
            "name": board.name,
            "settings": board.content["settings"],
            "numbered": board.numbered,
            "defenses": len(board.defenses),
            "attacks": len([name for name in board.attacks if name != "none"]),
            "cells": len(board.content["cells"]),
            "invalid": sum(row["outcomes"]["invalid"] for row in board.content["rows"]),
            "seeds": board.content["seeds"],
            "worth": _tables.worth(board),
            "ranked": bool(board.content.get("rankings")),
        }
        for board in boards
    ]
    problems = {(p["path"], p["reason"]) for board in boards for p in board.content["problems"]}
    return environment().get_template("index.html").render(
        root="", tracks=tracks, problems=sorted(problems), metrics=METRICS
    )  # fmt: skip


def pages(board: Board, files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield name and HTML of each page of a track.

    Args:
        board: the track.
        files: of the track, outside of the site, that exist: CSV and others.
    """
    yield "index.html", _track(board, files)
    for kind in KINDS:
        for name in board.defenses if kind == "defense" else board.attacks:
            yield file_of(kind, name), _entry(board, kind, name)


def _track(board: Board, files: Sequence[str]) -> str:
    content = board.content
    rows, numbers = content["rows"], [s["number"] for s in content["settings"]]
    shown = _tables.columns(rows)
    return environment().get_template("track.html").render(
        root="../../",
        board=board,
        content=content,
        files=files,
        worth=_tables.worth(board),
        rankings=[_tables.ranking(board, found) for found in content.get("rankings", [])],
        matrices=[_tables.matrix(board, number) for number in numbers],
        metrics=METRICS,
        legends=[(metric, legend(metric)) for metric in METRICS],
        scatters=[(number, scatter(board, number)) for number in numbers],
        marks=scatter_legend(board),
        columns=shown,
        rows=_tables.table(rows, shown),
        modes=sorted({row["mode"] for row in rows} - {""}),
        reasons=_tables.reasons(rows),
    )  # fmt: skip


def _entry(board: Board, kind: str, name: str) -> str:
    rows = _tables.rows_of(board, kind, name)
    shown = _tables.columns(rows)
    cells = [cell for cell in board.content["cells"] if cell[kind] == name]
    draw = _of_defense if kind == "defense" else _of_attack
    sections: list[dict[str, Any]] = [
        {"item": item, "charts": draw(board, item["row"])}
        for item in (_tables.table(rows, shown) if kind == "defense" else _lines(board, rows))
    ]
    return environment().get_template("entry.html").render(
        root="../../",
        board=board,
        kind=kind,
        name=name,
        columns=shown,
        rows=_tables.table(rows, shown),
        sections=sections,
        drawn=[s["item"]["anchor"] for s in sections if s["charts"]],
        missing=_missing(board, sections),
        worth=[w for w in _tables.worth(board) if kind == "defense" and w["defense"] == name],
        costs=[
            (c["setting"], price(c)) for c in board.content["costs"]
            if kind == "defense" and c["defense"] == name
        ],
        levels=[e["level"] for e in board.content["entries"] if e["subject"] == name],
        tuned=sorted({text for row in rows for text in row["tuned"]}),
        knowledge=sorted({row["knowledge"] for row in rows} - {""}),
        codes=sorted({cell["code"][:12] for cell in cells} - {""}),
        seeds=sorted({tuple(cell["seeds"]) for cell in cells}),
        reasons=_tables.reasons(rows),
        command=command(board, kind, name, rows),
        commands=sorted({line for cell in cells for line in cell["commands"]}),
        looks=_looks(board, rows) if kind == "attack" else [],
        swatches=[swatch(*look) for look in (_over_time.BASE, _over_time.FREE, _over_time.OWN)],
    )  # fmt: skip


def _lines(board: Board, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the first row of each mode and setting of an attack."""
    first: dict[tuple[str, int], Row] = {}
    for row in rows:
        first.setdefault((row["mode"], row["setting"]), row)
    return _tables.table([*first.values()], ())


def _missing(board: Board, sections: Sequence[Row]) -> list[tuple[str, list[Any]]]:
    """Return why there is nothing to draw, with the rows that this holds for."""
    found: dict[str, list[Any]] = {}
    for section in sections:
        if not section["charts"]:
            cells = board.curves.get(key_of(section["item"]["row"]), ())
            reasons = sorted({cell.reason for cell in cells} - {""})
            words = f"Curves that cannot be shown ({'; '.join(reasons)}):" if reasons else ""
            found.setdefault(words or "No curves were recorded for:", []).append(section["item"])
    return [*found.items()]


def _of_defense(board: Board, row: Row) -> list[_over_time.Chart]:
    """Return the charts of one attack against a defense."""
    defense, attack, mode, setting = key_of(row)
    own = _over_time.found(board.curves.get((defense, attack, mode, setting), ()))
    if not own:
        return []
    groups = [(own, _over_time.OWN)]
    if defense != "none" and attack != "none":
        free = board.curves.get(("none", attack, mode, setting), ())
        groups.insert(0, (_over_time.found(free), _over_time.FREE))
    if (defense, attack) != ("none", "none"):
        base = board.curves.get(("none", "none", "", setting), ())
        groups.insert(0, (_over_time.found(base), _over_time.BASE))
    drawn = [_over_time.losses(groups), _over_time.bans(own), _over_time.flags(own)]
    return [*filter(None, drawn), *_over_time.workers(own[0])]


def _of_attack(board: Board, row: Row) -> list[_over_time.Chart]:
    """Return the losses under an attack, a line for each defense, of the first seeds."""
    _, attack, mode, setting = key_of(row)
    base = _over_time.found(board.curves.get(("none", "none", "", setting), ()))[:1]
    groups = [(base, _over_time.BASE)]
    for number_, defense in enumerate(board.defenses):
        own = _over_time.found(board.curves.get((defense, attack, mode, setting), ()))[:1]
        groups.append((own, _over_time.by_defense(number_)))
    drawn = _over_time.losses(groups) if any(own for own, _ in groups[1:]) else None
    return [drawn] if drawn else []


def _looks(board: Board, rows: Sequence[Row]) -> list[tuple[str, Any]]:
    measured = {row["defense"] for row in rows}
    return [
        (name, swatch(*_over_time.by_defense(number_)))
        for number_, name in enumerate(board.defenses)
        if name in measured
    ]


def command(board: Board, kind: str, name: str, rows: Sequence[Row]) -> str:
    """Return a command that runs an entry against everything that it was measured with.

    Empty for a submission, whose plugin has another name.
    """
    if " @ " in name:
        return ""
    others = {row["attack" if kind == "defense" else "defense"] for row in rows}
    attacks = sorted(others) if kind == "defense" else [name]
    defenses = [name] if kind == "defense" else sorted(d for d in others if " @ " not in d)
    words = ["sentinel-bench", "run", "--track", board.name]
    for attack in attacks:
        if " @ " not in attack:
            words += ["--attack", attack]
    for rule in sorted({d.partition(" + ")[2] for d in defenses}):
        chosen = [d.partition(" + ")[0] for d in defenses if d.partition(" + ")[2] == rule]
        if kind == "defense" or not rule:
            words += [word for d in chosen for word in ("--defense", d)]
            words += ["--aggregator", rule] * bool(rule)
    seeds = sorted({seeds["model"] for row in rows for seeds in row["seeds"]})
    return shlex.join([*words, "--seeds", ",".join(map(str, seeds)), "--out", "runs", "--resume"])
