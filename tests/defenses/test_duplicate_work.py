"""Duplicate work: who checks whom, who is found, and that no honest worker is ever framed."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from work_again import SHAPE, Desk, desk, flagged, rows, started

from sentinel_bench import registry
from sentinel_bench.config import Component
from sentinel_bench.defenses.recompute import distance, majority
from sentinel_bench.errors import ConfigError

# --- who checks whom ------------------------------------------------------------------------------


def test_each_active_signal_is_computed_again_once_by_another_active_replica_in_one_batch():
    defense = started("duplicate-work", 6)
    active = [True, False, True, True, True, False]
    for step in range(50):
        d = desk(6)
        assert flagged(defense.check(d.signals(active, step=step))) == []
        assert d.recomputed == []
        (pairs,) = d.asked
        assert sorted(of for of, _ in pairs) == sorted(by for _, by in pairs) == [0, 2, 3, 4]
        assert all(of != by for of, by in pairs)


def test_duplicates_rotate_and_each_other_replica_comes_up_as_often():
    defense = started("duplicate-work", 4)
    drawn: Counter[int] = Counter()
    for step in range(600):
        d = desk(4)
        defense.check(d.signals(step=step))
        drawn[dict(d.asked[0])[0]] += 1
    assert set(drawn) == {1, 2, 3}
    assert all(abs(n - 200) < 4 * (600 / 3 * 2 / 3) ** 0.5 for n in drawn.values())


def test_the_seed_decides_what_is_drawn():
    def draws(text: str) -> list[Any]:
        defense, d = started(text, 8), desk(8)
        for step in range(5):
            defense.check(d.signals(step=step))
        return d.asked

    assert draws("duplicate-work:seed=1") == draws("duplicate-work:seed=1")
    assert draws("duplicate-work:seed=1") != draws("duplicate-work:seed=2")


# --- who is found ---------------------------------------------------------------------------------


@pytest.mark.parametrize("verifiers", ["honest", "lie"])
def test_a_wrong_signal_is_flagged_at_once_and_bans_its_sender(verifiers):
    for seed in range(10):
        verdict = started(f"duplicate-work:seed={seed}", 4).check(desk(4, [2], verifiers).signals())
        assert flagged(verdict) == rows(verdict.severe) == [2]
    lenient = started("duplicate-work:proof=false", 4).check(desk(4, [2]).signals())
    assert flagged(lenient) == [2]
    assert rows(lenient.severe) == []


def test_a_verifier_that_lies_about_an_honest_signal_is_flagged_and_the_sender_is_not():
    for seed in range(10):
        d = desk(5)
        liar = Desk(d.honest, d.honest, liars=[3], verifiers="lie")
        assert flagged(started(f"duplicate-work:seed={seed}", 5).check(liar.signals())) == [3]


def test_a_juror_that_backs_a_lie_is_flagged_with_the_liar():
    d = Desk(*(desk(6, [1]).honest, desk(6, [1]).sent), liars=[1, 4], verifiers="cover")
    backed = 0
    for seed in range(20):
        d.asked.clear()
        found = flagged(started(f"duplicate-work:seed={seed}", 6).check(d.signals()))
        if dict(d.asked[0])[1] == 4:  # the colluder confirms the lie: no dispute
            assert found == []
        else:
            assert found == [1, 4]
            backed += 1
    assert 0 < backed < 20


@pytest.mark.parametrize("bad", [2, 3])
@pytest.mark.parametrize("verifiers", ["lie", "collude", "cover"])
def test_no_honest_worker_of_eight_is_ever_framed_and_every_liar_is_found_in_time(verifiers, bad):
    for seed in range(30):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist()
        malicious = order[:bad]
        defense = started(f"duplicate-work:seed={seed}", 8)
        found: set[int] = set()
        for step in range(12):
            active = [r not in found for r in range(8)]
            d = desk(8, malicious, verifiers, seed=100 * seed + step)
            d.sent[sorted(found)] = d.honest[sorted(found)]
            d.liars = [r for r in malicious if r not in found]
            found |= set(flagged(defense.check(d.signals(active, step=step))))
            assert found <= set(malicious)
        assert found == set(malicious)


def test_a_colluder_can_cover_a_single_lie_only_when_it_is_drawn_to_check_it():
    runs, chance, passed = 500, 1 / 7, 0
    for seed in range(runs):
        d = desk(8, [0])
        d.liars, d.verifiers = [0, 1], "cover"
        found = flagged(started(f"duplicate-work:seed={seed}", 8).check(d.signals()))
        assert found in ([], [0, 1])
        passed += not found
    assert abs(passed / runs - chance) < 4 * math.sqrt(chance * (1 - chance) / runs)


def test_colluders_who_all_lie_in_the_same_step_cannot_cover_all_of_it():
    """In a circle at least one of them is checked by somebody honest; backing it gives away all."""
    for seed in range(100):
        d = desk(8, [0, 1, 2], "cover")
        assert flagged(started(f"duplicate-work:seed={seed}", 8).check(d.signals())) == [0, 1, 2]


# --- what cannot be decided -----------------------------------------------------------------------


def test_two_replicas_contradict_each_other_and_neither_is_flagged():
    d = desk(2, [1])
    assert flagged(started("duplicate-work", 2).check(d.signals())) == []
    assert len(d.asked) == 1
    active = [True, False, False, True]
    assert flagged(started("duplicate-work", 4).check(desk(4, [3]).signals(active))) == []


def test_three_replicas_are_enough_against_one_liar():
    for verifiers in ("honest", "lie", "cover"):
        for seed in range(10):
            d = desk(3, [1], verifiers)
            assert flagged(started(f"duplicate-work:seed={seed}", 3).check(d.signals())) == [1]


@pytest.mark.parametrize("active", [[True], [False], [False, True, False]])
def test_one_replica_alone_is_asked_nothing(active):
    d = desk(len(active), [0])
    assert flagged(started("duplicate-work", len(active)).check(d.signals(active))) == []
    assert d.asked == []


def test_a_jury_that_is_split_decides_nothing():
    """Of six, three collude: the other four are two against two wherever there is a dispute."""
    for seed in range(20):
        d = desk(6, [0, 1, 2], "cover")
        assert flagged(started(f"duplicate-work:seed={seed}", 6).check(d.signals())) == []


def test_without_the_means_nobody_is_flagged():
    d = desk(4, [1])
    bare = d.signals()
    without = type(bare)(bare.stage, bare.direction, 0, bare.sent, None, bare.active)
    assert flagged(started("duplicate-work", 4).check(without)) == []
    assert started("duplicate-work", 4).preview(d.signals()) is None


# --- jurors ---------------------------------------------------------------------------------------


def test_as_many_jurors_as_told_are_asked_and_they_are_not_parties():
    d = desk(8, [5])
    assert flagged(started("duplicate-work:jurors=3", 8).check(d.signals())) == [5]
    first, second = d.asked
    (by,) = {by for of, by in first if of == 5}
    assert [of for of, _ in second] == [5, 5, 5]
    jury = {juror for _, juror in second}
    assert len(jury) == 3 and not jury & {5, by}


def test_all_disputes_are_decided_in_one_batch():
    d = desk(8, [2, 5])
    assert flagged(started("duplicate-work", 8).check(d.signals())) == [2, 5]
    assert [len(pairs) for pairs in d.asked] == [8, 2 * 6]


def test_an_even_jury_is_refused():
    with pytest.raises(ConfigError, match="jurors 2 must be odd"):
        registry.defenses.create(Component.parse("duplicate-work:jurors=2"))


# --- the tolerance --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_what_is_below_the_tolerance_of_the_precision_passes(dtype, limit):
    for factor, found in ((1 + 0.5 * limit, []), (1 + 4 * limit, [1])):
        d = desk(4)
        sent = d.honest.clone()
        sent[1] *= factor
        d.honest, d.sent = d.honest.to(dtype), sent.to(dtype)
        assert flagged(started("duplicate-work", 4).check(d.signals())) == found


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e30, 3e38])
def test_signals_of_any_size_are_compared(size):
    d = desk(4)
    d.sent = d.honest.clone()
    assert flagged(started("duplicate-work", 4).check(d.signals())) == []
    d.sent[2] = size
    assert flagged(started("duplicate-work", 4).check(d.signals())) == [2]


def test_signals_whose_squares_vanish_are_compared():
    d = desk(4, [1])
    d.honest *= 1e-30
    d.sent *= 1e-30
    assert flagged(started("duplicate-work", 4).check(d.signals())) == [1]


def test_replicas_that_send_zeros_when_they_should_are_right():
    d = Desk(torch.zeros(4, *SHAPE), torch.zeros(4, *SHAPE))
    assert flagged(started("duplicate-work", 4).check(d.signals())) == []


def test_the_distance_by_hand():
    a = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0], [float("nan"), 0.0], [3e38, 0.0]])
    b = torch.tensor([[3.0, 0.0], [0.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-3e38, 0.0]])
    assert distance(a, b).tolist() == [4 / 5, 0.0, 2.0, 2.0, 2.0]


def test_the_majority_is_an_answer_that_more_than_half_agree_on():
    def of(*values: float) -> float | None:
        found = majority(torch.tensor(values).view(-1, 1, 1, 1), 0.1)
        return None if found is None else found.item()

    assert of() is None
    assert of(1.0) == 1.0
    assert of(1.0, 2.0) is None
    assert of(2.0, 1.0, 1.0) == 1.0
    assert of(1.0, 1.0, 2.0, 2.0) is None
    assert of(1.0, 2.0, 3.0, 3.0, 3.0) == 3.0
    assert of(1.0, 2.0, 3.0) is None


# --- what stands in for a tainted gradient, what is recorded --------------------------------------


def test_the_reference_is_the_mean_of_the_active_replicas_that_are_not_flagged():
    d = desk(5, [1])
    active = [True, True, True, True, False]
    verdict = started("duplicate-work", 5).check(d.signals(active, direction="gradient"))
    assert flagged(verdict) == [1]
    assert verdict.reference is not None
    torch.testing.assert_close(verdict.reference, d.honest[[0, 2, 3]].mean(0))
    d.sent = d.honest
    assert started("duplicate-work", 5).check(d.signals(direction="gradient")).reference is None
    d.sent = torch.full_like(d.honest, 3e38)  # not checked by anybody: the mean does not overflow
    alone = started("duplicate-work", 5)
    signals = type(d.signals())(1, "gradient", 0, d.sent, None, torch.tensor(active))
    reference = alone.check(signals).reference
    assert reference is not None and reference.isfinite().all()


def test_the_record_says_how_far_each_lie_was_from_the_truth():
    verdict = started("duplicate-work", 4).check(desk(4, [2]).signals())
    values, low, high = verdict.statistics["mismatch"]
    assert values.tolist() == pytest.approx([0.0, 0.0, 0.5, 0.0])  # |2x - x| / |2x|
    assert (low, high) == (-1e-4, 1e-4)


def test_all_that_it_is_given_stays_as_it_is():
    d = desk(6, [1, 4], "collude")
    signals = d.signals()
    before = [(t.clone(), t._version) for t in (signals.sent, signals.active)]
    started("duplicate-work", 6).check(signals)
    for tensor, (value, version) in zip((signals.sent, signals.active), before, strict=True):
        assert torch.equal(tensor, value)
        assert tensor._version == version
