"""Submissions on the boards: beside other rows, with their level, without changing any of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench.leaderboard import build, summarize
from sentinel_bench.submit import pack


@pytest.fixture
def board(runs: Path, packed: Path, tmp_path: Path) -> Path:
    """A board with results of its own, and an entry."""
    for path in runs.iterdir():
        target = tmp_path / "smoke" / "results" / path.name
        target.mkdir(parents=True)
        shutil.copy(path / "result.json", target)
    shutil.copytree(packed, tmp_path / "smoke" / "mine")
    return tmp_path


def track(board: Path) -> Any:
    return summarize([board])["tracks"]["smoke"]


def rows(board: Path) -> dict[tuple[str, str], Any]:
    return {(row["attack"], row["defense"]): row for row in track(board)["rows"]}


def test_an_entry_stands_beside_other_rows_with_its_level(board: Path) -> None:
    found = rows(board)
    mine = {key: row for key, row in found.items() if key[1] == "cascade @ mine"}
    assert [attack for attack, _ in mine] == ["none", "delay:steps=20", "zeros"]
    for (attack, _), row in mine.items():
        assert row["marks"] == ["self-reported"]
        assert row["metrics"] == found[attack, "cascade"]["metrics"]
    assert track(board)["entries"] == [{"subject": "cascade @ mine", "level": "self-reported"}]
    path, *_ = build([board], board)
    text = path.read_text()
    assert "| cascade @ mine | self-reported |" in text
    assert "## Defense: cascade @ mine\n" in text


def test_an_entry_changes_no_other_row(board: Path) -> None:
    with_entry = track(board)
    shutil.rmtree(board / "smoke" / "mine")
    without = track(board)
    assert without["entries"] == []
    own = [row for row in with_entry["rows"] if "@" not in row["defense"]]
    assert own == without["rows"]
    for name in ("notes", "commands", "settings"):
        assert with_entry[name] == without[name]
    for name in ("defenses", "costs"):
        assert [r for r in with_entry[name] if "@" not in r["defense"]] == without[name]


def test_an_attack_of_an_entry_changes_no_other_row(board: Path, runs: Path) -> None:
    before = track(board)
    folders = [p for p in runs.iterdir() if "delay" not in p.name]
    assert pack(folders, "smoke", "theirs", board, kind="attack").folder is not None
    after = track(board)
    guests = [row for row in after["rows"] if "theirs" in row["attack"]]
    assert [(row["attack"], row["defense"]) for row in guests] == [
        ("zeros @ theirs", "none"),
        ("zeros @ theirs", "cascade"),
    ]
    assert [row for row in after["rows"] if row not in guests] == before["rows"]
    assert after["defenses"] == before["defenses"] and after["costs"] == before["costs"]


def test_guests_are_ranked_like_all_others_and_bring_no_defense_of_their_own(
    board: Path, runs: Path
) -> None:
    (ranking,) = track(board)["rankings"]
    places = [(e["rank"], e["tie"], e["defense"]) for e in ranking["defenses"]]
    assert places == [(1, True, "cascade"), (1, True, "cascade @ mine"), (None, False, "none")]
    folders = [p for p in runs.iterdir() if "delay" not in p.name]
    assert pack(folders, "smoke", "theirs", board, kind="attack").folder is not None
    (ranking,) = track(board)["rankings"]
    assert ("zeros @ theirs", "activation") in [
        (e["attack"], e["mode"]) for e in ranking["attacks"] if e["rank"]
    ]
    alone = summarize([board / "smoke" / "theirs"])["tracks"]["smoke"]["rankings"]
    assert alone[0]["defenses"] == []


def test_a_board_without_entries_has_no_section_for_them(board: Path) -> None:
    shutil.rmtree(board / "smoke" / "mine")
    path, *_ = build([board], board)
    assert "Submissions" not in path.read_text()


@pytest.mark.parametrize("place", ["result.json", "results/result.json", "cells/a/b/result.json"])
def test_a_result_that_is_no_cell_of_its_entry_is_no_result_of_the_board(
    place: str, board: Path
) -> None:
    before = rows(board)
    path = board / "smoke" / "mine" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(next((board / "smoke" / "results").glob("*/result.json")), path)
    found = summarize([board / "smoke"])
    assert [p["reason"] for p in found["problems"]] == [
        "lies in the folder of a submission, and is no cell of it"
    ]
    assert rows(board) == before


def test_a_folder_inside_of_an_entry_is_still_of_the_entry(board: Path) -> None:
    found = summarize([board / "smoke" / "mine" / "cells"])["tracks"]["smoke"]
    assert {row["defense"] for row in found["rows"]} == {"cascade @ mine"}


def test_an_entry_that_cannot_be_read_is_a_problem(board: Path) -> None:
    (board / "smoke" / "mine" / "entry.yaml").write_text("a: &a [*a]")
    found = summarize([board])
    assert len(found["problems"]) == 4
    assert all(p["reason"].startswith("entry.yaml: is not plain") for p in found["problems"])
    assert not any("@" in row["defense"] for row in found["tracks"]["smoke"]["rows"])
