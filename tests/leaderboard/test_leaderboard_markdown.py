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
        damage = {"excess_loss": 0.01, "undetected_damage": 0.25, "harm_weighted_recall": 80.0}
        rates = {"f1": f1, "precision": 100.0, "recall": 50.0}
        save(f"r{seed}", seed=seed, knowledge="honest", **rates, **damage)
    save("n", "none", "none", f1=100.0, excess_loss=None)
    out = tmp_path / "boards"
    files = ["README.md", "board.json", "board.csv"]
    assert build([tmp_path / "runs"], out) == [out / "core" / name for name in files]
    lines = (out / "core" / "README.md").read_text().splitlines()
    assert lines[0] == "# core"
    assert "llama-tiny, 8 stages x 8 replicas, 350 steps, cpu" in lines[4]
    overview = lines.index("| attack | knowledge | none | sentinel |")
    assert cells(lines[overview + 2]) == ["none", "–", "100.0 / – ‡", "·"]  # noqa: RUF001
    assert cells(lines[overview + 3]) == ["zero (activation)", "honest", "·", "95.0 / +0.010"]
    first, second = (i for i, line in enumerate(lines) if line.startswith("## Defense"))
    assert lines[first] == "## Defense: none" and lines[second] == "## Defense: sentinel"
    titles, row = (dict(enumerate(cells(lines[second + n]))) for n in (4, 6))
    assert {titles[i]: row[i] for i in titles} == {
        "attack": "zero",
        "mode": "activation",
        "knowledge": "honest",
        "seeds": "3",
        "precision": "100.0 ± 0.0",
        "recall": "50.0 ± 0.0",
        "harm-weighted recall": "80.0 ± 0.0",
        "undetected damage": "+0.250 ± 0.000",
        "F1": "95.0 ± 12.4",
        "detection steps": "1.0 ± 0.0",
        "false bans": "1.0 ± 0.0",
        "capacity": "1.00 ± 0.00",
        "validation loss": "1.000 ± 0.000",
        "excess loss": "+0.010 ± 0.000",
        "relative TPS": "1.00 ± 0.00",
        "outcome": "3 defended",
        "marks": "",
    }
    assert "fewer seeds: 1 of 3" in lines[first + 4]
    assert "* torch: 2.13.0" in lines and "    sentinel-bench suite core" in lines


def test_what_an_older_result_lacks_is_a_dash(save: Any, age: Any, tmp_path: Path) -> None:
    age(save("a", knowledge="honest"))
    path, *_ = build([tmp_path / "runs"], tmp_path / "out")
    text = path.read_text()
    assert "| zero (activation) | – | 1.0 / +1.000 |" in text  # noqa: RUF001
    assert "| zero | activation | – | 1 | 1.0 | 1.0 | – | +1.000 | 1.0 |" in text  # noqa: RUF001


def test_attack_success_is_shown_where_any_row_has_it(save: Any, tmp_path: Path) -> None:
    save("a", "zero")
    path, *_ = build([tmp_path], tmp_path / "out")
    assert "attack success |" not in path.read_text()
    save("b", "backdoor", attack_success_rate=93.75, attack_success_base=1.25)
    path, *_ = build([tmp_path], tmp_path / "out")
    text = path.read_text()
    assert "| relative TPS | attack success | success before | outcome |" in text
    assert "| 1.00 | 93.8 | 1.2 | 1 defended |" in text
    assert "| 1.00 | – | – | 1 defended |" in text  # noqa: RUF001


def test_each_defense_says_what_damage_it_finds_and_what_passes(save: Any, tmp_path: Path) -> None:
    save("a", "zero", "none", recall=0.0, excess_loss=3.0, undetected_damage=3.0)
    save("b", "zero", recall=50.0, undetected_damage=0.0)
    save("c", "sign", "none", recall=0.0, excess_loss=1.0, undetected_damage=1.0)
    save("d", "sign", recall=10.0, undetected_damage=0.5)
    save("e", "boom", "none", recall=0.0, excess_loss=None, undetected_damage=None, diverged=True)
    save("f", "boom", recall=100.0, undetected_damage=0.0)
    path, *_ = build([tmp_path], tmp_path / "out")
    lines = path.read_text().splitlines()
    assert lines[lines.index("## Defense: sentinel") + 2] == (
        "Damage-weighted recall: 40.0 over 2 attacks; largest undetected damage: +0.500 "
        "(sign (activation)) over 3 attacks; left out of the first, as the model without a "
        "defense diverged: boom (activation)."
    )
    assert lines[lines.index("## Defense: none") + 2] == (
        "Damage-weighted recall: 0.0 over 2 attacks; largest undetected damage: +3.000 "
        "(zero (activation)) over 3 attacks; made the model diverge unseen: boom (activation); "
        "left out of the first, as the model without a defense diverged: boom (activation)."
    )


def test_each_defense_says_what_it_costs_where_results_do(save: Any, tmp_path: Path) -> None:
    free = {"extra_flops": 0.0, "extra_bytes": 0.0, "state_bytes": 0.0}
    save("n", "none", "none", **free)
    save("a", "zero", extra_flops=0.02, extra_bytes=1000.0, state_bytes=4096.0)
    save("b", "sign", extra_flops=0.03, extra_bytes=3000.0, state_bytes=4096.0)
    save("c", "tilt")  # of an older version
    save("d", "zero", "coherence")
    path, *_ = build([tmp_path], tmp_path / "out")
    lines = path.read_text().splitlines()
    sentinel = lines[lines.index("## Defense: sentinel") :]
    # The means over the results that say it: 2.5 %, 2000 bytes.
    assert sentinel[4] == (
        "Cost: +2.50 % floating-point operations, 2,000 bytes a step, 4,096 bytes of state."
    )
    assert [line[:12] for line in lines if line.startswith("Cost:")] == [
        "Cost: +0.00 ",
        sentinel[4][:12],
    ]


def test_a_cost_belongs_to_its_setting(save: Any, tmp_path: Path) -> None:
    for number, steps in enumerate((350, 200)):
        save(f"a{number}", "zero", steps=steps, extra_flops=1.0 + number, extra_bytes=5.0)
    path, *_ = build([tmp_path], tmp_path / "out")
    found = [line for line in path.read_text().splitlines() if "Cost: +" in line]
    assert {line[:6] for line in found} == {"\\[1\\] ", "\\[2\\] "}
    assert sorted(line[6:19] for line in found) == ["Cost: +100.00", "Cost: +200.00"]


def test_of_two_settings_each_has_a_line_of_its_own(save: Any, tmp_path: Path) -> None:
    for number, steps in enumerate((350, 200)):
        save(f"a{number}", "zero", "none", steps=steps, undetected_damage=0.0)
        save(f"b{number}", "zero", steps=steps, recall=90.0 + number, undetected_damage=0.0)
    path, *_ = build([tmp_path], tmp_path / "out")
    found = [line for line in path.read_text().splitlines() if "90.0 over" in line]
    other = [line for line in path.read_text().splitlines() if "91.0 over" in line]
    assert {found[0][:6], other[0][:6]} == {"\\[1\\] ", "\\[2\\] "}
    assert found[0][6:].startswith("Damage-weighted recall: 90.0 over 1 attack; largest")


def test_all_rows_of_a_table_have_the_same_number_of_cells(save: Any, tmp_path: Path) -> None:
    save("a", "zero:x='a|b'")
    save("b", steps=200, detection_steps_mean=None)
    save("c", "none", "none", outcome="invalid", reason="host: disk | full\nnow")
    path, *_ = build([tmp_path], tmp_path / "out")
    width = 0
    for line in path.read_text().splitlines():
        bars = line.replace("\\|", "").count("|")
        assert bars in (0, width) or width == 0
        width = bars if line.startswith("|") else 0


def test_an_invalid_cell_is_marked_with_its_reason(save: Any, tmp_path: Path) -> None:
    save("a", seed=4, f1=None, outcome="invalid", reason="defense: x | y")
    path, *_ = build([tmp_path], tmp_path / "out")
    text = path.read_text()
    assert "| zero (activation) | – | invalid † |" in text  # noqa: RUF001
    assert "**1 invalid**" in text
    assert "* zero (activation), seeds 4/0/0, **invalid**: defense: x \\| y" in text


def test_problems_are_listed(save: Any, tmp_path: Path) -> None:
    save("good")
    save("torn").write_text("{")
    path, *_ = build([tmp_path / "runs"], tmp_path / "out")
    assert "* left out: runs/torn/result.json: " in path.read_text()


def test_each_track_has_its_folder(save: Any, tmp_path: Path) -> None:
    save("a")
    save("b", track="mixed")
    out = tmp_path / "out"
    assert [path.parent.name for path in build([tmp_path], out)][::3] == ["core", "mixed"]
    assert {path.parent.name for path in build([tmp_path], out, "mixed")} == {"mixed"}


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
    first = [path.read_bytes() for path in build([tmp_path / "runs"], tmp_path / "out")]
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda *a, **k: reversed(list(walk(*a, **k))))
    parts = sorted((tmp_path / "runs").iterdir())
    for places in ([tmp_path / "runs"], parts, parts[::-1]):
        files = build(places, tmp_path / "out")
        assert [path.read_bytes() for path in files] == first
    assert sorted((tmp_path / "out" / "core").iterdir()) == sorted(files)


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


def test_a_speed_that_is_not_known_is_not_shown(save: Any, tmp_path: Path) -> None:
    for seed, speed in enumerate((0.9, 0.95, 4.0)):  # mean 1.95, half width 4.3 * 1.76 / sqrt(3)
        save(f"a{seed}", "zero", seed=seed, relative_tps=speed)
    path, *_ = build([tmp_path], tmp_path / "out")
    assert "| busy | 3 defended |" in path.read_text()
