"""What a defense lets through, worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sentinel_bench.leaderboard import summarize

CORE = Path(__file__).parents[2] / "leaderboards"


def worths(root: Path) -> dict[tuple[str, int], dict[str, Any]]:
    found = summarize([root])["tracks"]["core"]["defenses"]
    return {(worth.pop("defense"), worth.pop("setting")): worth for worth in found}


class Saver:
    """Saves results one after the other."""

    def __init__(self, save: Any) -> None:
        self._save, self._number = save, 0

    def free(self, attack: str, *losses: float | None, **more: Any) -> None:
        """Runs without a defense: one for each seed, with these excess losses."""
        for seed, loss in enumerate(losses):
            scores = {"recall": 0.0, "excess_loss": loss, "undetected_damage": loss}
            self._put(attack, "none", seed, **(scores | {"diverged": loss is None} | more))

    def held(self, attack: str, *recalls: float | None, **more: Any) -> None:
        """Runs against the defense: one for each seed, with these recalls."""
        for seed, recall in enumerate(recalls):
            self._put(attack, "sentinel", seed, **({"recall": recall} | more))

    def _put(self, attack: str, defense: str, seed: int, **scores: Any) -> None:
        self._number += 1
        self._save(f"r{self._number}", attack, defense, seed, **scores)


def test_damage_weighted_recall_by_hand(save: Any, tmp_path: Path) -> None:
    runs = Saver(save)
    # zero: harm (2 + 4) / 2 = 3 over the seeds that both have, recall (100 + 50) / 2 = 75.
    runs.free("zero", 2.0, 4.0, 100.0)
    runs.held("zero", 100.0, 50.0)
    # sign: mean excess (-.5 + .1) / 2 is below 0: no harm.
    runs.free("sign", -0.5, 0.1)
    runs.held("sign", 10.0, 10.0)
    # bias: one seed in both: harm 1, recall 40.
    runs.free("bias", 1.0)
    runs.held("bias", 40.0, 100.0)
    # Only with, or only without the defense: not counted.
    runs.held("alie", 0.0)
    runs.free("delay", 9.0)
    found = worths(tmp_path)["sentinel", 1]
    # (3 * 75 + 0 * 10 + 1 * 40) / 4 = 66.25
    assert found["damage_weighted_recall"] == 66.25
    assert found["attacks"] == 3 and found["diverged"] == []
    free = worths(tmp_path)["none", 1]
    assert (free["damage_weighted_recall"], free["attacks"]) == (0.0, 4)


def test_other_modes_and_settings_are_other_attacks(save: Any, tmp_path: Path) -> None:
    runs = Saver(save)
    runs.free("zero", 1.0)
    runs.held("zero", 60.0)
    runs.free("zero", 3.0, mode="gradient")
    runs.held("zero", 20.0, mode="gradient")
    runs.free("zero", 7.0, steps=200)
    runs.held("zero", 90.0, steps=200)
    found = worths(tmp_path)
    by_setting = {found["sentinel", n]["damage_weighted_recall"] for n in (1, 2)}
    assert by_setting == {(1 * 60 + 3 * 20) / 4, 90.0}


def test_an_attack_under_which_the_unprotected_model_diverged_is_left_out_and_named(
    save: Any, tmp_path: Path
) -> None:
    runs = Saver(save)
    runs.free("zero", 2.0)
    runs.held("zero", 50.0)
    runs.free("boom", 5.0, None)
    runs.held("boom", 100.0, 100.0)
    found = worths(tmp_path)["sentinel", 1]
    assert found["damage_weighted_recall"] == 50.0
    assert (found["attacks"], found["diverged"]) == (1, ["boom (activation)"])


def test_a_loss_that_is_unknown_is_not_a_loss_of_nothing(save: Any, tmp_path: Path) -> None:
    runs = Saver(save)
    # Seed 0 has no paired run: its loss is unknown. What is left is seed 1.
    runs.free("zero", 0.0, 4.0)
    runs.held("zero", 0.0, 100.0)
    runs._put("sign", "none", 0, recall=0.0, excess_loss=None)
    runs.held("sign", 0.0)
    found = worths(tmp_path)["sentinel", 1]
    assert (found["damage_weighted_recall"], found["attacks"]) == (50.0, 1)


def test_without_harm_there_is_no_weight(save: Any, tmp_path: Path) -> None:
    runs = Saver(save)
    runs.free("zero", -0.25)
    runs.held("zero", 50.0)
    found = worths(tmp_path)["sentinel", 1]
    assert (found["damage_weighted_recall"], found["attacks"]) == (None, 1)


def test_the_largest_undetected_damage_by_hand(save: Any, tmp_path: Path) -> None:
    runs = Saver(save)
    runs.held("zero", 10.0, undetected_damage=0.25)
    runs.held("sign", 10.0, 100.0, undetected_damage=0.0)
    runs._put("bias", "sentinel", 0, recall=10.0, undetected_damage=0.75)
    runs._put("bias", "sentinel", 1, recall=90.0, undetected_damage=0.0)
    runs._put("alie", "sentinel", 0, recall=90.0, undetected_damage=None)
    unseen = worths(tmp_path)["sentinel", 1]["undetected"]
    assert unseen == {
        "damage": 0.375,  # (.75 + 0) / 2
        "attack": "bias (activation)",
        "attacks": 3,
        "diverged": [],
    }


def test_a_model_that_diverged_unseen_is_never_forgotten(save: Any, tmp_path: Path) -> None:
    runs = Saver(save)
    runs.held("zero", 100.0, undetected_damage=0.0)
    runs.held("boom", 10.0, undetected_damage=None, excess_loss=None, diverged=True)
    runs.held("seen", 50.0, undetected_damage=None, excess_loss=None, diverged=True)
    unseen = worths(tmp_path)["sentinel", 1]["undetected"]
    assert unseen == {
        "damage": 0.0,
        "attack": None,
        "attacks": 2,
        "diverged": ["boom (activation)"],
    }


def test_invalid_runs_and_runs_without_attack_have_no_part(save: Any, tmp_path: Path) -> None:
    runs = Saver(save)
    runs.free("zero", 2.0)
    runs.held("zero", 50.0, undetected_damage=0.0)
    runs.held("none", 100.0, undetected_damage=9.0)
    runs.free("sign", 2.0, outcome="invalid")
    runs.held("sign", 0.0, undetected_damage=0.0)
    found = worths(tmp_path)["sentinel", 1]
    assert (found["damage_weighted_recall"], found["attacks"]) == (50.0, 1)
    assert found["undetected"]["damage"] == 0.0


def test_the_committed_results_can_be_read() -> None:
    summary = summarize([CORE])
    assert summary["problems"] == []
    for track in summary["tracks"].values():
        assert {worth["defense"] for worth in track["defenses"]} <= {
            row["defense"] for row in track["rows"]
        }
