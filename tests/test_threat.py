"""Who attacks and from when: shares, schedules, seeds, and grids without room."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from sentinel_bench.config import Component, Scenario
from sentinel_bench.errors import ConfigError
from sentinel_bench.pipeline.tamper import History, Tamperer
from sentinel_bench.threat import Attacker, place

SCHEDULES = ["at-once", "waves", "random-start", "rate"]
LIE = Component.parse("random-value:scale=2")


def scenario(
    stages: int = 8, replicas: int = 8, seeds: dict[str, int] | None = None, **threat: Any
) -> Scenario:
    """A grid of 350 steps, of which 140 warm up, with a threat."""
    return Scenario.model_validate(
        {
            "grid": {"stages": stages, "replicas": replicas},
            "train": {"steps": 350, "warmup_steps": 140},
            "threat": threat,
            "seeds": seeds or {},
        }
    )


def placed(attack: Component = LIE, **given: Any) -> tuple[Attacker, ...]:
    return place(scenario(**given), attack)


def workers(attackers: tuple[Attacker, ...]) -> list[tuple[int, int]]:
    return [(a.stage, a.replica) for a in attackers]


# --- who ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "fraction", "each"),
    [(8, 0.25, 2), (8, 0.375, 3), (8, 0.2, 1), (16, 0.25, 4), (10, 0.3, 3), (8, 0.49, 3)],
)
def test_every_open_stage_has_the_share_of_attackers_rounded_down(replicas, fraction, each):
    attackers = placed(replicas=replicas, fraction=fraction, schedule="at-once")
    assert Counter(a.stage for a in attackers) == dict.fromkeys(range(1, 6), each)
    assert len(set(workers(attackers))) == 5 * each
    assert all(0 <= a.replica < replicas for a in attackers)


@pytest.mark.parametrize(
    ("first", "last", "open_"), [(1, 2, range(1, 6)), (0, 0, range(8)), (3, 4, range(3, 4))]
)
def test_only_stages_between_the_honest_ends_hold_attackers(first, last, open_):
    attackers = placed(honest_first=first, honest_last=last, schedule="at-once", mode="both")
    assert {a.stage for a in attackers} == set(open_)


def test_all_replicas_are_drawn_alike():
    counts: Counter[int] = Counter()
    for seed in range(200):
        counts.update(a.replica for a in placed(seeds={"threat": seed}))
    # 2,000 draws over 8 replicas: 250 each, 4 sigma = 4 sqrt(2000 * 7 / 64) = 59
    assert all(abs(counts[r] - 250) < 60 for r in range(8))


def test_stages_draw_their_attackers_independently():
    by_stage = {a.stage: set() for a in placed()}
    for a in placed():
        by_stage[a.stage].add(a.replica)
    assert len({frozenset(s) for s in by_stage.values()}) > 1


def test_attackers_carry_the_attack_and_the_mode_and_are_sorted():
    attackers = placed(mode="both")
    assert {a.mode for a in attackers} == {"both"}
    assert all(a.attack == LIE for a in attackers)
    assert workers(attackers) == sorted(workers(attackers))


def test_the_record_of_an_attacker_is_plain():
    row = placed()[0].record()
    assert (row["attack"], row["params"]) == ("random-value", {"scale": 2})
    assert set(row) == {
        "stage", "replica", "start", "attack", "params", "mode", "seed", "rate", "poison_self",
        "knowledge", "verifiers",
    }  # fmt: skip


def test_no_attack_places_nobody_even_where_there_is_no_room():
    assert placed(Component(name="none"), stages=2, replicas=1) == ()


# --- when -----------------------------------------------------------------------------------------


def test_at_once_starts_all_after_the_warm_up_unless_told_otherwise():
    assert {a.start for a in placed(schedule="at-once")} == {140}
    assert {a.start for a in placed(schedule="at-once", start=200)} == {200}


@pytest.mark.parametrize("waves", [1, 2, 3, 4, 7])
def test_waves_are_equal_groups_that_start_a_gap_apart(waves):
    attackers = placed(schedule="waves", waves=waves, gap=10, start=150)
    sizes = Counter(a.start for a in attackers)
    assert sorted(sizes) == [150 + 10 * i for i in range(waves)]
    assert sum(sizes.values()) == 10
    assert max(sizes.values()) - min(sizes.values()) <= 1


def test_the_published_waves_are_a_quarter_at_a_time():
    # 16 stages of 8, the first and the last two honest: 13 x 2 = 26 attackers in 4 waves
    sizes = Counter(a.start for a in placed(stages=16))
    assert sorted(sizes.items()) == [(140, 7), (165, 7), (190, 6), (215, 6)]


def test_more_waves_than_attackers_leave_the_last_waves_empty():
    starts = [a.start for a in placed(stages=4, waves=5, gap=10)]  # one open stage
    assert sorted(starts) == [140, 150]


def test_a_wave_mixes_stages():
    first = [a.stage for a in placed(waves=2) if a.start == 140]
    assert len(first) == 5
    assert sorted(first) != [1, 1, 2, 2, 3]


@pytest.mark.parametrize(("span", "steps"), [(None, 105), (10, 10), (10_000, 210)])
def test_random_starts_lie_within_the_span(span, steps):
    starts = [
        a.start
        for seed in range(60)
        for a in placed(schedule="random-start", span=span, seeds={"threat": seed})
    ]
    assert min(starts) >= 140
    assert max(starts) < 140 + steps
    assert max(starts) - min(starts) > 0.9 * (steps - 1)  # 600 draws fill it
    assert len(set(starts)) > 0.5 * steps


def test_single_is_one_attacker_among_those_of_the_other_schedules():
    (one,) = placed(schedule="single")
    assert one.start == 140
    assert (one.stage, one.replica) in workers(placed(schedule="at-once"))
    stages = {placed(schedule="single", seeds={"threat": s})[0].stage for s in range(80)}
    assert stages == set(range(1, 6))


def test_single_needs_no_share():
    assert len(placed(schedule="single", fraction=0.0)) == 1
    assert len(placed(schedule="single", fraction=0.9)) == 1


def test_only_the_schedule_rate_has_a_rate():
    assert {a.rate for a in placed(schedule="rate", rate=0.3)} == {0.3}
    assert {a.start for a in placed(schedule="rate", rate=0.3)} == {140}
    assert {a.rate for a in placed(schedule="waves", rate=0.3)} == {1.0}


def test_an_attacker_with_a_rate_acts_in_that_share_of_the_steps():
    attacker = Attacker(1, 0, 10, Component(name="zeros"), "activation", seed=4, rate=0.3)
    tamperer = Tamperer([attacker], History(), "cpu", lambda stage, replica: False)
    x = torch.ones(2, 1, 1, 4)
    acts = [tamperer.send(1, "activation", step, x, None).tampered[0] for step in range(1010)]
    assert not any(acts[:10])
    assert sum(acts) / 1000 == pytest.approx(0.3, abs=0.06)  # 4 sigma = 4 sqrt(.21 / 1000) = .058


# --- seeds ----------------------------------------------------------------------------------------


def test_one_threat_seed_gives_the_same_workers_under_every_schedule_and_attack():
    expected = workers(placed())
    for schedule in SCHEDULES:
        for text in ("zeros", "delay:steps=5", "bias:kind=constant"):
            attack = Component.parse(text)
            attackers = placed(attack, schedule=schedule, mode="gradient")
            assert workers(attackers) == expected


def test_one_threat_seed_gives_the_same_starts_and_random_numbers_for_every_attack():
    for schedule in SCHEDULES:
        one, other = (
            placed(Component(name=name), schedule=schedule) for name in ("zeros", "random-sign")
        )
        assert [(a.start, a.seed) for a in one] == [(a.start, a.seed) for a in other]


def test_another_threat_seed_changes_workers_starts_and_random_numbers():
    one, other = (placed(schedule="random-start", seeds={"threat": s}) for s in (0, 1))
    assert workers(one) != workers(other)
    assert [a.start for a in one] != [a.start for a in other]
    assert not {a.seed for a in one} & {a.seed for a in other}


def test_another_threat_seed_changes_who_is_in_which_wave():
    waves = {
        tuple((a.stage, a.replica, a.start) for a in placed(seeds={"threat": s})) for s in range(9)
    }
    assert len(waves) == 9


@pytest.mark.parametrize("seed", ["model", "data"])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "single"])
def test_the_other_seeds_change_nothing_here(seed, schedule):
    assert placed(schedule=schedule, seeds={seed: 7}) == placed(schedule=schedule)


def test_every_worker_has_random_numbers_of_its_own():
    attackers = placed(stages=32, replicas=16, fraction=0.4)
    assert len({a.seed for a in attackers}) == len(attackers)
    assert all(0 <= a.seed < 2**63 for a in attackers)


def test_two_workers_of_one_attack_send_different_noise():
    attackers = [a for a in placed(schedule="at-once") if a.stage == 1]
    tamperer = Tamperer(attackers, History(), "cpu", lambda stage, replica: False)
    sent = tamperer.send(1, "activation", 140, torch.zeros(8, 1, 2, 4), None)
    one, other = (a.replica for a in attackers)
    assert [r for r, t in enumerate(sent.tampered) if t] == sorted([one, other])
    assert not torch.equal(sent.x[one], sent.x[other])


# --- no room --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fraction": 0.5}, "4 of 8 replicas of a stage would be malicious"),
        ({"fraction": 0.75}, "6 of 8 replicas"),
        ({"replicas": 2, "schedule": "single"}, "1 of 2 replicas"),
        ({"stages": 3}, "no stage is open to attackers: 3 stages"),
        ({"stages": 8, "honest_first": 5, "honest_last": 5}, "no stage is open"),
        ({"fraction": 0.12}, "fraction 0.12 of 8 replicas is not one attacker; at least 0.125 is"),
        ({"fraction": 0.0}, "is not one attacker"),
        ({"start": 139}, "threat.start 139 must be at least warmup_steps 140"),
        ({"start": 350, "schedule": "at-once"}, "below steps 350"),
        ({"gap": 70}, "the last of 4 waves would start at step 350"),
        ({"start": 275}, "the last of 4 waves would start at step 350"),
    ],
)
def test_an_impossible_grid_is_an_error_that_says_why(given, message):
    with pytest.raises(ConfigError, match=message):
        placed(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"fraction": 0.49},
        {"fraction": 0.125},
        {"stages": 4},
        {"start": 140},
        {"start": 274},
        {"start": 349, "schedule": "at-once"},
        {"gap": 1000, "schedule": "random-start"},
        {"replicas": 3, "schedule": "single"},
    ],
)
def test_the_last_possible_grid_is_possible(given):
    assert placed(**given)


@pytest.mark.parametrize(("fraction", "each"), [(0.5, 4), (0.75, 6), (1.0, 8)])
def test_a_majority_is_possible_when_asked_for(fraction, each):
    attackers = placed(fraction=fraction, allow_majority=True)
    assert Counter(a.stage for a in attackers) == dict.fromkeys(range(1, 6), each)
