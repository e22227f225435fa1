"""What the pages of attacks and defenses say was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sentinel_bench.leaderboard import measured, summarize


def attacked(root: Path, name: str) -> list[str]:
    return measured("attack", name, summarize([root])["tracks"], ("sentinel",))


def defended(root: Path, name: str) -> list[str]:
    return measured("defense", name, summarize([root])["tracks"], ("sentinel",))


FOUND = {"recall": 100.0, "f1": 99.96, "false_bans": 0.0, "excess_loss": 0.0071}


def test_an_attack_has_a_line_for_each_track_mode_and_parameter_setting(
    save: Any, tmp_path: Path
) -> None:
    for seed in range(3):
        save(f"a{seed}", "zero", "none", seed, excess_loss=2.25 + seed / 4)
        save(f"b{seed}", "zero", "sentinel", seed, **FOUND)
    save("c", "zero:x=1", "sentinel", mode="gradient", **FOUND)
    save("d", "zero", "none", track="mixed", excess_loss=-0.125)
    save("e", "zeroes", "none")
    for seed in range(4):
        save(f"f{seed}", "zero", "sentinel:values=x", seed)
    save("g", "zero", "none", mode="gradient", excess_loss=0.5)
    save("h", "zero:a=1", "sentinel", **FOUND)
    assert attacked(tmp_path, "zero") == [
        "core, activation, 3 seeds: excess loss +2.500 unprotected; "
        "under sentinel +0.007, recall 100, F1 100, false bans 0",
        "core, activation, a=1, 1 seed: "
        "under sentinel excess loss +0.007, recall 100, F1 100, false bans 0",
        "core, gradient, 1 seed: excess loss +0.500 unprotected",
        "core, gradient, x=1, 1 seed: "
        "under sentinel excess loss +0.007, recall 100, F1 100, false bans 0",
        "mixed, activation, 1 seed: excess loss -0.125 unprotected",
    ]
    assert attacked(tmp_path, "alie") == []


@pytest.mark.parametrize(
    "free, held, line",
    [
        (
            [{"excess_loss": None, "diverged": True}] * 2,
            [{"recall": 40.0, "f1": None}],
            "2 seeds: diverged unprotected; "
            "under sentinel +1.000, recall 40, F1 unknown, false bans 1 (1 seed)",
        ),
        (
            [{"excess_loss": None, "diverged": True}, {"excess_loss": 2.0}],
            [],
            "2 seeds: excess loss +2.000 (1 of 2 diverged) unprotected",
        ),
        (
            [{"excess_loss": None}],
            [],
            "1 seed: excess loss unknown unprotected",
        ),
        (
            [{"outcome": "invalid"}],
            [],
            "0 seeds: no valid run unprotected",
        ),
        (
            [{"attack_success_rate": 93.75, "attack_success_base": 0.5}],
            [{"attack_success_rate": 12.34, "attack_success_base": 0.5}],
            "1 seed: excess loss +1.000 unprotected, attack success 93.8 (before 0.5); "
            "under sentinel +1.000, recall 1, F1 1, false bans 1, attack success 12.3 (before 0.5)",
        ),
    ],
)
def test_what_is_odd_is_said(
    save: Any, tmp_path: Path, free: list[Any], held: list[Any], line: str
) -> None:
    for seed, scores in enumerate(free):
        save(f"a{seed}", "zero", "none", seed, **scores)
    for seed, scores in enumerate(held):
        save(f"b{seed}", "zero", "sentinel", seed, **scores)
    assert attacked(tmp_path, "zero") == [f"core, activation, {line}"]


def test_the_run_without_attack_has_no_recall(save: Any, tmp_path: Path) -> None:
    save("a", "none", "none", excess_loss=None, validation_loss=4.21749)
    save("b", "none", "sentinel", **FOUND)
    assert attacked(tmp_path, "none") == [
        "core, 1 seed: validation loss 4.217 unprotected; "
        "under sentinel excess loss +0.007, false bans 0"
    ]


def test_settings_of_one_track_are_told_apart(save: Any, tmp_path: Path) -> None:
    save("a", "zero", "none", excess_loss=1.0)
    save("b", "zero", "none", steps=200, excess_loss=2.0)
    lines = attacked(tmp_path, "zero")
    assert [line.split(",")[0] for line in lines] == ["core [1]", "core [2]"]
    overall, by_mode, *others = defended(tmp_path, "none")
    assert overall.startswith("core [1]: damage-weighted recall 1 over 1 attack")
    assert by_mode.startswith("core [1], activation, 1 attack, 1 seed")
    assert [line.split(",")[0].split(":")[0] for line in others] == ["core [2]", "core [2]"]


def test_a_defense_is_shown_over_all_attacks_and_by_mode(save: Any, tmp_path: Path) -> None:
    save("a", "zero", "none", recall=0.0, excess_loss=3.0)
    save("b", "sign", "none", recall=0.0, excess_loss=1.0, mode="gradient")
    save("c", "none", "sentinel", false_bans=2.0)
    save("d", "zero", "sentinel", recall=50.0, f1=60.0, excess_loss=0.5, undetected_damage=0.0)
    save("e", "bias", "sentinel", f1=30.0, excess_loss=0.25, undetected_damage=0.0)
    scores = {"recall": 10.0, "f1": 15.0, "excess_loss": 0.75, "undetected_damage": 0.75}
    save("f", "sign", "sentinel", mode="gradient", **scores)
    save("g", "zero", "sentinel:k=3", diverged=True, excess_loss=None, undetected_damage=None)
    # (3 * 50 + 1 * 10) / 4 = 40
    assert defended(tmp_path, "sentinel") == [
        "core: damage-weighted recall 40 over 2 attacks; largest undetected damage +0.750 "
        "(sign (gradient)); without an attack, false bans 2",
        "core, activation, 2 attacks, 1 seed: mean F1 45, lowest 30 (bias); "
        "largest excess loss +0.500 (zero)",
        "core, gradient, 1 attack, 1 seed: mean F1 15, lowest 15 (sign); "
        "largest excess loss +0.750 (sign)",
        "core, k=3: damage-weighted recall 1 over 1 attack; largest undetected damage unknown; "
        "made the model diverge unseen: zero (activation)",
        "core, k=3, activation, 1 attack, 1 seed: mean F1 1, lowest 1 (zero); "
        "the model diverged under zero",
    ]


def test_a_defense_says_what_it_costs(save: Any, tmp_path: Path) -> None:
    price = {"extra_flops": 0.0201, "extra_bytes": 12345.0, "state_bytes": 64.0}
    save("a", "zero", "sentinel", **price)
    save("b", "zero", "sentinel:k=3", **price | {"extra_flops": 1.0})
    save("c", "zero", "coherence")
    words = "floating-point operations, 12,345 bytes a step, 64 bytes of state"
    assert [line for line in defended(tmp_path, "sentinel") if "cost" in line] == [
        f"core: cost +2.01 % {words}",
        f"core, k=3: cost +100.00 % {words}",
    ]
    assert not [line for line in defended(tmp_path, "coherence") if "cost" in line]


def test_settings_found_for_a_track_are_said(save: Any, tmp_path: Path) -> None:
    path = save("a", "zero", "sentinel")
    path.write_text(path.read_text().replace('"tuned": {}', '"tuned": {"quarantine": true}'))
    assert defended(tmp_path, "sentinel")[-1] == (
        'core: measured with the settings found for this track, {"quarantine": true}'
    )
