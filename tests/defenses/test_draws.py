"""Draws: keyed by what they decide, uniform, and the same whatever was drawn before."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hand_in import scales
from work_again import desk, started

from sentinel_bench.api import LinearCheck, Updates
from sentinel_bench.defenses.draws import Draws, place


def test_the_same_seeds_and_key_give_the_same_number_whatever_was_drawn_before() -> None:
    one, other = Draws("audit", 0, 7), Draws("audit", 0, 7)
    keys = list(product(("a", "b"), range(5), range(3)))
    straight = {key: one.uniform(*key) for key in keys}
    for _ in range(3):
        one.random("c").random()
    assert {key: other.uniform(*key) for key in reversed(keys)} == straight
    assert {key: one.uniform(*key) for key in keys} == straight
    assert one.random("a", 1).random() == one.random("a", 1).random()


def test_a_number_is_the_same_on_every_machine_and_in_every_process() -> None:
    """Pinned: another number here means that no recorded run can be repeated."""
    draws = Draws("cascade", 0, 1)
    assert draws.seed("screen", 4, 2, "activation", 0) == 3708057348173396226
    assert draws.uniform("screen", 4, 2, "activation", 0) == 3708057348173396226 // 2**10 / 2**53


def test_no_two_decisions_draw_the_same() -> None:
    seeds = list(product(("audit", "cascade"), (0, 1), (0, 1)))
    keys = list(
        product(("screen", "redo"), range(6), range(4), ("activation", "gradient"), range(3))
    )
    numbers = [Draws(*s).seed(*key) for s in seeds for key in keys]
    assert len(set(numbers)) == len(seeds) * len(keys)


def test_keys_that_look_alike_are_different() -> None:
    draws = Draws("x")
    alike = [("a", 1, 23), ("a", 12, 3), ("a", "12", 3), ("a1", 23), ("a, 1", 23), ("a", 1, 2, 3)]
    assert len({draws.seed(*key) for key in alike}) == len(alike)
    assert Draws("a", 12, 3).seed() != Draws("a", 1, 23).seed()


CHANGES: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "step": lambda i: (i, 1, "activation", 0),
    "stage": lambda i: (3, i, "activation", 0),
    "microbatch": lambda i: (3, 1, "gradient", i),
    "replica": lambda i: (3, 1, "gradient", 0, i),
}


@pytest.mark.parametrize("what", [*CHANGES, "seed"])
def test_draws_are_uniform_and_neighbours_are_independent(what: str) -> None:
    """Chi square over 10 bins and over 10 x 10 bins of neighbours; 5 standard deviations."""
    n = 20_000
    if what == "seed":
        u = [Draws("cascade", 0, seed).uniform("screen", 4, 2, "gradient", 0) for seed in range(n)]
    else:
        draws = Draws("cascade", 0, 1)
        u = [draws.uniform("screen", *CHANGES[what](i)) for i in range(n)]
    assert all(0 <= x < 1 for x in u)
    for found, bins in (
        (Counter(int(10 * x) for x in u), 10),
        (Counter((int(10 * a), int(10 * b)) for a, b in pairwise(u)), 100),
    ):
        expected = found.total() / bins
        chi2 = sum((count - expected) ** 2 / expected for count in found.values())
        assert len(found) == bins
        assert abs(chi2 - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))


def test_a_decision_depends_on_the_place_of_what_is_decided() -> None:
    d, s = desk(2), scales(2)
    signals = d.signals(stage=2, direction="gradient", step=5, microbatch=3)
    assert place(signals) == (5, 2, "gradient", 3)
    assert place(s.updates(stage=2, step=5)) == (5, 2, "gradient")
    assert place(s.updates(stage=2, step=5, kind="weights")) == (5, 2, "weights")


# --- defenses that draw ---------------------------------------------------------------------------

DRAWING = [
    "audit:q=0.5",
    "commitment:q=0.5",
    "freivalds:q=0.5",
    "duplicate-work",
    "duplicate-work:jurors=1",
    'cascade:screens=["audit:q=0.3"],screened=0.5',
    'layered:detectors=["audit:q=0.3"]',
]
every_drawing = pytest.mark.parametrize("text", DRAWING)
BASE = {"step": 0, "stage": 1, "direction": "activation", "microbatch": 0}


def asked(text: str, setup_seed: int = 0, steps: int = 24, **where: Any) -> list[Any]:
    """Return what a defense asks for in some steps at one place: three lists for each step."""
    defense = started(text, 8, seed=setup_seed, microbatches=2)
    found = []
    for step in range(steps):
        d = desk(8, [2, 5])
        tests: list[Any] = []
        d.check_linears = linears(d, tests)  # type: ignore[attr-defined]
        defense.check(d.signals(**BASE | where | {"step": where.get("step", 0) + step}))
        found.append((d.recomputed, d.asked, tests))
    return found


def linears(d: Any, tests: list[Any]) -> Callable[..., LinearCheck]:
    def check(of: list[int], projections: int, seed: int) -> LinearCheck:
        tests.append((of, seed))
        return LinearCheck(d.honest[of], torch.zeros(len(of)).double())

    return check


@every_drawing
@pytest.mark.parametrize(
    "change",
    [{"setup_seed": 1}, {"stage": 2}, {"direction": "gradient"}, {"microbatch": 1}, {"step": 24}],
    ids=str,
)
def test_a_defense_draws_something_else_at_another_place_and_with_another_seed(
    text: str, change: dict[str, Any]
) -> None:
    one = asked(text)
    assert one == asked(text)
    assert one != asked(text, **change)


@every_drawing
def test_what_is_drawn_at_a_place_does_not_depend_on_where_else_the_verifier_looked(
    text: str,
) -> None:
    """Asked from the middle on: the draws are those of the same steps."""
    assert asked(text)[12:] == asked(text, step=12, steps=12)


def test_defenses_of_different_names_draw_different_replicas() -> None:
    audit, commitment = asked("audit:q=0.5"), asked("commitment:q=0.5")
    assert [r for r, *_ in audit] != [r for r, *_ in commitment]


def test_the_vectors_of_each_test_are_its_own() -> None:
    places = [{}, {"stage": 2}, {"direction": "gradient"}, {"microbatch": 1}, {"step": 30}]
    seeds = [[tests[0][1] for *_, tests in asked("freivalds:q=1", **where)] for where in places]
    assert len({seed for row in seeds for seed in row}) == 5 * 24


@pytest.mark.parametrize("text", ["audit:q=0.4", "cascade:screens=[],q=0.4"])
def test_weight_gradients_are_drawn_by_step_and_stage(text: str) -> None:
    def drawn(order: list[tuple[int, int]], seed: int = 0) -> dict[tuple[int, int], Any]:
        defense, found = started(text, 4, seed=seed), {}
        for step, stage in order:
            s = scales(4)
            updates: Updates = s.updates(step=step, stage=stage)
            defense.check_updates(updates)
            found[step, stage] = s.calls
        return found

    places = list(product(range(12), range(3)))
    straight = drawn(places)
    assert drawn(places[::-1]) == straight
    assert drawn(places, seed=1) != straight
    for stage in (1, 2):
        rows = [[straight[step, s] for step in range(12)] for s in (0, stage)]
        assert rows[0] != rows[1]


def test_a_cascade_in_a_cascade_draws_for_itself() -> None:
    """With one and the same draw the inner one would look wherever the outer one does."""
    inner = '{name: cascade, params: {screens: ["audit:q=1"], screened: 0.5}}'
    found = [r for r, *_ in asked(f"cascade:screens=[{inner}],screened=0.5", steps=400)]
    looked = sum(bool(recomputed) for recomputed in found)
    assert abs(looked - 100) < 4 * math.sqrt(400 * 0.25 * 0.75)


@pytest.mark.parametrize("text", ["audit", "duplicate-work", "freivalds"])
def test_a_verifier_that_only_draws_keeps_its_secret_and_nothing_else(text: str) -> None:
    assert started(text, 8).state_bytes() == 32


def test_the_weights_of_each_stage_are_projected_on_a_vector_of_its_own() -> None:
    defense = started("cascade", 4)
    for stage in (2, 0):
        defense.check_updates(scales(4, equal=True).updates(kind="weights", stage=stage))
    again = started("cascade", 4)
    again.check_updates(scales(4, equal=True).updates(kind="weights", stage=0, step=9))
    onto = defense._onto  # type: ignore[attr-defined]
    assert torch.equal(onto[0], again._onto[0])  # type: ignore[attr-defined]
    assert not torch.equal(onto[0], onto[2])
