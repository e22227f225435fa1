"""What an attacker contributes to the weight gradients of its stage arrives there exactly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scripted import (
    FROZEN,
    TOLD,
    Grads,
    Lab,
    Plain,
    assert_close,
    attackers,
    equal,
    only,
    script,
    spy_gradients,
    weights,
)

from sentinel_bench.errors import PluginError

SPLITS: list[dict[str, Any]] = [
    {"grid__stages": 4, "grid__replicas": 4},
    {"grid__stages": 3, "grid__replicas": 3, "model__layers": 5, "train__batch_size": 2},
    {"grid__stages": 2, "grid__replicas": 5, "model__layers": 3},
]
FOUR = {**FROZEN, **SPLITS[0]}
PLACES = [
    {**split, **only(stage, split["grid__stages"])}
    for split in SPLITS
    for stage in range(split["grid__stages"])
]
SHARE = {"threat__fraction": 0.4}
"""One of three or four replicas, two of five."""


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[Grads]:
    return spy_gradients(monkeypatch)


def plain(lab: Lab, **grid: Any) -> Plain:
    return Plain(lab.scenario(**grid), lab.tokens)


def factor_of(lab: Lab, attack: str, factor: float, **grid: Any) -> Any:
    """Return what each replica's part in a stage is multiplied with."""
    bad = {(a.stage, a.replica) for a in attackers(lab, attack, **grid)}
    return lambda stage, replica: factor if (stage, replica) in bad else 1.0


# --- exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "defense"),
    [(SPLITS[0], "sentinel"), (SPLITS[1], "script:quarantine=true"), (SPLITS[2], "none")],
)
def test_an_update_that_is_the_honest_one_changes_nothing_to_the_bit(
    lab: Lab, split: dict[str, Any], defense: str
) -> None:
    """Not even if the attacker destroys all that it was told."""
    grid = {**split, **SHARE, "threat__honest_first": 0, "threat__honest_last": 0}
    grid |= {"threat__mode": "both", "train__steps": 7}
    bare, one = lab.run("none", defense, **grid)
    for attack in ("forger:what=copy", "forger:vandal=true,ask=[honest,colluders]"):
        quiet, two = lab.run(attack, defense, **grid)
        assert quiet.timeless() == bare.timeless()
        assert equal(weights(one), weights(two))
    assert len(TOLD) == len(attackers(lab, "forger", **grid)) * 3


@pytest.mark.parametrize("grid", PLACES)
def test_a_flipped_update_is_training_with_that_replicas_gradients_of_that_stage_negated(
    lab: Lab, gradients: list[Grads], grid: dict[str, Any]
) -> None:
    grid = {**FROZEN, **grid, **SHARE}
    gain = 1.0 + grid["threat__honest_first"]
    attack, factor = f"update-sign-flip:gain={gain}", -gain
    events, _ = lab.run(attack, "none", **grid)
    reference = plain(lab, **grid)
    everybody = range(grid["grid__replicas"])
    expected = factor_of(lab, attack, factor, **grid)
    for step in range(2):
        assert_close(gradients[step], reference.mean(everybody, expected, step))
    assert [row["excluded"] for row in events.of("step")] == [0, 0]


def test_attackers_of_several_stages_and_of_one_stage_add_up(
    lab: Lab, gradients: list[Grads]
) -> None:
    grid = {**FROZEN, "grid__stages": 4, "grid__replicas": 5, **SHARE}
    grid |= {"threat__honest_first": 0, "threat__honest_last": 1}
    lab.run("update-sign-flip:gain=2", "script", **grid)
    assert len(attackers(lab, "update-sign-flip", **grid)) == 6
    expected = factor_of(lab, "update-sign-flip", -2.0, **grid)
    assert_close(gradients[0], plain(lab, **grid).mean(range(5), expected))


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    "flags",
    [
        [(2, "activation", 1)],
        [(3, "gradient", 1)],
        [(1, "gradient", 1)],
        [(0, "activation", 0)],
        [(2, "gradient", 0)],
        [(1, "activation", 2), (2, "gradient", 1)],
    ],
)  # fmt: skip
def test_excluded_ranks_contribute_neither_honestly_nor_otherwise(
    lab: Lab, gradients: list[Grads], stage: int, flags: list[tuple[int, str, int]]
) -> None:
    """Replica 0 of the flags is the attacker, the others are the honest ones in order."""
    grid = {**FOUR, **only(stage, 4), "train__steps": 1}
    bad = attackers(lab, "update-sign-flip", **grid)[0].replica
    order = [bad, *(r for r in range(4) if r != bad)]
    marks = [(0, s, direction, order[r]) for s, direction, r in flags]
    events, _ = lab.run(
        "update-sign-flip:gain=2", script(*marks, quarantine=True, amnesty=False), **grid
    )
    keep = sorted({0, 1, 2, 3} - {replica for *_, replica in marks})
    expected = factor_of(lab, "update-sign-flip", -2.0, **grid)
    assert_close(gradients[0], plain(lab, **grid).mean(keep, expected))
    assert events.of("step")[0]["excluded"] == 4 - len(keep)
    assert bool(events.of("act")) == (bad in keep)


@pytest.mark.parametrize(("policy", "left"), [("reroute", 4), ("drop", 3)])
def test_a_banned_worker_contributes_nothing_of_its_own(
    lab: Lab, gradients: list[Grads], policy: str, left: int
) -> None:
    grid = {**FOUR, **only(1, 4), "train__steps": 3}
    bad = attackers(lab, "update-sign-flip", **grid)[0].replica
    defense = script((0, 1, "activation", bad), severe=True, on_ban=policy)
    events, _ = lab.run("update-sign-flip:gain=2", defense, **grid)
    assert [(b["step"], b["replica"]) for b in events.of("ban")] == [(0, bad)]
    keep = [r for r in range(4) if left == 4 or r != bad]
    for step in (1, 2):
        assert_close(gradients[step], plain(lab, **grid).mean(keep, step=step))
    assert [t["signals"] for t in events.of("tamper")] == [1]


def test_a_rank_that_another_stage_lost_contributes_nothing(
    lab: Lab, gradients: list[Grads]
) -> None:
    grid = {**FOUR, **only(1, 4), "train__steps": 2}
    bad = attackers(lab, "update-sign-flip", **grid)[0].replica
    defense = script((0, 2, "activation", bad), severe=True, on_ban="drop")
    lab.run("update-sign-flip:gain=2", defense, **grid)
    keep = [r for r in range(4) if r != bad]
    assert_close(gradients[1], plain(lab, **grid).mean(keep, step=1))


def test_a_rank_that_another_stage_lost_lets_no_lie_about_a_gradient_through_either(
    lab: Lab, gradients: list[Grads]
) -> None:
    grid = {**FOUR, **only(2, 4), "threat__mode": "gradient"}
    bad = attackers(lab, "ones", **grid)[0].replica
    defense = script((0, 1, "activation", bad), severe=True, on_ban="drop")
    events, _ = lab.run("ones", defense, **grid)
    assert events.of("step")[1]["excluded"] == 1
    keep = [r for r in range(4) if r != bad]
    assert_close(gradients[1], plain(lab, **grid).mean(keep, step=1))


@pytest.mark.parametrize("grid", PLACES)
def test_label_flip_contributes_the_gradients_of_its_own_stage_for_shifted_labels(
    lab: Lab, gradients: list[Grads], grid: dict[str, Any]
) -> None:
    shift = 7
    grid = {**FROZEN, **grid, **SHARE, "train__steps": 1}
    attack = f"label-flip:shift={shift}"
    lab.run(attack, "none", **grid)
    reference = plain(lab, **grid)
    replicas = grid["grid__replicas"]
    expected = reference.mean(range(replicas))
    for bad in attackers(lab, attack, **grid):
        honest, wrong = reference.single(bad.replica), reference.single(bad.replica, shift=shift)
        for i, stage in enumerate(reference.stages):
            if stage == bad.stage:
                expected[i] = expected[i] + (wrong[i] - honest[i]) / replicas
    assert_close(gradients[0], expected)


# --- what an attacker is told ---------------------------------------------------------------------


@pytest.mark.parametrize("grid", PLACES)
def test_told_gradients_are_those_of_single_replicas_and_their_mean_is_the_stacked_one(
    lab: Lab, gradients: list[Grads], grid: dict[str, Any]
) -> None:
    grid = {**FROZEN, **grid, **SHARE}
    lab.run("forger:ask=[honest,colluders]", "none", **grid)
    reference = plain(lab, **grid)
    malicious = [a.replica for a in attackers(lab, "forger", **grid)]
    honest = [r for r in range(grid["grid__replicas"]) if r not in malicious]
    assert [(t.step, t.replica) for t in TOLD] == [(s, r) for s in range(2) for r in malicious]
    for told in TOLD:
        singles = [
            reference.flat(reference.single(r, told.step), told.stage)
            for r in range(grid["grid__replicas"])
        ]
        theirs, ours = told.what["honest"], told.what["colluders"]
        assert_close(theirs, torch.stack([singles[r] for r in honest]))
        assert_close(ours.signals, torch.stack([singles[r] for r in malicious]))
        assert_close(told.own, singles[told.replica])
        assert torch.equal(ours.signals[ours.index], told.own)
        mean = torch.cat([theirs, ours.signals]).mean(0)
        assert_close(mean, reference.flat(gradients[told.step], told.stage))
        assert torch.equal(told.what["targets"], reference.batch(told.step)[1][told.replica])
        assert told.what["vocabulary"] == lab.tokens.vocab_size


@pytest.mark.parametrize("stage", range(4))
def test_relabelled_with_the_true_targets_the_gradients_are_the_honest_ones(
    lab: Lab, stage: int
) -> None:
    lab.run("forger:what=relabel,ask=[honest]", "none", **FOUR, **only(stage, 4))
    assert len(TOLD) == 2
    for told in TOLD:
        assert_close(told.what["relabel"], told.own)


@pytest.mark.parametrize("late", [False, True])
def test_honest_gradients_are_those_of_the_honest_ranks_that_are_kept(lab: Lab, late: bool) -> None:
    grid = {**FOUR, **only(1, 4), "train__steps": 1}
    bad = attackers(lab, "forger", **grid)[0].replica
    out, *kept = (r for r in range(4) if r != bad)
    mark = (0, 3, "gradient", out) if late else (0, 0, "activation", out)
    lab.run("forger:ask=[honest]", script(mark, quarantine=True, amnesty=False), **grid)
    (told,) = TOLD
    reference = plain(lab, **grid)
    singles = [reference.flat(reference.single(r), 1) for r in kept]
    assert_close(told.what["honest"], torch.stack(singles))


def test_among_quarantined_honest_ranks_there_is_nobody_to_look_at(lab: Lab) -> None:
    grid = {**FOUR, **only(1, 4), "train__steps": 1}
    bad = attackers(lab, "forger", **grid)[0].replica
    marks = [(0, 0, "activation", r) for r in range(4) if r != bad]
    defense = script(*marks, quarantine=True, amnesty=False)
    lab.run("forger:ask=[honest]", defense, **grid)
    assert len(TOLD[0].what["honest"]) == 0
    for attack in ("update-ipm", "update-alie", "update-min-max", "update-mimic"):
        events, _ = lab.run(attack, defense, **grid)  # is honest
        assert not events.of("act")


# --- the record, and faults -----------------------------------------------------------------------


@pytest.mark.parametrize("defense", ["none", "sentinel"])
def test_an_attack_on_updates_is_recorded_with_and_without_a_defense(
    lab: Lab, defense: str
) -> None:
    bare, _ = lab.run("none", defense)
    events, _ = lab.run("update-sign-flip", defense)
    plan = {(a.stage, a.replica) for a in attackers(lab, "update-sign-flip")}
    assert {(a["stage"], a["replica"]) for a in events.of("act")} == plan
    assert {(a["step"], a["direction"]) for a in events.of("act")} == {(4, "update")}
    rows = {(t["stage"], t["replica"]): (t["signals"], t["size"]) for t in events.of("tamper")}
    assert rows == dict.fromkeys(plan, (8, pytest.approx(2 / 3)))
    losses = [[row["loss"] for row in e.of("step")] for e in (bare, events)]
    assert losses[0][:5] == losses[1][:5]  # the first update shows in the step after it
    assert losses[0][5] != losses[1][5]
    assert not any(row["tampered"] for row in events.of("step"))  # no signal is


def test_updates_of_nan_break_training_without_a_defense_and_are_skipped_with_one(
    lab: Lab,
) -> None:
    events, session = lab.run("forger:what=nan", "none")
    assert not any(row.get("skipped") for row in events.of("step"))
    assert math.isnan(events.of("eval")[0]["loss"])
    assert not all(w.isfinite().all() for w in weights(session).values())
    events, session = lab.run("forger:what=nan", "sentinel")
    assert [bool(row.get("skipped")) for row in events.of("step")] == [False] * 4 + [True] * 8
    assert math.isfinite(events.of("eval")[0]["loss"])
    assert all(w.isfinite().all() for w in weights(session).values())


FAULTS = [
    ("short", "attack forger: update returned torch.float32 ["),
    ("double", "attack forger: update returned torch.float64 ["),
    ("nothing", "returned NoneType, no tensor"),
    ("raise", "raised RuntimeError: no idea"),
    ("change", "changed the tensor it was given"),
]


@pytest.mark.parametrize(("what", "message"), FAULTS)
def test_an_update_that_breaks_the_contract_is_the_attacks_fault(
    lab: Lab, what: str, message: str
) -> None:
    with pytest.raises(PluginError) as error:
        lab.run(f"forger:what={what}", "none", train__steps=5)
    assert error.value.party == "attack"
    assert message in str(error.value)
