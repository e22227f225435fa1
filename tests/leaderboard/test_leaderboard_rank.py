"""Ranks, ties, and who has none: worked by hand on a track of two attacks and three seeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel_bench import tracks
from sentinel_bench.leaderboard import build, summarize
from sentinel_bench.leaderboard._order import Contender, place

CORE = Path(__file__).parents[2] / "leaderboards"
Put = Callable[..., None]


def change(path: Path, **cell: Any) -> None:
    content = json.loads(path.read_text())
    content["cell"] |= cell
    content["digest"] += json.dumps(cell)
    path.write_text(json.dumps(content))


@pytest.fixture(autouse=True)
def _track(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"summary": "x", "attacks": ["none", "zeros", "delay:steps=20", "update-ipm"]}
    small = tracks.Benchmark(
        tracks={
            "core": tracks.Track(**told, modes=["activation", "gradient"]),
            "smoke": tracks.Track(summary="x", attacks=["none", "zeros"], modes=["activation"]),
        }
    )
    monkeypatch.setattr(tracks, "load", lambda: small)


@pytest.fixture
def put(save: Any) -> Put:
    """Save one result for each seed of a cell of `smoke`; a list holds a value for each seed."""
    count = iter(range(10_000))

    def write(
        defense: str, attack: str = "zeros", seeds: int = 3, mode: str = "activation", **scores: Any
    ) -> None:
        for seed in range(seeds):
            found = {"recall": 100.0, "f1": 100.0, "false_bans": 0.0, "relative_tps": 1.0}
            found |= {"undetected_damage": 0.0}
            for name, value in scores.items():
                found[name] = value[seed] if isinstance(value, list) else value
            path = save(f"r{next(count)}", attack, defense, seed, **({"track": "smoke"} | found))
            alike = dict.fromkeys(("model", "data", "threat"), seed)
            change(path, seeds=alike, mode=mode)

    return write


@pytest.fixture
def full(put: Put) -> Put:
    """Save the complete set of a defense; the numbers are those of its one attack."""

    def write(defense: str, **scores: Any) -> None:
        put(defense, "none")
        put(defense, **scores)

    return write


def ranking(root: Path, track: str = "smoke") -> Any:
    (found,) = summarize([root])["tracks"][track]["rankings"]
    return found


def ranks(root: Path, kind: str = "defenses", name: str = "defense") -> list[Any]:
    return [(e["rank"], e["tie"], e[name]) for e in ranking(root)[kind]]


UNSEEN = {"recall": 0.0, "f1": 0.0}


def test_defenses_stand_in_the_order_of_their_worst_damage(full: Put, tmp_path: Path) -> None:
    full("a", **UNSEEN, undetected_damage=[0.2, 0.3, 0.4])
    full("b", **UNSEEN, undetected_damage=[0.1, 0.2, 0.3])  # each seed 0.1 less than a: shown
    assert ranks(tmp_path) == [(1, False, "b"), (2, False, "a")]
    first = ranking(tmp_path)["defenses"][0]
    worst = first["worst"]
    assert (worst["attack"], worst["mode"]) == ("zeros", "activation")
    # deviation 0.1, half width 4.303 * 0.1 / sqrt(3)
    assert worst["damage"] == {
        "mean": pytest.approx(0.2),
        "half": pytest.approx(0.24843, abs=1e-5),
        "n": 3,
    }
    assert first["mean_f1"] == worst["f1"] == {"mean": 0.0, "half": 0.0, "n": 3}
    assert first["false_bans"] == {"mean": 0.0, "half": 0.0, "n": 3}
    assert first["relative_tps"]["mean"] == 1.0
    assert (first["broken"], first["attacked"]) == (0, 3)
    assert (first["status"], first["reason"], first["cells"], first["of"]) == ("ranked", "", 2, 2)


def test_broken_runs_are_counted_also_where_the_attackers_were_found(
    put: Put, tmp_path: Path
) -> None:
    put("a", "none", outcome="broken")  # not attacked
    outcomes = ["broken", "defended", "invalid", "broken"]  # the last seed is not of the track
    put("a", seeds=4, recall=90.0, outcome=outcomes)
    (entry,) = ranking(tmp_path)["defenses"]
    assert (entry["broken"], entry["attacked"]) == (1, 2)


def test_a_difference_within_the_spread_is_a_tie(full: Put, tmp_path: Path) -> None:
    # differences 0.1, 0.3, -0.1: mean 0.1, deviation 0.2, half width 0.497: holds 0
    full("a", **UNSEEN, undetected_damage=[0.2, 0.5, 0.3])
    full("b", **UNSEEN, undetected_damage=[0.1, 0.2, 0.4])
    assert ranks(tmp_path) == [(1, True, "b"), (1, True, "a")]


def test_the_differences_are_paired_by_seed(full: Put, tmp_path: Path) -> None:
    # wide over seeds, but a lets 0.01 more through with every seed
    full("a", **UNSEEN, undetected_damage=[0.01, 1.01, 2.01])
    full("b", **UNSEEN, undetected_damage=[0.0, 1.0, 2.0])
    assert ranks(tmp_path) == [(1, False, "b"), (2, False, "a")]


@pytest.mark.parametrize("score", ["f1", "relative_tps"])
def test_what_the_damage_leaves_open_f1_and_then_speed_decide(
    full: Put, tmp_path: Path, score: str
) -> None:
    full("a", **{score: [0.7, 0.8, 0.9]})
    full("b", **{score: [0.8, 0.9, 1.0]})
    full("c", **{score: [0.8, 0.9, 1.0]})
    assert ranks(tmp_path) == [(1, True, "b"), (1, True, "c"), (3, False, "a")]


def test_damage_goes_before_f1(full: Put, tmp_path: Path) -> None:
    full("a", recall=49.0, f1=60.0, undetected_damage=0.1)
    full("b", f1=10.0)
    assert ranks(tmp_path) == [(1, False, "b"), (2, False, "a")]


def test_mean_f1_decides_between_equal_worst_cells(put: Put, tmp_path: Path) -> None:
    for defense, f1 in (("a", 80.0), ("b", 90.0)):
        cells = [("none", "activation"), ("update-ipm", "update")]
        cells += [(n, m) for n in ("zeros", "delay:steps=20") for m in ("activation", "gradient")]
        for attack, mode in cells:
            score = {"zeros": 50.0, "none": 100.0}.get(attack, f1)
            put(defense, attack, track="core", mode=mode, f1=score)
    first, second = ranking(tmp_path, "core")["defenses"]
    # no attack has no part in it: (50 + 50 + 90 + 90 + 90) / 5
    assert (first["defense"], first["mean_f1"]["mean"]) == ("b", 74.0)
    assert (second["defense"], second["mean_f1"]["mean"]) == ("a", 68.0)
    assert first["worst"]["f1"]["mean"] == 50.0 and first["worst"]["attack"] == "zeros"
    assert (first["rank"], second["rank"], first["of"]) == (1, 2, 6)


def test_one_seed_shows_nothing(
    full: Put, put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tracks.Track(summary="x", attacks=["none", "zeros"], seeds=[0])
    monkeypatch.setattr(tracks, "load", lambda: tracks.Benchmark(tracks={"smoke": one}))
    for defense, damage in (("a", 3.0), ("b", 0.0), ("c", None)):
        put(defense, "none", 1)
        put(defense, seeds=1, **UNSEEN, undetected_damage=damage, diverged=damage is None)
    assert ranks(tmp_path) == [(1, True, "b"), (1, True, "a"), (1, True, "c")]


LOST = {"recall": 49.0, "undetected_damage": None, "excess_loss": None}


@pytest.mark.parametrize(
    "lost", [{"diverged": [False, True, False]}, {"outcome": ["defended", "broken", "defended"]}]
)
def test_an_unseen_run_without_a_number_is_worse_than_any_number(
    full: Put, tmp_path: Path, lost: dict[str, Any]
) -> None:
    full("a", **UNSEEN, undetected_damage=9.0)
    full("b", **(LOST | lost | {"undetected_damage": [0.0, None, 0.0], "f1": 90.0}))
    assert ranks(tmp_path) == [(1, False, "a"), (2, False, "b")]
    last = ranking(tmp_path)["defenses"][1]
    assert last["worst"]["damage"] == {"mean": None, "half": None, "n": 0}


def test_a_diverged_run_whose_attackers_were_found_is_no_undetected_damage(
    full: Put, tmp_path: Path
) -> None:
    full("a", **(LOST | {"recall": 50.0, "diverged": True}))
    assert ranking(tmp_path)["defenses"][0]["worst"]["damage"]["mean"] == 0.0


def test_a_loss_without_its_baseline_is_no_number_and_no_rank(full: Put, tmp_path: Path) -> None:
    full("a", **LOST)
    (entry,) = ranking(tmp_path)["defenses"]
    assert (entry["rank"], entry["status"], entry["cells"]) == (None, "missing", 1)
    assert entry["reason"] == "no number for damage or F1: zeros (activation)"


def test_a_row_with_a_missing_cell_has_no_rank_and_says_what_is_missing(
    put: Put, full: Put, tmp_path: Path
) -> None:
    full("z")
    put("a")
    put("b", "none")
    put("b", seeds=2)
    put("c", "none")
    put("c", outcome=["defended", "invalid", "invalid"])
    found = {e["defense"]: e for e in ranking(tmp_path)["defenses"]}
    assert list(found) == ["z", "a", "b", "c"]
    assert found["a"]["reason"] == "not measured: none"
    assert found["b"]["reason"] == "valid with 2 of 3 seeds: zeros (activation)"
    assert found["c"]["reason"] == "valid with 1 of 3 seeds: zeros (activation)"
    assert [found[name]["rank"] for name in found] == [1, None, None, None]
    assert found["b"]["worst"] is None and found["b"]["cells"] == 1


def test_other_seeds_than_those_of_the_track_do_not_count(
    full: Put, save: Any, tmp_path: Path
) -> None:
    full("a", **UNSEEN, undetected_damage=[0.1, 0.2, 0.3])
    save("more", "zeros", "a", 7, track="smoke", undetected_damage=100.0)
    worst = ranking(tmp_path)["defenses"][0]["worst"]
    assert worst["damage"]["mean"] == pytest.approx(0.2)


def test_bans_without_an_attack_disqualify_above_one_percent(put: Put, tmp_path: Path) -> None:
    for defense, bans in (("a", [0, 0, 1]), ("b", 0)):  # 1 of 64 workers: 1.6 %
        put(defense, "none", false_bans=bans)
        put(defense)
    good, bad = ranking(tmp_path)["defenses"]
    assert (good["defense"], good["rank"]) == ("b", 1)
    assert (bad["rank"], bad["status"]) == (None, "disqualified")
    assert bad["reason"] == "1 of 64 workers banned without an attack, seeds 2/2/2"
    assert bad["false_bans"]["mean"] == pytest.approx(1 / 3)


def test_exactly_one_percent_does_not_disqualify(full: Put, tmp_path: Path) -> None:
    full("a", false_bans=0.0)
    for path in tmp_path.rglob("result.json"):
        text = path.read_text().replace('"false_bans": 0.0', '"false_bans": 1.0')
        path.write_text(text)
        change(path, setting={"stages": 10, "replicas": 10})
    assert ranks(tmp_path) == [(1, False, "a")]


def test_a_share_of_bans_that_is_not_known_is_no_rank(full: Put, tmp_path: Path) -> None:
    full("a")
    for path in tmp_path.rglob("result.json"):
        change(path, setting={"stages": "8", "replicas": 8})
    (entry,) = ranking(tmp_path)["defenses"]
    assert entry["rank"] is None
    assert entry["reason"] == "not known which share of the workers was banned without an attack"


def test_no_defense_is_for_reference(full: Put, tmp_path: Path) -> None:
    full("none", f1=100.0)
    full("a", **UNSEEN, undetected_damage=5.0)
    assert ranks(tmp_path) == [(1, False, "a"), (None, False, "none")]
    assert ranking(tmp_path)["defenses"][1]["reason"].startswith("for reference")


def test_an_attack_on_weights_counts_once_and_others_in_every_mode(
    put: Put, tmp_path: Path
) -> None:
    put("a", track="core")
    (entry,) = ranking(tmp_path, "core")["defenses"]
    assert (entry["cells"], entry["of"]) == (1, 6)
    assert entry["reason"] == (
        "not measured: none, zeros (gradient), delay:steps=20 (activation), "
        "delay:steps=20 (gradient) and 1 more"
    )


def test_an_attack_that_was_only_seen_in_a_mode_of_its_own_counts_once(
    put: Put, tmp_path: Path
) -> None:
    put("a", "none")
    put("a", mode="mixed")
    (entry,) = ranking(tmp_path)["defenses"]
    assert (entry["rank"], entry["worst"]["mode"]) == (1, "mixed")


def test_a_track_that_nobody_defined_asks_for_what_was_measured(put: Put, tmp_path: Path) -> None:
    for attack in ("none", "zeros", "sign"):
        put("a", attack, track="custom", seeds=2)
    put("b", "zeros", track="custom", seeds=2)
    first, second = ranking(tmp_path, "custom")["defenses"]
    assert (first["defense"], first["rank"], first["of"]) == ("a", 1, 3)
    assert second["reason"] == "not measured: none, sign (activation)"


def test_each_setting_has_its_ranks(full: Put, save: Any, tmp_path: Path) -> None:
    full("a")
    save("other", "zeros", "b", track="smoke", steps=200)
    found = summarize([tmp_path])["tracks"]["smoke"]["rankings"]
    assert sorted(r["setting"] for r in found) == [1, 2]
    assert sorted(e["defense"] for r in found for e in r["defenses"]) == ["a", "b"]


# Attacks.


def test_attacks_stand_in_the_order_of_what_they_do_to_the_best_defense(
    put: Put, full: Put, tmp_path: Path
) -> None:
    full("best", excess_loss=[0.1, 0.2, 0.3])
    full("other", **UNSEEN, undetected_damage=1.0)
    put("best", "sign", excess_loss=[0.2, 0.3, 0.4])
    put("best", "bias", excess_loss=[0.0, 0.3, 0.3])  # minus sign: -.2, 0, -.1: holds 0
    put("best", "boom", excess_loss=[9.0, None, 9.0], diverged=[False, True, False])
    put("other", "alie")
    found = ranking(tmp_path)["attacks"]
    assert [(e["rank"], e["tie"], e["attack"]) for e in found] == [
        (1, False, "boom"),
        (2, True, "sign"),
        (2, True, "bias"),
        (4, False, "zeros"),
        (None, False, "alie"),
    ]


def test_attacks_have_the_numbers_of_the_defense_they_are_measured_against(
    put: Put, full: Put, tmp_path: Path
) -> None:
    full("best", excess_loss=[0.1, 0.2, 0.3])
    full("other", **UNSEEN, undetected_damage=1.0)
    put("best", "bias", seeds=1)
    zeros, bias = ranking(tmp_path)["attacks"]
    assert zeros["defense"] == bias["defense"] == "best"
    assert zeros["excess_loss"]["mean"] == pytest.approx(0.2)
    assert (bias["status"], bias["reason"]) == ("missing", "valid with 1 of 3 seeds")
    assert bias["excess_loss"] == {"mean": None, "half": None, "n": 0}


def test_where_no_defense_is_ranked_attacks_are_measured_against_the_first(
    put: Put, tmp_path: Path
) -> None:
    put("none", excess_loss=2.0)
    put("a", excess_loss=1.0)
    (entry,) = ranking(tmp_path)["attacks"]
    assert (entry["rank"], entry["defense"], entry["excess_loss"]["mean"]) == (1, "a", 1.0)
    path, *_ = build([tmp_path], tmp_path / "out")
    assert "do to a, the first of the list, as none is ranked." in path.read_text()


# Order and ties.


def one(name: str, *criteria: list[float]) -> Contender:
    return Contender({"name": name}, (name,), criteria)


def placed(*contenders: Contender) -> list[tuple[str, int, bool]]:
    return [(e["name"], e["rank"], e["tie"]) for e in place(contenders)]


def test_a_tie_is_with_the_first_of_the_group_not_with_the_one_before() -> None:
    # a beats c; b, between them, is noisy: a does not beat it, and it does not beat c
    a, b, c = one("a", [3.0, 3.1, 3.2]), one("b", [9.0, 0.0, 0.0]), one("c", [2.0, 2.1, 2.2])
    assert a.beats(c) and not a.beats(b) and not b.beats(c)
    assert placed(c, b, a) == [("a", 1, True), ("b", 1, True), ("c", 3, False)]


def test_who_is_beaten_never_stands_before_who_beats_it() -> None:
    # the first has the better mean of the first criterion, which shows nothing; the second decides
    a, b = one("a", [1.1, 0.9, 1.1], [1.0, 1.0, 1.0]), one("b", [1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    assert a.key < b.key
    assert placed(a, b) == [("b", 1, False), ("a", 2, False)]


def test_a_circle_is_broken_by_the_means() -> None:
    # by the first criterion nothing; by the second a > b > c > a
    noise = [[0.1, -0.1, 0.0], [-0.1, 0.1, 0.0], [0.0, 0.0, 0.0]]
    circle = {"a": {"b"}, "b": {"c"}, "c": {"a"}}

    class Cyclic(Contender):
        def beats(self, other: Contender) -> bool:
            return other.name[0] in circle[self.name[0]]

    found = placed(*(Cyclic({"name": n}, (n,), [v]) for n, v in zip("cba", noise, strict=True)))
    # all means are 0: a, by its name; then c, which b does not beat... b does: so b, then c
    assert found == [("a", 1, False), ("b", 2, False), ("c", 3, False)]


NUMBERS = st.lists(st.sampled_from([0.0, 1.0, 2.0, float("-inf")]), min_size=3, max_size=3)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=7), st.randoms())
def test_ranks_do_not_depend_on_the_order_of_reading(values: Any, random: Any) -> None:
    contenders = [one(f"d{n}", *found) for n, found in enumerate(values)]
    first = placed(*contenders)
    shuffled = random.sample(contenders, len(contenders))
    assert placed(*shuffled) == first
    assert sorted(name for name, _, _ in first) == sorted(f"d{n}" for n in range(len(values)))
    for place_, (_, rank, tie) in enumerate(first, start=1):
        assert rank <= place_
        assert tie == ([r for _, r, _ in first].count(rank) > 1)


# What is shown.


def test_the_board_begins_with_the_ranks(full: Put, put: Put, tmp_path: Path) -> None:
    full("b|ad", **UNSEEN, undetected_damage=[0.2, 0.3, 0.4], excess_loss=[0.2, 0.3, 0.4])
    full("good", excess_loss=[0.1, 0.1, 0.1], relative_tps=0.5)
    full("good2", excess_loss=[0.1, 0.1, 0.1], relative_tps=0.5)
    full("none", **(LOST | {"f1": 0.0, "diverged": True}))
    put("late", "none")
    path, *_ = build([tmp_path / "runs"], tmp_path / "out")
    lines = path.read_text().splitlines()
    titles = [line for line in lines if line.startswith("## ")]
    assert titles[:3] == ["## Ranking of the defenses", "## Ranking of the attacks", "## Overview"]
    start = lines.index(titles[0])
    assert lines[start + 4 : start + 9] == [
        "| 1= | good | +0.000 ± 0.000 | zeros (activation) | 100.0 ± 0.0 | 100.0 ± 0.0 "
        "| 0 of 3 | 0.75 ± 0.00 | 0.0 ± 0.0 | 2 of 2 |  |",
        "| 1= | good2 | +0.000 ± 0.000 | zeros (activation) | 100.0 ± 0.0 | 100.0 ± 0.0 "
        "| 0 of 3 | 0.75 ± 0.00 | 0.0 ± 0.0 | 2 of 2 |  |",
        "| 3 | b\\|ad | +0.300 ± 0.248 | zeros (activation) | 0.0 ± 0.0 | 0.0 ± 0.0 "
        "| 0 of 3 | 1.00 ± 0.00 | 0.0 ± 0.0 | 2 of 2 |  |",
        "| – | late | – | – | – | – | 0 of 0 | 1.00 ± 0.00 | 0.0 ± 0.0 | 1 of 2 "  # noqa: RUF001
        "| not measured: zeros (activation) |",
        "| – | none | no number | zeros (activation) | 0.0 ± 0.0 | 0.0 ± 0.0 "  # noqa: RUF001
        "| 3 of 3 | 1.00 ± 0.00 | 0.0 ± 0.0 | 2 of 2 "
        "| for reference: the model without a defense |",
    ]
    start = lines.index(titles[1])
    assert lines[start + 2] == "By the excess loss that they do to good, the best."
    assert lines[start + 6] == "| 1 | zeros (activation) | +0.100 ± 0.000 |  |"


def test_ranks_of_the_committed_results_have_the_form_that_pages_expect() -> None:
    for track in summarize([CORE])["tracks"].values():
        for ranking_ in track["rankings"]:
            for entry in ranking_["defenses"] + ranking_["attacks"]:
                assert entry["status"] in ("ranked", "missing", "disqualified")
                assert (entry["rank"] is None) == (entry["status"] != "ranked")
                assert bool(entry["reason"]) == (entry["status"] != "ranked")
