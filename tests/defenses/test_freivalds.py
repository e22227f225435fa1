"""Freivalds: who is drawn, what is asked of them, what is made of the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from work_again import SHAPE, Desk, flagged, rows, started, truth

from sentinel_bench.api import LinearCheck, Signals


@dataclass
class Inquiry(Desk):
    """A desk at which linear layers are tested; keeps what it was asked.

    Args:
        errors: of the claims of each replica; default: none.
        apart: replicas whose claims lead to the honest signal and not to what they sent.
    """

    errors: Sequence[float] = ()
    apart: Sequence[int] = ()
    tests: list[tuple[list[int], int, int]] = field(default_factory=list)

    def check_linears(self, of: Sequence[int], projections: int, seed: int) -> LinearCheck:
        self.tests.append((list(of), projections, seed))
        errors = self.errors or [0.0] * len(self.sent)
        result = torch.stack([(self.honest if r in self.apart else self.sent)[r] for r in of])
        return LinearCheck(result, torch.tensor([errors[r] for r in of]).double())


def inquiry(replicas: int, wrong: Sequence[int] = (), **more: Any) -> Inquiry:
    """Return a desk at which some replicas sent twice what they should have sent."""
    honest = truth(replicas)
    sent = honest.clone()
    sent[list(wrong)] *= 2
    return Inquiry(honest, sent, **more)


def test_claims_that_do_not_fit_and_claims_that_lead_elsewhere_are_lies():
    d = inquiry(4, [0, 2], errors=[2e-4, 0.9e-4, 0.0, 0.0], apart=[2])
    verdict = started("freivalds:q=1", 4).check(d.signals())
    assert flagged(verdict) == rows(verdict.severe) == [0, 2]
    error, low, high = verdict.statistics["projection"]
    assert error.tolist() == pytest.approx([2e-4, 0.9e-4, 0, 0])
    assert (low, high) == (-1e-4, 1e-4)
    apart, *_ = verdict.statistics["mismatch"]
    assert apart.tolist() == pytest.approx([0, 0, 0.5, 0])


def test_the_limit_is_that_of_the_precision():
    d = inquiry(2, errors=[1e-2, 3e-2])
    assert flagged(started("freivalds:q=1", 2).check(d.signals())) == [0, 1]
    d.sent, d.honest = d.sent.bfloat16(), d.honest.bfloat16()
    assert flagged(started("freivalds:q=1", 2).check(d.signals())) == [1]
    assert flagged(started("freivalds:q=1,rtol_low=.05", 2).check(d.signals())) == []


def test_the_stage_is_not_computed_again():
    d = inquiry(3)
    started("freivalds:q=1", 3).check(d.signals())
    assert (d.recomputed, d.asked) == ([], [])
    assert [of for of, *_ in d.tests] == [[0, 1, 2]]


def test_only_drawn_signals_are_tested_and_nothing_where_nobody_is_drawn():
    d, defense, calls = inquiry(8), started("freivalds:q=0.05", 8), 400
    for step in range(calls):
        assert flagged(defense.check(d.signals(step=step))) == []
    drawn = sum(len(of) for of, *_ in d.tests)
    assert all(of and of == sorted(set(of)) for of, *_ in d.tests)
    assert abs(drawn - 0.05 * 8 * calls) < 4 * math.sqrt(0.05 * 0.95 * 8 * calls)
    empty = calls - len(d.tests)
    assert abs(empty - 0.95**8 * calls) < 4 * math.sqrt(0.95**8 * (1 - 0.95**8) * calls)


@pytest.mark.parametrize("q, n", [(0.02, 20), (0.1, 10)])
def test_a_liar_is_found_among_n_signals_with_probability_1_minus_1_minus_q_to_the_n(q, n):
    runs, d = 1000, inquiry(3, errors=[0.0, 1.0, 0.0])
    defense = started(f"freivalds:q={q},seed=7", 3)
    found = sum(
        True in [1 in flagged(defense.check(d.signals(step=n * run + i))) for i in range(n)]
        for run in range(runs)
    )
    expected = 1 - (1 - q) ** n
    assert abs(found / runs - expected) < 4 * math.sqrt(expected * (1 - expected) / runs)


def test_inactive_replicas_are_not_tested():
    d = inquiry(4, errors=[0.0, 1.0, 0.0, 0.0])
    verdict = started("freivalds:q=1", 4).check(d.signals([True, False, True, True]))
    assert flagged(verdict) == []
    assert [of for of, *_ in d.tests] == [[0, 2, 3]]
    started("freivalds:q=1", 4).check(d.signals([False] * 4))
    assert len(d.tests) == 1


def test_every_test_has_k_vectors_of_its_own():
    d, defense = inquiry(2), started("freivalds:q=1,k=3", 2)
    for step in range(5):
        defense.check(d.signals(step=step))
    assert {k for _, k, _ in d.tests} == {3}
    assert len({seed for *_, seed in d.tests}) == 5


def test_the_seed_decides_who_is_drawn_and_by_which_vectors():
    def drawn(text: str) -> list[Any]:
        d, defense = inquiry(8), started(text, 8)
        for step in range(20):
            defense.check(d.signals(step=step))
        return d.tests

    assert drawn("freivalds:q=0.3,seed=1") == drawn("freivalds:q=0.3,seed=1")
    assert drawn("freivalds:q=0.3,seed=1") != drawn("freivalds:q=0.3,seed=2")


def test_errors_that_are_not_finite_are_lies():
    d = inquiry(3, [1], errors=[0.0, 2.0, 0.0])
    d.sent[2] = 3e38  # a norm that overflows in float32
    d.honest[2] = -3e38
    d.apart = [2]
    assert flagged(started("freivalds:q=1,rtol=1.9", 3).check(d.signals())) == [1, 2]


def test_nobody_can_foresee_who_is_drawn_and_nobody_is_flagged_where_nothing_can_be_asked():
    d, defense = inquiry(4, [1], errors=[1.0] * 4), started("freivalds:q=1", 4)
    assert defense.preview(d.signals()) is None
    assert d.tests == []
    signals = Signals(1, "gradient", 0, d.sent, None, torch.ones(4, dtype=torch.bool))
    assert flagged(defense.check(signals)) == []


def test_a_proven_gradient_is_replaced_by_the_mean_of_the_others():
    d = inquiry(3, errors=[0.0, 1.0, 0.0])
    verdict = started("freivalds:q=1", 3).check(d.signals(direction="gradient"))
    assert verdict.reference is not None
    assert verdict.reference.shape == SHAPE
    assert torch.allclose(verdict.reference, d.sent[[0, 2]].mean(0))
    lenient = started("freivalds:q=1,proof=false", 3).check(d.signals())
    assert (flagged(lenient), rows(lenient.severe)) == ([1], [])
    assert started("freivalds", 2).params.amnesty is False
