"""The tables of the pages: rows, the matrix of attacks and defenses, rankings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sentinel_bench.leaderboard._cost import price
from sentinel_bench.leaderboard.site._board import Board, file_of
from sentinel_bench.leaderboard.site._metrics import (
    BACKDOOR,
    COLUMNS,
    METRICS,
    Metric,
    cell,
    interval,
    speed,
)

Row = Mapping[str, Any]


def columns(rows: Sequence[Row]) -> tuple[Metric, ...]:
    """Return the numbers that are shown: those of backdoors only where there is one."""
    backdoor = any(row["metrics"][BACKDOOR[0].key]["n"] for row in rows)
    return COLUMNS + BACKDOOR * backdoor


def table(rows: Sequence[Row], shown: Sequence[Metric]) -> list[dict[str, Any]]:
    """Return rows as templates need them."""
    return [
        {
            "row": row,
            "attack": file_of("attack", row["attack"]),
            "defense": file_of("defense", row["defense"]),
            "anchor": anchor(row),
            "cells": [cell(row, metric) for metric in shown],
            "outcome": ", ".join(f"{n} {name}" for name, n in row["outcomes"].items() if n),
            "marks": "; ".join(row["marks"]),
        }
        for row in rows
    ]


def anchor(row: Row) -> str:
    """Return the id of a row on the page of its defense."""
    attack = file_of("attack", row["attack"]).removesuffix(".html")
    mode = file_of("mode", row["mode"]).removesuffix(".html") if row["mode"] else "mode"
    return f"{attack}-{mode}-{row['setting']}"


def matrix(board: Board, setting: int) -> dict[str, Any]:
    """Return attacks x defenses of a setting; None where nothing was measured."""
    rows = [row for row in board.content["rows"] if row["setting"] == setting]
    found = {(row["attack"], row["mode"], row["defense"]): row for row in rows}
    defenses = [name for name in board.defenses if any(key[2] == name for key in found)]
    lines = sorted({key[:2] for key in found}, key=lambda line: (line[0] != "none", *line))
    return {
        "setting": setting,
        "defenses": [(name, file_of("defense", name)) for name in defenses],
        "lines": [
            {
                "attack": attack,
                "mode": mode,
                "file": file_of("attack", attack),
                "cells": [_field(found.get((attack, mode, name))) for name in defenses],
            }
            for attack, mode in lines
        ],
    }


def _field(row: Row | None) -> dict[str, Any] | None:
    if row is None:
        return None
    few = any(mark.startswith("fewer seeds") for mark in row["marks"])
    return {
        "file": file_of("defense", row["defense"]),
        "anchor": anchor(row),
        "marks": "†" * bool(row["invalid"]) + "‡" * few,
        "numbers": [(metric.key, cell(row, metric)) for metric in METRICS],
    }


def ranking(board: Board, found: Row) -> dict[str, Any]:
    """Return the rankings of one setting in words."""
    known = set(board.defenses)
    return {
        "setting": found["setting"],
        "defenses": [
            {
                **item,
                "place": _place(item),
                "file": file_of("defense", item["defense"]),
                "damage": interval((item["worst"] or {}).get("damage"), "+z.3f"),
                "f1": interval((item["worst"] or {}).get("f1"), ".1f"),
                "mean_f1": interval(item["mean_f1"], ".1f"),
                "relative_tps": speed(item["relative_tps"]),
                "false_bans": interval(item["false_bans"], ".1f"),
            }
            for item in found["defenses"]
            if item["defense"] in known
        ],
        "attacks": [
            {
                **item,
                "place": _place(item),
                "file": file_of("attack", item["attack"]),
                "against": file_of("defense", item["defense"])
                if item["defense"] in known
                else None,
                "excess_loss": interval(item["excess_loss"], "+z.3f"),
            }
            for item in found["attacks"]
            if item["attack"] in set(board.attacks)
        ],
    }


def _place(item: Row) -> str:
    if item["rank"] is None:
        return "–"  # noqa: RUF001
    return f"{item['rank']} =" if item["tie"] else str(item["rank"])


def worth(board: Board) -> list[dict[str, Any]]:
    """Return what each defense lets through and what it costs, in the order of the rankings."""
    content = board.content
    ranks = {
        (item["defense"], found["setting"]): item
        for found in content.get("rankings", [])
        for item in found["defenses"]
    }
    costs = {(item["defense"], item["setting"]): price(item) for item in content["costs"]}
    rows = []
    for item in content["defenses"]:
        key, unseen = (item["defense"], item["setting"]), item["undetected"]
        rank = ranks.get(key)
        rows.append(
            {
                **item,
                "file": file_of("defense", item["defense"]),
                "place": _place(rank) if rank else "",
                "order": rank["rank"] if rank and rank["rank"] is not None else None,
                "unseen": unseen,
                "false_bans": _honest(board, key),
                "cost": costs.get(key, ""),
            }
        )
    worst = float("inf")
    rows.sort(key=lambda r: (r["setting"], worst if r["order"] is None else r["order"]))
    return rows


def _honest(board: Board, key: tuple[str, int]) -> str:
    """Return the false bans without an attack."""
    for row in board.content["rows"]:
        if (row["defense"], row["setting"], row["attack"]) == (*key, "none"):
            return interval(row["metrics"]["false_bans"], ".1f")
    return interval(None, "")


def rows_of(board: Board, kind: str, name: str) -> list[Row]:
    """Return the rows of a defense or an attack."""
    return [row for row in board.content["rows"] if row[kind] == name]


def reasons(rows: Sequence[Row]) -> list[str]:
    """Return what is invalid, and why."""
    return [
        f"{row['attack']}{' (' + row['mode'] + ')' if row['mode'] else ''} against "
        f"{row['defense']}, seeds {'/'.join(map(str, cell['seeds']))}: "
        f"{cell['reason'] or 'no reason'}"
        for row in rows
        for cell in row["invalid"]
    ]
