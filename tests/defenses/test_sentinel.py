"""Sentinel and its averaging baseline: moving averages by hand, and what each statistic sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Setup, Signals, Verdict
from sentinel_bench.config import Component
from sentinel_bench.defenses.sentinel import Sentinel
from sentinel_bench.defenses.statistics import l1, sfr

UNIT = 2.0**-7
"""Half width of the fence in the tests of one statistic: a power of two, so sums are exact."""


def started(text: str, replicas: int, shape: tuple[int, int, int], stages: int = 3) -> Sentinel:
    defense = registry.defenses.create(Component.parse(text))
    assert isinstance(defense, Sentinel)
    defense.start(Setup(stages, replicas, shape))
    return defense


def signals(
    sent: Tensor, direction: Any = "activation", stage: int = 0, active: list[bool] | None = None
) -> Signals:
    mask = torch.tensor(active if active is not None else [True] * len(sent))
    return Signals(stage, direction, 0, sent, None, mask)


def pairs(*replicas: tuple[float, float]) -> Tensor:
    """Signals of one token with two hidden units."""
    return torch.tensor(replicas, dtype=torch.float32).view(len(replicas), 1, 1, 2)


def step(defense: Sentinel, given: Signals, clean: list[bool] | None = None) -> Verdict:
    """Check, learn (all that is active unless told otherwise), and close the step."""
    verdict = defense.check(given)
    defense.learn(given, given.active if clean is None else torch.tensor(clean))
    defense.end_step(0)
    return verdict


def reference(defense: Sentinel, given: Signals) -> list[float]:
    """What the next signals at this boundary are compared with."""
    found = defense.check(given).reference
    assert found is not None
    return found.flatten().tolist()


# --- the moving average ---------------------------------------------------------------------------


def test_the_average_starts_with_the_first_mean_and_then_decays_with_beta():
    defense = started("sentinel:beta=0.75", 2, (1, 1, 2))
    step(defense, signals(pairs((2, 4), (4, 8))))
    third = signals(pairs((0, 0), (0, 0)))
    assert reference(defense, third) == [3.0, 6.0]
    step(defense, signals(pairs((6, 0), (8, 4))))  # mean 7 2
    assert reference(defense, third) == [4.0, 5.0]  # .75 * 3 + .25 * 7, .75 * 6 + .25 * 2


def test_the_first_signals_are_compared_with_nothing():
    verdict = started("sentinel", 2, (1, 1, 2)).check(signals(pairs((1, 2), (1e9, -1e9))))
    assert verdict.reference is None
    assert not verdict.flagged.any()
    assert not verdict.severe.any()


def test_a_signal_is_tested_against_the_average_before_it_takes_part_in_it():
    defense = started("sentinel:beta=0.5,statistics=[l1]", 2, (1, 1, 2))
    step(defense, signals(pairs((2, 2), (2, 2))))
    values, _, _ = step(defense, signals(pairs((4, 4), (6, 8)))).statistics["l1"]
    assert values.tolist() == [2.0, 5.0]  # against 2 2, not against an average with 4 to 8
    # now the average is .5 * (2, 2) + .5 * (5, 6) = (3.5, 4)
    values, _, _ = step(defense, signals(pairs((4, 4), (3.5, 4)))).statistics["l1"]
    assert values.tolist() == [0.25, 0.0]


def test_only_clean_replicas_enter_the_average():
    defense = started("sentinel:beta=0.5", 3, (1, 1, 2))
    step(defense, signals(pairs((0, 0), (2, 4), (1e6, 1e6))), clean=[True, True, False])
    given = signals(pairs((3, 3), (99, 99), (5, 7)))
    assert reference(defense, given) == [1.0, 2.0]
    step(defense, given, clean=[True, False, True])
    assert reference(defense, given) == [2.5, 3.5]  # .5 * (1, 2) + .5 * (4, 5)
    step(defense, given, clean=[False, False, False])
    assert reference(defense, given) == [2.5, 3.5]


def test_each_direction_has_its_own_beta_and_each_boundary_its_own_average():
    defense = started("sentinel:beta.activation=0.5,beta.gradient=0.25", 1, (1, 1, 2))
    boundaries = [("activation", 0), ("gradient", 1), ("activation", 1)]
    for place, (direction, stage) in enumerate(boundaries):
        for value in (0.0, 8.0 * (place + 1)):
            given = signals(pairs((value, value)), direction, stage)
            defense.check(given)
            defense.learn(given, given.active)
    found = [reference(defense, signals(pairs((0, 0)), d, s))[0] for d, s in boundaries]
    assert found == [0.5 * 8, 0.75 * 16, 0.5 * 24]


def test_checking_changes_neither_the_average_nor_the_next_verdict():
    defense = started("sentinel", 2, (1, 1, 2))
    step(defense, signals(pairs((2, 4), (4, 8))))
    defense.check(signals(pairs((1e9, 1e9), (1e9, 1e9))))
    assert reference(defense, signals(pairs((0, 0), (0, 0)))) == [3.0, 6.0]


def test_averaging_compares_with_the_mean_of_the_active_replicas_of_this_step():
    defense = started("averaging:statistics=[l1]", 3, (1, 1, 2))
    step(defense, signals(pairs((50, 50), (50, 50), (50, 50))))
    given = signals(pairs((2, 4), (4, 8), (1e6, 1e6)), active=[True, True, False])
    verdict = defense.check(given)
    assert verdict.reference is not None
    assert verdict.reference.flatten().tolist() == [3.0, 6.0]
    assert verdict.statistics["l1"][0][:2].tolist() == [1.5, 1.5]  # (1 + 2) / 2


def test_averaging_has_a_reference_from_the_first_step_and_none_without_active_replicas():
    defense = started("averaging", 2, (1, 1, 2))
    given = pairs((2, 4), (4, 8))
    assert reference(defense, signals(given)) == [3.0, 6.0]
    assert defense.check(signals(given, active=[False, False])).reference is None


# --- flags ----------------------------------------------------------------------------------------


def fenced(statistics: str = "l1") -> Sentinel:
    """Four replicas that all sent zeros: median 0, half width UNIT."""
    still = f"k0=1,grow=1,shrink=1,eps={UNIT},min_steps=2,beta=0.5"
    defense = started(f"sentinel:statistics=[{statistics}],{still}", 4, (1, 1, 2))
    for _ in range(6):
        step(defense, signals(torch.zeros(4, 1, 1, 2)))
    return defense


@pytest.mark.parametrize(
    ("widths", "flagged", "severe"),
    [
        (0.5, False, False),
        (1, True, False),
        (99, True, False),
        (100, True, True),
        (1e6, True, True),
    ],
)
def test_a_deviation_is_severe_from_a_hundred_half_widths_on(widths, flagged, severe):
    sent = torch.zeros(4, 1, 1, 2)
    sent[2] = widths * UNIT
    verdict = fenced().check(signals(sent))
    assert verdict.flagged.tolist() == [False, False, flagged, False]
    assert verdict.severe.tolist() == [False, False, severe, False]


def test_severity_is_a_parameter():
    defense = fenced()
    lenient = registry.defenses.create(
        Component(name="sentinel", params={"severity": 1e4, "statistics": ["l1"]})
    )
    defense.params = lenient.params
    sent = torch.zeros(4, 1, 1, 2)
    sent[2] = 200 * UNIT
    verdict = defense.check(signals(sent))
    assert verdict.flagged.tolist() == [False, False, True, False]
    assert not verdict.severe.any()


def test_the_record_holds_value_and_interval_of_each_statistic():
    defense = fenced("l1,sfr")
    sent = pairs((0, 0), (0, 0), (UNIT, UNIT * 2), (0, 0))
    found = defense.check(signals(sent)).statistics
    assert list(found) == ["l1", "sfr"]
    assert found["l1"][0].tolist() == [0.0, 0.0, UNIT * 1.5, 0.0]
    assert found["sfr"][0].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert found["l1"][1:] == (-UNIT, UNIT)


def test_flagged_deviations_do_not_enter_the_window():
    wide, narrow = fenced(), fenced()
    sent = torch.zeros(4, 1, 1, 2)
    sent[2:] = 50 * UNIT
    for _ in range(20):
        step(wide, signals(sent), clean=[True, True, True, True])
        step(narrow, signals(sent), clean=[True, True, False, False])
    assert narrow.check(signals(sent)).statistics["l1"][1:] == (-UNIT, UNIT)
    assert wide.check(signals(sent)).statistics["l1"][2] > 10 * UNIT


SHAPE = (2, 8, 16)
BASE = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
TURN = torch.eye(16)[torch.randperm(16, generator=torch.Generator().manual_seed(2))]


def around(base: Tensor, seed: int, replicas: int = 8) -> Tensor:
    """Honest replicas: all near one signal."""
    noise = torch.Generator().manual_seed(seed)
    return base + 0.1 * torch.randn(replicas, *SHAPE, generator=noise)


LIES = {
    "larger": lambda x: 3 * x,
    "shifted": lambda x: x + 2,
    "other tokens": lambda x: x.flip(0, 1),
    "negated": lambda x: -x,
}
SEES = {
    "l1": {"larger", "shifted", "other tokens", "negated"},
    "l2": {"other tokens", "negated"},  # standardised: blind to size and shift
    "sfr": {"shifted", "other tokens", "negated"},  # blind to size
    "swd": {"larger", "shifted", "negated"},  # blind to the order of the tokens
}


def warmed(statistics: str) -> Sentinel:
    """Sentinel that knows its honest replicas, with a fence wide enough for all of them."""
    text = f"sentinel:statistics=[{statistics}],lambda=0.3,k0=6,grow=1,shrink=1"
    defense = started(text, 8, SHAPE)
    for seed in range(30):
        step(defense, signals(around(BASE, seed)))
    return defense


@pytest.mark.parametrize("statistic", SEES)
@pytest.mark.parametrize("lie", LIES)
def test_a_single_statistic_sees_what_it_measures_and_no_more(statistic, lie):
    sent = around(BASE, 99)
    sent[5] = LIES[lie](sent[5])
    verdict = warmed(statistic).check(signals(sent))
    assert set(verdict.statistics) == {statistic}
    assert verdict.flagged.tolist() == [r == 5 and lie in SEES[statistic] for r in range(8)]


@pytest.mark.parametrize("lie", LIES)
def test_any_of_the_statistics_flags(lie):
    sent = around(BASE, 99)
    sent[5] = LIES[lie](sent[5])
    verdict = warmed("l1,l2,sfr,swd").check(signals(sent))
    assert verdict.flagged.tolist() == [r == 5 for r in range(8)]
    only_blind = warmed("l2,sfr").check(signals(sent))
    assert bool(only_blind.flagged[5]) == (lie != "larger")


def test_the_statistics_are_those_of_the_signal_and_the_average():
    defense = warmed("l1,sfr")
    sent = around(BASE, 99)
    verdict = defense.check(signals(sent))
    assert verdict.reference is not None
    torch.testing.assert_close(verdict.statistics["l1"][0], l1(sent, verdict.reference))
    torch.testing.assert_close(verdict.statistics["sfr"][0], sfr(sent, verdict.reference))


def test_the_state_stays_finite_when_rows_are_dropped():
    defense = warmed("l1,l2,sfr,swd")
    active = [True] * 7 + [False]
    for seed in range(20):
        sent = around(BASE, seed)
        sent[7] = 0.0
        step(defense, signals(sent, active=active))
    assert torch.tensor(reference(defense, signals(around(BASE, 0)))).isfinite().all()
    fences = defense._fences
    channels = slice(0, 4)  # stage 0, activations
    for state in (fences.k, fences.median, fences.half_width):
        assert state[channels].isfinite().all()


def test_the_memory_is_the_averages_and_the_windows():
    small, large = (started(f"sentinel:window={w}", 8, SHAPE) for w in (50, 100))
    # 3 stages, 2 directions, 4 statistics, 8 replicas, 4 bytes
    assert large.state_bytes() - small.state_bytes() == 50 * 3 * 2 * 4 * 8 * 4
    before = small.state_bytes()
    step(small, signals(around(BASE, 0)))
    assert small.state_bytes() - before == BASE.numel() * 4
