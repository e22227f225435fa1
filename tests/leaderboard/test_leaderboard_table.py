"""`board.csv` and `board.json`: what programs read."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel_bench.leaderboard import build, summarize
from sentinel_bench.leaderboard._table import harmless


def lines(root: Path) -> list[dict[str, str]]:
    *_, path = build([root / "runs"], root / "out")
    assert path.name == "board.csv"
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_by_hand(save: Any, tmp_path: Path) -> None:
    for seed, f1 in enumerate((90.0, 95.0, 100.0)):
        outcome = "defended" if seed else "broken"
        save(f"r{seed}", seed=seed, f1=f1, excess_loss=-0.5, outcome=outcome, knowledge="own")
    save("bad", seed=3, outcome="invalid")
    save("short", "alie", mode="gradient", f1=None, excess_loss=None, diverged=True)
    alie, zero = lines(tmp_path)
    assert (zero["attack"], zero["mode"], zero["defense"]) == ("zero", "activation", "sentinel")
    assert (zero["setting"], zero["seeds"], zero["knowledge"]) == ("1", "3", "own")
    assert (zero["f1_mean"], zero["f1_n"], zero["excess_loss_mean"]) == ("95.0", "3", "-0.5")
    assert float(zero["f1_half"]) == pytest.approx(12.4217, abs=1e-4)
    assert [zero[name] for name in ("defended", "broken", "invalid", "diverged")] == list("2110")
    assert zero["marks"] == "1 invalid"
    assert (alie["f1_mean"], alie["f1_half"], alie["f1_n"], alie["diverged"]) == ("", "", "0", "1")
    assert "fewer seeds: 1 of 3" in alie["marks"]


@pytest.mark.parametrize(
    "name, shown",
    [
        ("=HYPERLINK(1)", "'=HYPERLINK(1)"),
        ("\t\x00=1", "'=1"),
        ("\u200b@SUM", "'@SUM"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ('a,"b"\nc', 'a,"b" c'),
        ("<b>ü</b>", "<b>ü</b>"),
        ("a=1", "a=1"),
    ],
)
def test_a_name_is_one_cell_and_no_formula(
    save: Any, tmp_path: Path, name: str, shown: str
) -> None:
    path = save("a")
    content = json.loads(path.read_text())
    content["cell"]["attack"] = name
    path.write_text(json.dumps(content))
    (row,) = lines(tmp_path)
    assert row["attack"] == shown


@given(st.text())
def test_no_text_becomes_a_formula(text: str) -> None:
    assert not harmless(text).lstrip().startswith(("=", "+", "-", "@"))
    assert len(harmless(text).splitlines()) <= 1


def test_the_board_as_json_is_the_summary_of_its_track(save: Any, tmp_path: Path) -> None:
    save("a", seed=0, f1=80.0)
    save("b", seed=1, f1=90.0)
    save("c", seed=2, outcome="invalid", f1=None)
    save("torn").write_text("{")
    _, path, _ = build([tmp_path / "runs"], tmp_path / "out")
    board = json.loads(path.read_text())
    summary = summarize([tmp_path / "runs"])
    assert (board.pop("schema"), board.pop("track")) == (1, "core")
    assert board.pop("problems") == summary["problems"] != []
    assert board == summary["tracks"]["core"]
    (row,) = board["rows"]
    assert [seeds["model"] for seeds in row["seeds"]] == [0, 1, 2]
    assert row["values"]["f1"] == [80.0, 90.0, None]


def test_half_a_surrogate_pair_is_a_problem_and_breaks_nothing(save: Any, tmp_path: Path) -> None:
    save("good")
    for name, half in (("whole", "\\ud83d\\ude00"), ("half", "\\uD83D")):
        path = save(name)
        path.write_text(path.read_text().replace("zero", half))
    (problem,) = summarize([tmp_path])["problems"]
    assert problem["path"].endswith("half/result.json")
    assert "surrogates not allowed" in problem["reason"]
    build([tmp_path], tmp_path / "out")
