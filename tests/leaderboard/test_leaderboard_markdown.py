"""What the tables show, that names cannot break them, and that their bytes are repeatable."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel_bench.errors import RunError
from sentinel_bench.leaderboard import build
from sentinel_bench.leaderboard._markdown import LONGEST, escape


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_a_table_by_hand(save: Any, tmp_path: Path) -> None:
    for seed, f1 in enumerate((90.0, 95.0, 100.0)):
        save(f"r{seed}", seed=seed, f1=f1, precision=100.0, recall=50.0, excess_loss=0.01)
    save("n", "none", "none", f1=100.0, excess_loss=None)
    out = tmp_path / "boards"
    assert build([tmp_path / "runs"], out) == [out / "core" / "README.md"]
    lines = (out / "core" / "README.md").read_text().splitlines()
    assert lines[0] == "# core"
    assert "llama-tiny, 8 stages x 8 replicas, 350 steps, cpu" in lines[4]
    overview = lines.index("| attack | none | sentinel |")
    assert cells(lines[overview + 2]) == ["none", "100.0 / – ‡", "·"]  # noqa: RUF001
    assert cells(lines[overview + 3]) == ["zero (activation)", "·", "95.0 / +0.010"]
    first, second = (i for i, line in enumerate(lines) if line.startswith("## Defense"))
    assert lines[first] == "## Defense: none" and lines[second] == "## Defense: sentinel"
    row = cells(lines[second + 4])
    assert row[:6] == ["zero", "activation", "3", "100.0 ± 0.0", "50.0 ± 0.0", "95.0 ± 12.4"]
    assert row[10] == "+0.010 ± 0.000" and row[12] == "3 defended"
    assert "fewer seeds: 1 of 3" in lines[first + 4]
    assert "* torch: 2.13.0" in lines and "    sentinel-bench suite core" in lines


def test_all_rows_of_a_table_have_the_same_number_of_cells(save: Any, tmp_path: Path) -> None:
    save("a", "zero:x='a|b'")
    save("b", steps=200, detection_steps_mean=None)
    save("c", "none", "none", outcome="invalid", reason="host: disk | full\nnow")
    (path,) = build([tmp_path], tmp_path / "out")
    width = 0
    for line in path.read_text().splitlines():
        bars = line.replace("\\|", "").count("|")
        assert bars in (0, width) or width == 0
        width = bars if line.startswith("|") else 0


def test_an_invalid_cell_is_marked_with_its_reason(save: Any, tmp_path: Path) -> None:
    save("a", seed=4, f1=None, outcome="invalid", reason="defense: x | y")
    (path,) = build([tmp_path], tmp_path / "out")
    text = path.read_text()
    assert "| zero (activation) | invalid † |" in text
    assert "**1 invalid**" in text
    assert "* zero (activation), seeds 4/0/0, **invalid**: defense: x \\| y" in text


def test_problems_are_listed(save: Any, tmp_path: Path) -> None:
    save("good")
    save("torn").write_text("{")
    (path,) = build([tmp_path / "runs"], tmp_path / "out")
    assert "* left out: runs/torn/result.json: " in path.read_text()


def test_each_track_has_its_folder(save: Any, tmp_path: Path) -> None:
    save("a")
    save("b", track="mixed")
    out = tmp_path / "out"
    assert [path.parent.name for path in build([tmp_path], out)] == ["core", "mixed"]
    assert [path.parent.name for path in build([tmp_path], out, "mixed")] == ["mixed"]


@given(st.text())
def test_escaped_text_is_one_line_without_a_bare_bar(text: str) -> None:
    line = escape(text)
    assert len(line.splitlines()) <= 1
    bare = line.replace("\\\\", "").replace("\\|", "")
    assert "|" not in bare and "<" not in bare
    assert len(line) <= 5 * LONGEST


def test_the_same_results_give_the_same_bytes(
    save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, attack in enumerate(("zero", "sign", "none", "alie:z=0.3")):
        for seed in range(3):
            save(f"r{number}-{seed}", attack, seed=seed, f1=33.3 + seed / 7)
    (path,) = build([tmp_path / "runs"], tmp_path / "out")
    first = path.read_bytes()
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda *a, **k: reversed(list(walk(*a, **k))))
    parts = sorted((tmp_path / "runs").iterdir())
    assert build([tmp_path / "runs"], tmp_path / "out")[0].read_bytes() == first
    assert build(parts, tmp_path / "out") == build(parts[::-1], tmp_path / "out")
    assert path.read_bytes() == first
    assert [file.name for file in path.parent.iterdir()] == ["README.md"]


def test_a_place_that_cannot_be_written_is_an_error(save: Any, tmp_path: Path) -> None:
    save("a")
    (tmp_path / "out").write_text("")
    with pytest.raises(RunError, match="out"):
        build([tmp_path], tmp_path / "out")


def test_five_hundred_results_are_quick(save: Any, tmp_path: Path) -> None:
    for number in range(500):
        save(f"r{number}", f"a{number % 20}", f"d{number // 20 % 5}", number // 100)
    start = time.process_time()
    build([tmp_path / "runs"], tmp_path / "out")
    assert time.process_time() - start < 0.4
