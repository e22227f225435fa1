"""Two sets of results side by side, worked by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench.compare import compare
from sentinel_bench.errors import ConfigError
from sentinel_bench.leaderboard import build


def differences(found: Any, metric: str) -> dict[str, Any]:
    return {d["attack"]: d for d in found["differences"] if d["metric"] == metric}


def test_a_set_is_equal_to_itself(put: Any, call: Any) -> None:
    path = put("a", f1=[1.0, 2.0, 3.0])
    found = compare(path, path)
    assert (found["kind"], found["cells"], found["differs"]) == ("sets", 1, False)
    assert (found["intervals"], found["decided"], found["by_chance"]) == (0, 0, 0.0)
    done = call(path, path, "--fail-on-difference")
    assert (done.status, done.err) == (0, "")
    assert "f1: 0 of 1 cells differ" in done.out


def test_differences_are_paired_by_seed_and_the_largest_comes_first(put: Any, call: Any) -> None:
    put("a", "zeros", f1=[10.0, 50.0, 90.0])
    b = put("b", "zeros", f1=[11.0, 52.0, 93.0])
    put("a", "sign", f1=[10.0, 20.0, 30.0])
    put("b", "sign", f1=[20.0, 0.0, 70.0])
    a = put("a", "same")
    put("b", "same")
    found = compare(a, b)
    assert list(differences(found, "f1")) == ["sign", "zeros", "same"]
    sign, zeros, same = differences(found, "f1").values()
    # 1, 2, 3: mean 2, deviation 1, half width 4.303 / sqrt(3) = 2.484: holds 0
    assert zeros["difference"]["mean"] == 2.0 and zeros["decided"] == 0
    assert zeros["difference"]["half"] == pytest.approx(2.48434, abs=1e-4)
    assert (zeros["a"], zeros["b"], zeros["equal"]) == (50.0, 52.0, False)
    # 10, -20, 40: mean 10
    assert sign["difference"]["mean"] == 10.0 and sign["decided"] == 0
    assert same["equal"] and same["difference"] == {"mean": 0.0, "half": 0.0, "n": 3}
    assert (found["intervals"], found["by_chance"]) == (2, pytest.approx(0.1))
    lines = call(a, b).out.splitlines()
    (row,) = [line.split() for line in lines if line.startswith("zeros")]
    assert row == ["zeros", "activation", "sentinel", "3", "50", "52", "+2", "±", "2.484"]


def test_a_difference_that_all_seeds_share_is_decided(put: Any, call: Any) -> None:
    a, b = put("a", f1=[10.0, 50.0, 90.0]), put("b", f1=[5.0, 45.5, 85.0])
    (entry,) = differences(compare(a, b), "f1").values()
    assert entry["decided"] == -1
    done = call(a, b)
    assert "1 of 1 intervals do not hold 0 (*), and about 0.1 would not by chance" in done.out


def test_one_common_seed_decides_nothing_and_other_seeds_are_listed(put: Any, call: Any) -> None:
    a, b = put("a", seeds=[0, 1], f1=[10.0, 20.0]), put("b", seeds=[1, 2], f1=[70.0, 80.0])
    found = compare(a, b)
    (entry,) = differences(found, "f1").values()
    assert entry["difference"] == {"mean": 50.0, "half": None, "n": 1} and entry["decided"] == 0
    (seeds,) = found["seeds"]
    assert (seeds["only_a"], seeds["only_b"]) == ([[0, 0, 0]], [[2, 2, 2]])
    assert "zeros (activation) against sentinel, core ssssssssssss…: 0/0/0" in call(a, b).out


def test_cells_without_a_partner_are_listed_and_fail_the_gate(put: Any, call: Any) -> None:
    a = put("a", "zeros")
    b = put("b", "zeros")
    put("a", "sign")
    put("b", "zeros", "other")
    found = compare(a, b)
    assert [c["attack"] for c in found["only_a"]] == ["sign"]
    assert [c["defense"] for c in found["only_b"]] == ["other"]
    assert all(d["equal"] for d in found["differences"]) and found["differs"] is True
    assert call(a, b, "--fail-on-difference").status == 1


def test_a_number_that_one_side_lacks_comes_first(put: Any, call: Any) -> None:
    put("a", "sign", excess_loss=5.0)
    put("b", "sign", excess_loss=9.0)
    a, b = put("a", excess_loss=1.0), put("b", excess_loss=[1.0, None, 1.0])
    found = compare(a, b)
    zeros, _ = differences(found, "excess_loss").values()
    assert (zeros["attack"], zeros["lost"], zeros["equal"]) == ("zeros", 1, False)
    assert zeros["difference"] == {"mean": 0.0, "half": 0.0, "n": 2}
    assert "1 lost" in call(a, b).out


def test_runs_that_ended_otherwise_are_listed_and_invalid_ones_have_no_numbers(
    put: Any, call: Any
) -> None:
    a = put("a")
    b = put("b", outcome=["invalid", "broken", "defended"], f1=[0.0, 50.0, 50.0])
    found = compare(a, b)
    (ends,) = found["outcomes"]
    assert ends["a"] == {"defended": 3}
    assert ends["b"] == {"invalid": 1, "broken": 1, "defended": 1}
    assert differences(found, "f1")["zeros"]["difference"]["n"] == 2
    assert "3 defended in A, 1 invalid, 1 broken, 1 defended in B" in call(a, b).out


def test_only_the_metrics_that_are_asked_for_count(put: Any, call: Any) -> None:
    a, b = put("a", recall=1.0, f1=1.0), put("b", recall=2.0, f1=1.0)
    assert call(a, b, "--fail-on-difference").status == 0
    assert call(a, b, "--fail-on-difference", "--metric", "recall").status == 1
    data = json.loads(call(a, b, "--metric", "recall", "--json").out)
    assert {d["metric"] for d in data["differences"]} == {"recall"}
    done = call(a, b, "--metric", "f2")
    assert done.status == 2 and "'f2' is not one of" in done.err


def test_a_long_list_is_cut_and_says_so(put: Any, call: Any) -> None:
    for number in range(13):
        put("a", f"a{number}", seeds=1, f1=1.0)
        put("b", f"a{number}", seeds=1, f1=2.0 + number)
        put("a", f"z{number}", seeds=1)
    done = call(put("a", "same"), put("b", "same"))
    assert done.out.count("and 3 more; --top shows them") == 2
    assert "a12 " in done.out and "a0 " not in done.out


# Settings.


def test_sets_of_other_settings_are_refused_unless_forced(put: Any, call: Any) -> None:
    a, b = put("a", f1=1.0), put("b", scenario="t" * 64, track="mixed", f1=2.0)
    done = call(a, b)
    assert (done.status, done.out) == (2, "")
    assert "is of core (m, 8 stages x 8 replicas, 9 steps, cpu, ssssssssssss)" in done.err
    assert "--force" in done.err and len(done.err.splitlines()) == 1
    found = compare(a, b, force=True)
    assert differences(found, "f1")["zeros"]["difference"]["mean"] == 1.0
    assert call(a, b, "--force").status == 0


def test_force_refuses_a_set_that_holds_a_cell_in_two_settings(put: Any) -> None:
    put("a")
    a, b = put("a", scenario="t" * 64), put("b")
    with pytest.raises(ConfigError, match="zeros activation against sentinel in several"):
        compare(a, b, force=True)
    assert len(compare(a, b)["only_a"]) == 1


# Boards.


def test_a_board_as_json_says_the_same_as_its_results(put: Any, tmp_path: Path) -> None:
    put("a", f1=[10.0, 50.0, 90.0])
    put("b", f1=[5.0, 45.5, 85.0], outcome=["defended", "invalid", "defended"])
    a, b = put("a", "sign", excess_loss=None), put("b", "sign", excess_loss=[1.0, 2.0, None])
    told = compare(a, b)
    for name in "ab":
        build([tmp_path / name], tmp_path / f"board-{name}")
    board = tmp_path / "board-a" / "core"
    other = tmp_path / "board-b" / "core" / "board.json"
    assert {**compare(board, other), "a": "", "b": ""} == {**told, "a": "", "b": ""}
    assert {**compare(a, other), "b": ""} == {**told, "b": ""}


@pytest.mark.parametrize(
    "content, reason",
    [
        ("", "Invalid JSON"),
        ("{", "Invalid JSON"),
        ("[]", "object"),
        ('{"schema": 2, "track": "a", "settings": [], "rows": []}', "schema"),
        ('{"schema": 1, "track": "a", "settings": [], "rows": []}', "no row"),
        ('{"schema": 1, "track": null, "settings": [], "rows": []}', "track"),
    ],
)
def test_a_board_that_cannot_be_read_ends_with_2_and_one_line(
    put: Any, call: Any, tmp_path: Path, content: str, reason: str
) -> None:
    path = tmp_path / "board.json"
    path.write_text(content)
    done = call(put("a"), path)
    assert (done.status, done.out) == (2, "")
    assert reason in done.err and len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"setting": 7}, "setting that is not listed"),
        ({"seeds": []}, "one value for each"),
        ({"seeds": [{"model": 0}]}, "data"),
        ({"values": {"f1": [1.0]}}, "one value for each"),
        ({"values": {"f1": ["1", 1, 1]}}, "values.f1.0"),
        ({"values": None}, "values"),
        ({"attack": 3}, "attack"),
    ],
)
def test_a_board_with_a_row_that_contradicts_itself_is_refused(
    put: Any, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    a = put("a")
    _, path, _ = build([a], tmp_path / "out")
    board = json.loads(path.read_text())
    board["rows"][0] |= change
    path.write_text(json.dumps(board))
    with pytest.raises(ConfigError, match=reason):
        compare(a, path)


# What is not there.


def test_what_is_not_there_ends_with_2_and_says_what_to_do(
    put: Any, call: Any, tmp_path: Path
) -> None:
    a, empty = put("a"), tmp_path / "empty"
    empty.mkdir()
    for path, text in ((empty, "holds no result.json and no board.json"),
                       (tmp_path / "gone", "no such file or folder"),
                       (tmp_path / "gone" / "board.json", "no such file or folder")):  # fmt: skip
        for paths in ((a, path), (path, a)):
            done = call(*paths)
            assert (done.status, done.out) == (2, "") and text in done.err
            assert len(done.err.splitlines()) == 1


def test_files_that_cannot_be_used_are_named_and_the_rest_is_compared(
    put: Any, call: Any, tmp_path: Path
) -> None:
    a = put("a")
    b = Path(shutil.copytree(a, tmp_path / "b"))
    torn = b / "torn" / "result.json"
    torn.parent.mkdir()
    torn.write_text("{")
    done = call(a, b)
    assert done.status == 0 and "left out of B: b/torn/result.json" in done.err
    shutil.rmtree(a)
    shutil.copytree(b / "torn", a / "torn")
    done = call(a, b)
    assert done.status == 2 and "no usable result.json: a/torn/result.json" in done.err


def test_names_of_strangers_are_one_line_each(put: Any, call: Any) -> None:
    name = "<b>\x1b[31m\n[red]ü"
    a, b = put("a", name, f1=1.0), put("b", name, f1=2.0)
    done = call(a, b)
    assert done.status == 0 and "\x1b" not in done.out
    assert "<b>\\x1b[31m\\n[red]ü" in done.out
