"""Who attacks and from when: shares, schedules, seeds, and grids without room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sentinel_bench.api import Attack, AttackContext, Knowledge, NoParams
from sentinel_bench.config import Component, Scenario
from sentinel_bench.errors import ConfigError, PluginError
from sentinel_bench.pipeline.tamper import History, Tamperer, directions, size_of
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


# --- collusion ------------------------------------------------------------------------------------


def noise(attackers: tuple[Attacker, ...], step: int = 140) -> dict[tuple[int, int], list[float]]:
    """What each attacker sends at a step in place of zeros."""
    tamperer = Tamperer(attackers, History(), "cpu", lambda stage, replica: False)
    found = {}
    for stage in sorted({a.stage for a in attackers}):
        for now in range(140, step + 1):
            sent = tamperer.send(stage, "activation", now, torch.zeros(8, 1, 2, 4), None)
        found |= {
            (a.stage, a.replica): sent.x[a.replica].flatten().tolist()
            for a in attackers
            if a.stage == stage
        }
    return found


def test_colluders_draw_the_same_numbers_in_a_stage_and_others_in_another():
    for step in (140, 143):
        sent = noise(placed(schedule="at-once", collude=True), step)
        by_stage = {s: [x for (stage, _), x in sent.items() if stage == s] for s in range(1, 6)}
        assert all(one == other for one, other in by_stage.values())
        assert len({tuple(x) for x in sent.values()}) == 5
        alone = noise(placed(schedule="at-once"), step)
        assert len({tuple(x) for x in alone.values()}) == len(alone) == 10


def test_colluders_with_a_rate_act_in_the_same_steps():
    for collude in (True, False):
        given = {"schedule": "rate", "rate": 0.5, "collude": collude}
        attackers = [a for a in placed(**given) if a.stage == 1]
        tamperer = Tamperer(attackers, History(), "cpu", lambda stage, replica: False)
        acting = {
            sum(tamperer.send(1, "activation", step, torch.zeros(8, 1, 1, 2), None).tampered)
            for step in range(140, 200)
        }
        assert acting == ({0, 2} if collude else {0, 1, 2})


def test_collusion_changes_random_numbers_alone():
    def rest(attackers: tuple[Attacker, ...]) -> list[Any]:
        return [(a.stage, a.replica, a.start, a.attack, a.mode) for a in attackers]

    for schedule in SCHEDULES:
        one, other = (placed(schedule=schedule, collude=c) for c in (False, True))
        assert rest(one) == rest(other)
        assert len({a.seed for a in other}) == 5
        assert not {a.seed for a in one} & {a.seed for a in other if a.replica}


def test_another_threat_seed_gives_colluders_other_numbers():
    one, other = (placed(collude=True, seeds={"threat": s}) for s in (0, 1))
    assert not {a.seed for a in one} & {a.seed for a in other}


# --- what each attacker does ----------------------------------------------------------------------

MIXED = Component.parse("mixed")
POOL = Component.parse(
    'mixed:pool=[zeros,"delay:steps=20",alie,"on-off:attack=fence-rider",label-flip],'
    "modes=[activation,both]"
)


def roles(attackers: tuple[Attacker, ...]) -> list[tuple[str, str]]:
    return [(a.attack.label(), a.mode) for a in attackers]


def test_what_is_dealt_follows_from_the_threat_seed_alone():
    for schedule in SCHEDULES:
        given = {"stages": 16, "schedule": schedule}
        one = placed(MIXED, **given)
        assert placed(MIXED, **given) == one
        for seed in ("model", "data"):
            assert placed(MIXED, **given, seeds={seed: 5}) == one
        other = placed(MIXED, **given, seeds={"threat": 1})
        assert roles(other) != roles(one)


def test_dealing_changes_neither_workers_nor_starts_nor_random_numbers():
    for schedule in SCHEDULES:
        for collude in (False, True):
            given = {"schedule": schedule, "collude": collude}
            one, other = placed(MIXED, **given), placed(Component(name="zeros"), **given)
            assert [(a.stage, a.replica, a.start, a.seed) for a in one] == [
                (a.stage, a.replica, a.start, a.seed) for a in other
            ]


def test_an_attackers_role_does_not_depend_on_who_starts_when():
    assert roles(placed(MIXED, schedule="waves")) == roles(placed(MIXED, schedule="random-start"))


def test_the_mode_of_the_scenario_does_not_count_for_what_is_dealt():
    modes = {mode: placed(MIXED, mode=mode) for mode in ("activation", "gradient", "both")}
    assert len({str(roles(a)) for a in modes.values()}) == 1
    assert {a.mode for a in modes["both"]} == {"activation", "gradient"}


def test_the_truth_records_what_each_attacker_does_and_knows():
    expected = {
        "zeros": ({}, "own"),
        "delay": ({"steps": 20}, "own"),
        "alie": ({}, "honest"),
        "on-off": ({"attack": "fence-rider"}, "detector"),
        "label-flip": ({}, "own"),
    }
    attackers = placed(POOL, stages=32)
    rows = [a.record() for a in attackers]
    assert {row["attack"] for row in rows} == set(expected)
    for a, row in zip(attackers, rows, strict=True):
        assert (row["params"], row["knowledge"]) == expected[row["attack"]]
        assert row["mode"] == a.mode
        assert (row["mode"] == "update") == (row["attack"] == "label-flip")
    assert {row["mode"] for row in rows} == {"activation", "both", "update"}


@pytest.mark.parametrize(
    ("attack", "mode", "knowledge"),
    [
        ("zeros", "both", "own"),
        ("ipm", "both", "honest"),
        ("fence-rider", "both", "detector"),
        ("fence-rider:attack=alie", "both", "honest+detector"),
        ("update-alie", "update", "honest"),
        ("backdoor", "update", "model"),
    ],
)
def test_the_record_says_on_what_an_attack_acts_and_what_it_knows(attack, mode, knowledge):
    row = placed(Component.parse(attack), mode="both")[0].record()
    assert (row["mode"], row["knowledge"]) == (mode, knowledge)


def test_a_dealt_attacker_keeps_its_attack_and_mode_for_the_whole_run():
    attackers = placed(
        Component.parse('mixed:pool=[zeros,"ones:value=3"],modes=[activation,gradient]'),
        schedule="at-once",
        stages=16,
    )
    assert len(set(roles(attackers))) == 4
    tamperer = Tamperer(attackers, History(), "cpu", lambda stage, replica: False)
    value = {"zeros": 0.0, "ones": 3.0}
    for step in range(140, 150):
        for a in attackers:
            for direction in ("activation", "gradient"):
                sent = tamperer.send(a.stage, direction, step, torch.ones(8, 1, 1, 2), None)
                expected = value[a.attack.name] if direction == a.mode else 1.0
                assert sent.x[a.replica].unique().tolist() == [expected]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("activation", ("activation",)),
        ("gradient", ("gradient",)),
        ("both", ("activation", "gradient")),
        ("update", ()),
    ],
)
def test_the_directions_of_a_mode(mode, expected):
    assert directions(mode) == expected


def test_poison_self_is_a_part_of_the_truth():
    assert {a.poison_self for a in placed()} == {False}
    attackers = placed(poison_self=True)
    assert {a.poison_self for a in attackers} == {True}
    assert attackers[0].record()["poison_self"] is True


class Dealer(Attack[NoParams]):
    """Deals what a test tells it to deal."""

    name: ClassVar[str] = "dealer"
    goal = formula = source = "test"
    dealt: ClassVar[Any] = None

    @classmethod
    def deal(cls, own: Component, mode: Any, rng: Any) -> Any:
        if isinstance(cls.dealt, Exception):
            raise cls.dealt
        return cls.dealt


@pytest.mark.parametrize(
    "dealt",
    [ValueError("no idea"), None, ("zeros", "both"), (Component(name="zeros"), "sideways"),
     (Component(name="zeroes"), "both")],
)  # fmt: skip
def test_a_deal_that_cannot_be_is_the_attacks_fault(
    plug: Callable[..., None], monkeypatch: pytest.MonkeyPatch, dealt: Any
) -> None:
    plug(Dealer)
    monkeypatch.setattr(Dealer, "dealt", dealt)
    with pytest.raises(PluginError) as error:
        placed(Component(name="dealer"))
    assert error.value.party == "attack"


@pytest.mark.parametrize(
    "text", ["zeroes", "delay:step=3", "mixed:pool=[zeroes]", "mixed:modes=[sideways]"]
)
def test_what_a_user_has_mistyped_is_no_fault_of_an_attack(text):
    with pytest.raises(ConfigError):
        placed(Component.parse(text))


class Needy(Attack[NoParams]):
    """Cannot say what it knows."""

    name: ClassVar[str] = "needy"
    goal = formula = source = "test"

    def needs(self) -> frozenset[Knowledge]:
        raise ValueError("no idea")


def test_an_attack_that_cannot_say_what_it_knows_is_at_fault(plug: Callable[..., None]) -> None:
    plug(Needy)
    (attacker, *_) = placed(Component(name="needy"))
    with pytest.raises(PluginError):
        Tamperer([attacker], History(), "cpu", lambda stage, replica: False)
    with pytest.raises(PluginError):
        attacker.record()


# --- how much harm --------------------------------------------------------------------------------


class Pieces(Attack[NoParams]):
    """Turns a third of what it sends around, in every second step."""

    name: ClassVar[str] = "pieces"
    goal = formula = source = "test"

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        return x if ctx.step % 2 else -x


X = torch.tensor([[[3.0, 4.0]]])
"""A signal of length 5."""


@pytest.mark.parametrize(
    ("sent", "size"),
    [
        (X, 0.0),
        (0 * X, 1 / 2),
        (-X, 2 / 3),
        (3 * X, 2 / 3),
        (X + torch.tensor([4.0, -3.0]), 1 / 2),
        (1e30 * X, 1.0),
        (3e38 * X.sign(), 1.0),
        (X / 0, 1.0),
        (X.double(), 1.0),
        (X[..., :1], 1.0),
        (X * torch.nan, 1.0),
        (torch.tensor([[[3.0, torch.nan]]]), 1.0),
    ],
)
def test_the_size_of_a_lie_is_its_share_of_what_was_sent(sent, size):
    assert size_of(sent, X) == pytest.approx(size)


def test_the_size_of_a_lie_about_nothing_is_one_and_of_nothing_about_nothing_zero():
    nothing = torch.zeros(1, 1, 2)
    assert size_of(X, nothing) == 1.0
    assert size_of(nothing, nothing) == 0.0


def test_harm_is_counted_for_each_attacker_in_the_steps_in_which_it_lies(
    plug: Callable[..., None],
) -> None:
    plug(Pieces)
    texts = ("zeros", "pieces", "scaling:alpha=1")
    crowd = [
        Attacker(1, r, 2, Component.parse(text), "both", seed=r) for r, text in enumerate(texts)
    ]
    told: list[tuple[int, int, int, str]] = []
    tamperer = Tamperer(crowd, History(), "cpu", lambda s, r: False, lambda *act: told.append(act))
    for step in range(8):
        for direction in ("activation", "gradient"):
            tamperer.send(1, direction, step, X.expand(4, 1, 1, 2), None)
    harms = {r: (h.signals, h.size) for (_, r), h in tamperer.harms().items()}
    assert harms == {
        0: (12, pytest.approx(12 * 0.5)),
        1: (6, pytest.approx(6 * 2 / 3)),
        2: (0, 0.0),
    }
    assert len(told) == 18
    assert {r for _, _, r, _ in told} == {0, 1}


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
