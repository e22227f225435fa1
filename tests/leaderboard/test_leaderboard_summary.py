"""What goes into a table: which results, in which order, with which spread and marks."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel_bench.errors import ConfigError
from sentinel_bench.leaderboard import summarize
from sentinel_bench.leaderboard._summary import T_95, interval


def rows(root: Path, track: str = "core") -> list[dict[str, Any]]:
    return summarize([root])["tracks"][track]["rows"]


def test_the_quantiles_are_those_of_scipy() -> None:
    t = pytest.importorskip("scipy.stats").t
    assert len(T_95) == 30
    for freedom, value in enumerate(T_95, start=1):
        assert value == pytest.approx(t.ppf(0.975, freedom), abs=5e-4)


def test_mean_and_interval_by_hand() -> None:
    # 90, 95, 100: mean 95, deviation 5, half width 4.303 * 5 / sqrt(3) = 12.422.
    found = interval([90.0, 95.0, 100.0])
    assert found["mean"] == 95 and found["half"] == pytest.approx(12.4217, abs=1e-4)
    assert interval([1.0]) == {"mean": 1.0, "half": None, "n": 1}
    assert interval([]) == {"mean": None, "half": None, "n": 0}


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40))
def test_interval_agrees_with_the_textbook_formula(values: list[float]) -> None:
    found = interval(values)
    quantile = T_95[min(len(values) - 1, 30) - 1]
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    assert found["mean"] == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert found["half"] == pytest.approx(half, abs=1e-6)


def test_seeds_become_one_row(save: Any, tmp_path: Path) -> None:
    for seed, f1 in enumerate((90.0, 95.0, 100.0)):
        outcome = "broken" if seed == 2 else "defended"
        steps = None if seed == 0 else 2.0
        save(f"r{seed}", seed=seed, f1=f1, outcome=outcome, detection_steps_mean=steps)
    (row,) = rows(tmp_path)
    assert (row["attack"], row["mode"], row["defense"]) == ("zero", "activation", "sentinel")
    assert row["n"] == 3 and row["metrics"]["f1"]["mean"] == 95
    assert row["metrics"]["detection_steps_mean"] == {"mean": 2.0, "half": 0.0, "n": 2}
    assert row["outcomes"] == {"defended": 2, "broken": 1, "invalid": 0}
    assert row["marks"] == []


def test_the_baseline_is_first_and_none_before_names(save: Any, tmp_path: Path) -> None:
    cells = [("zero", "a"), ("none", "a"), ("alie", "none"), ("none", "none"), ("alie", "a")]
    for number, (attack, defense) in enumerate(cells):
        save(f"r{number}", attack, defense)
    save("r9", "alie", "a", mode="gradient")
    found = [(row["defense"], row["attack"], row["mode"]) for row in rows(tmp_path)]
    assert found == [
        ("none", "none", ""),
        ("none", "alie", "activation"),
        ("a", "none", ""),
        ("a", "alie", "activation"),
        ("a", "alie", "gradient"),
        ("a", "zero", "activation"),
    ]


def test_an_invalid_cell_is_shown_with_its_reason_and_not_averaged(
    save: Any, tmp_path: Path
) -> None:
    save("good", seed=0, f1=80.0)
    save("bad", seed=1, f1=None, outcome="invalid", reason="attack: NaN")
    save("other", "sign", seed=0)
    save("other2", "sign", seed=1)
    sign, zero = rows(tmp_path)
    assert zero["metrics"]["f1"]["mean"] == 80 and zero["n"] == 1
    place = f"{tmp_path.name}/runs/bad/result.json"
    assert zero["invalid"] == [{"seeds": [1, 0, 0], "reason": "attack: NaN", "path": place}]
    assert zero["marks"] == ["1 invalid", "fewer seeds: 1 of 2"]
    assert sign["marks"] == []


def test_a_row_names_the_knowledge_of_its_attack(save: Any, tmp_path: Path) -> None:
    save("a", seed=0, knowledge="honest")
    save("b", seed=1, knowledge="")
    save("c", "sign", seed=0)
    save("d", "bias", seed=0, knowledge="own")
    save("e", "bias", seed=1, knowledge="honest+detector")
    bias, sign, zero = rows(tmp_path)
    assert (zero["knowledge"], sign["knowledge"]) == ("honest", "")
    assert bias["knowledge"] == "honest+detector, own"


def test_a_row_counts_the_models_that_diverged(save: Any, tmp_path: Path) -> None:
    save("a", seed=0, diverged=True, excess_loss=None)
    save("b", seed=1)
    save("c", seed=2, diverged=True, outcome="invalid")
    (row,) = rows(tmp_path)
    assert row["diverged"] == 1


def test_a_row_with_nothing_to_judge_is_marked(save: Any, tmp_path: Path) -> None:
    save("a", attackers=4, acted=0)
    save("b", "none", "none", attackers=0, acted=0, excess_loss=None)
    save("c", "sign", excess_loss=None)
    baseline, sign, zero = rows(tmp_path)
    assert baseline["marks"] == []
    assert sign["marks"] == ["excess loss unknown for some seeds"]
    assert zero["marks"] == ["no attacker acted"]


def test_the_newest_of_one_digest_is_kept_and_noted(save: Any, tmp_path: Path) -> None:
    save("a", f1=1.0, change={"finished": "2026-01-02T00:00:00Z"})
    save("b", f1=2.0, change={"finished": "2026-01-01T00:00:00Z"})
    (row,) = rows(tmp_path)
    assert row["metrics"]["f1"] == {"mean": 1.0, "half": None, "n": 1}
    (note,) = summarize([tmp_path])["tracks"]["core"]["notes"]
    assert "2 results of one digest" in note and "runs/a/result.json" in note


def test_one_seed_under_two_versions_is_not_two_seeds(save: Any, tmp_path: Path) -> None:
    save("a", f1=1.0)
    save("b", f1=2.0, change={"digest": "1" * 64, "finished": "2026-02-01T00:00:00Z"})
    (row,) = rows(tmp_path)
    assert row["metrics"]["f1"] == {"mean": 2.0, "half": None, "n": 1}
    (note,) = summarize([tmp_path])["tracks"]["core"]["notes"]
    assert "other versions" in note


def test_settings_are_never_averaged_together(save: Any, tmp_path: Path) -> None:
    save("a", f1=1.0)
    save("b", f1=2.0, steps=200)
    assert sorted(row["metrics"]["f1"]["mean"] for row in rows(tmp_path)) == [1.0, 2.0]
    assert len(summarize([tmp_path])["tracks"]["core"]["settings"]) == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 2}, "schema"),
        ({"cell": None}, "cell"),
        ({"cell": {"seeds": {}, "track": "../x"}}, "folder"),
        ({"scores": {"outcome": "won"}}, "outcome"),
        ({"scores": {"outcome": "defended", "f1": "100"}}, r"scores\.f1"),
        ({"scores": {"outcome": "defended", "f1": 1e999}}, "not JSON"),
        ({"digest": 3}, "digest"),
        ({"scores": {"outcome": "defended", "harm_weighted_recall": "1"}}, "scores.harm_weighted"),
        (
            {
                "cell": {
                    "track": "t",
                    "attack": "a",
                    "mode": "m",
                    "defense": "d",
                    "scenario": "s",
                    "seeds": {"model": 0, "data": 0, "threat": 0},
                    "knowledge": 3,
                }
            },
            "knowledge",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_a_problem(
    save: Any, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    save("good")
    save("bad", change=change)
    summary = summarize([tmp_path])
    (problem,) = summary["problems"]
    assert problem["path"].endswith("runs/bad/result.json")
    assert reason.replace("\\", "") in problem["reason"]
    assert len(summary["tracks"]["core"]["rows"]) == 1


def test_torn_and_unreadable_files_are_problems(save: Any, tmp_path: Path) -> None:
    save("good")
    save("torn").write_text('{"schema": 1')
    save("deep").write_text("[" * 100_000)
    folder = save("folder")
    folder.unlink()
    folder.symlink_to(tmp_path / "gone")
    places = [p["path"].split("/")[-2] for p in summarize([tmp_path])["problems"]]
    assert places == ["deep", "folder", "torn"]


def test_a_file_found_twice_is_read_once(save: Any, tmp_path: Path) -> None:
    path = save("a")
    summary = summarize([path, tmp_path, path.parent])
    assert summary["tracks"]["core"]["notes"] == []
    assert summary == summarize([path.parent, tmp_path, path])


def test_what_is_not_there_is_an_error(save: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no usable"):
        summarize([tmp_path])
    with pytest.raises(ConfigError, match="gone"):
        summarize([tmp_path / "gone"])
    save("a")
    with pytest.raises(ConfigError, match=r"'cor'; did you mean core\?"):
        summarize([tmp_path], "cor")


def test_the_summary_is_json(save: Any, tmp_path: Path) -> None:
    save("a")
    summary = summarize([tmp_path])
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
