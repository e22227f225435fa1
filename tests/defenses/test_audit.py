"""Audit: how many signals are drawn, how soon a liar is found, what is computed again."""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import pytest
from work_again import Desk, desk, flagged, rows, started

from sentinel_bench.api import Defense

TINY = (1, 1, 2)
STEPS = count()


def liar_is_found(defense: Defense[Any], d: Desk, n: int) -> bool:
    """Check the same signals in n steps, whatever is found."""
    return True in [1 in flagged(defense.check(d.signals(step=next(STEPS)))) for _ in range(n)]


@pytest.mark.parametrize("q, n", [(0.02, 20), (0.02, 100), (0.1, 10)])
def test_a_liar_is_found_among_n_signals_with_probability_1_minus_1_minus_q_to_the_n(q, n):
    runs, d = 1500, desk(3, [1], shape=TINY)
    defense = started(f"audit:q={q},seed=7", 3, TINY)
    found = sum(liar_is_found(defense, d, n) for _ in range(runs))
    expected = 1 - (1 - q) ** n
    assert abs(found / runs - expected) < 4 * math.sqrt(expected * (1 - expected) / runs)


def test_only_drawn_signals_are_computed_again_and_nothing_where_nobody_is_drawn():
    d, defense, calls = desk(8), started("audit:q=0.05", 8), 400
    for step in range(calls):
        assert flagged(defense.check(d.signals(step=step))) == []
    assert d.asked == []
    drawn = sum(len(of) for of in d.recomputed)
    assert all(of and of == sorted(set(of)) for of in d.recomputed)
    assert abs(drawn - 0.05 * 8 * calls) < 4 * math.sqrt(0.05 * 0.95 * 8 * calls)
    empty = calls - len(d.recomputed)
    assert abs(empty - 0.95**8 * calls) < 4 * math.sqrt(0.95**8 * (1 - 0.95**8) * calls)


def test_inactive_replicas_are_not_audited_and_change_nothing_for_the_others():
    whole, part = desk(4), desk(4, [1])
    one, other = started("audit:q=0.5", 4), started("audit:q=0.5", 4)
    for step in range(50):
        one.check(whole.signals(step=step))
        assert flagged(other.check(part.signals([True, False, True, True], step=step))) == []
    assert [[r for r in of if r != 1] for of in whole.recomputed if of != [1]] == part.recomputed


def test_at_q_1_every_wrong_signal_is_found_and_bans_whatever_the_majority_does():
    verdict = started("audit:q=1", 4).check(desk(4, [0, 2, 3], "collude").signals())
    assert flagged(verdict) == rows(verdict.severe) == [0, 2, 3]
    values, low, high = verdict.statistics["mismatch"]
    assert values.tolist() == pytest.approx([0.5, 0.0, 0.5, 0.5])
    assert (low, high) == (-1e-4, 1e-4)
    lenient = started("audit:q=1,proof=false", 4).check(desk(4, [1]).signals())
    assert (flagged(lenient), rows(lenient.severe)) == ([1], [])


def test_one_replica_alone_can_be_audited():
    assert flagged(started("audit:q=1", 1).check(desk(1, [0]).signals())) == [0]


def test_there_is_no_amnesty_for_a_proven_lie_unless_one_asks_for_it():
    assert started("audit", 2).params.amnesty is False
    assert started("audit:amnesty=true", 2).params.amnesty is True


def test_nobody_can_foresee_who_is_drawn():
    d, defense = desk(4, [1]), started("audit:q=1", 4)
    assert defense.preview(d.signals()) is None
    assert d.recomputed == []


def test_the_seed_decides_who_is_drawn():
    def drawn(text: str) -> list[list[int]]:
        d, defense = desk(8), started(text, 8)
        for step in range(20):
            defense.check(d.signals(step=step))
        return d.recomputed

    assert drawn("audit:q=0.3,seed=1") == drawn("audit:q=0.3,seed=1")
    assert drawn("audit:q=0.3,seed=1") != drawn("audit:q=0.3,seed=2")
