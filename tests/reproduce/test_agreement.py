"""Agreement of published numbers and ours, on numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from sentinel_bench.config import Component
from sentinel_bench.reproduce import agreement
from sentinel_bench.reproduce.agreement import Own
from sentinel_bench.reproduce.published import Numbers, Row, Target

SPREAD = 0.008


def row(attack: str = "zeros", baseline: float | None = 3.8, **numbers: float) -> Row:
    return Row(
        number=1,
        source="table1",
        settings={},
        mode="activation",
        attack=Component(name=attack),
        numbers=Numbers(**numbers),
        baseline=baseline,
        tiny=Target(),
        paper=Target(),
    )


@pytest.mark.parametrize(
    "unprotected, protected, harm, helped",
    [
        (11.8, 3.81, True, True),
        (3.9, 4.0, True, False),  # Sentinel made it worse
        (3.9, 3.905, True, None),  # within the spread of the paper
        (3.9, 3.908, True, None),  # exactly the spread
        (3.9, 3.7, True, None),  # as far below as above
        (3.9, 3.72, True, True),  # below, and nearer
        (3.805, 3.802, False, None),  # no harm beyond the spread
    ],
)
def test_published_harm_and_help(
    unprotected: float, protected: float, harm: bool, helped: bool | None
) -> None:
    printed = row(val_loss=protected, val_loss_unprotected=unprotected)
    signs = agreement.published_signs(printed, SPREAD)
    assert (signs["harm"], signs["helped"]) == (harm, helped)


@pytest.mark.parametrize(
    "recall, precision, detected, precise",
    [(50, 50, True, True), (49.9, 49.9, False, False), (100, 23.08, True, False),
     (0, 0, False, None)],
)  # fmt: skip
def test_published_detection_has_its_floor_at_a_half(
    recall: float, precision: float, detected: bool, precise: bool | None
) -> None:
    signs = agreement.published_signs(row(recall=recall, precision=precision), SPREAD)
    assert (signs["detected"], signs["precise"]) == (detected, precise)


def test_what_is_not_printed_is_not_known() -> None:
    signs = agreement.published_signs(row(val_loss=3.9, val_loss_unprotected=5, baseline=None), 1)
    assert set(signs.values()) == {None}
    assert agreement.published_signs(row(val_loss_unprotected=5.0), SPREAD)["helped"] is None


def test_a_row_without_attack_is_judged_by_its_bans_alone() -> None:
    quiet = row("none", precision=100.0, recall=100.0, val_loss=3.8, val_loss_unprotected=3.8)
    assert agreement.published_signs(quiet, SPREAD) == {"quiet": True}
    loud = row("none", precision=0.0, recall=100.0)
    assert agreement.published_signs(loud, SPREAD) == {"quiet": False}


def test_an_interval_is_that_of_students_t() -> None:
    # mean 2, deviation 1, n = 3: 4.303 / sqrt(3) = 2.4843
    assert agreement.bounds([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.4843, 2 + 2.4843), abs=1e-4)
    assert agreement.bounds([1.0]) is None
    assert agreement.bounds([]) is None
    assert agreement.bounds([1.0, math.inf, 3.0]) == (1.0, math.inf)


@pytest.mark.parametrize(
    "excess, plain, harm",
    [
        ([2.0, 2.1, 2.2], [4.0, 4.0, 4.0], True),
        ([0.01, 0.011, 0.012], [4.20, 4.21, 4.22], False),  # below 0.0248, which is their spread
        ([0.0, 0.1, 0.2], [4.0, 4.0, 4.0], None),  # 0.1 +- 0.248 covers both
        ([0.0, 0.0], [4.0, 4.0], False),  # not above it
        ([math.inf, math.inf], [4.0, 4.1], True),  # all diverged
        ([0.0, math.inf], [4.0, 4.0], None),
        ([2.0], [4.0], None),  # one seed
        ([2.0, 2.1], [4.0], None),  # no spread of plain training
    ],
)
def test_our_harm_is_beyond_the_spread_of_plain_training(
    excess: list[float], plain: list[float], harm: bool | None
) -> None:
    assert agreement.own_signs(Own(excess=excess, plain=plain))["harm"] is harm


@pytest.mark.parametrize(
    "gain, helped",
    [([1.0, 1.1], True), ([-1.1, -1.0], False), ([-0.1, 1.0], None), ([0.0, 0.0], None),
     ([math.inf, math.inf], True), ([1.0], None)],
)  # fmt: skip
def test_our_help_is_an_interval_on_one_side_of_zero(
    gain: list[float], helped: bool | None
) -> None:
    assert agreement.own_signs(Own(gain=gain))["helped"] is helped


@pytest.mark.parametrize(
    "recall, detected",
    [([100, 100, 100], True), ([0, 0, 0], False), ([100, 100, 20], None), ([50, 50], True),
     ([100], None), ([], None)],
)  # fmt: skip
def test_our_detection_is_an_interval_on_one_side_of_a_half(
    recall: list[float], detected: bool | None
) -> None:
    signs = agreement.own_signs(Own(recall=recall, precision=recall))
    assert signs["detected"] is detected
    assert signs["precise"] is detected


@pytest.mark.parametrize(
    "precision, quiet", [([100, 100], True), ([100, 0, 100], False), ([100], None), ([], None)]
)
def test_we_are_quiet_if_no_seed_has_a_false_ban(
    precision: list[float], quiet: bool | None
) -> None:
    assert agreement.own_signs(Own(precision=precision))["quiet"] is quiet


def test_a_sign_agrees_differs_cannot_be_said_or_is_not_judged() -> None:
    told = {"harm": True, "helped": False, "detected": True, "precise": None}
    ours = {"harm": True, "helped": True, "detected": None, "precise": True, "quiet": None}
    assert agreement.judge(told, ours) == {
        "harm": "agrees",
        "helped": "differs",
        "detected": "unclear",
        "precise": None,
    }


@pytest.mark.parametrize(
    "verdicts, row_verdict",
    [
        (["agrees", "agrees", None], "agrees"),
        (["agrees", "unclear"], "unclear"),
        (["agrees", "unclear", "differs"], "differs"),
        ([None, None], None),
        ([], None),
    ],
)
def test_a_row_is_as_good_as_its_worst_sign(
    verdicts: list[agreement.Verdict | None], row_verdict: str | None
) -> None:
    assert agreement.whole(verdicts) == row_verdict


def test_the_order_is_kendalls_tau_with_ties() -> None:
    # 4 pairs of 6 concordant, 1 discordant, 1 tied on the left: 3 / sqrt(5 * 6)
    found = agreement.order([(1, 1), (2, 2), (2, 3), (3, 2.5)])
    assert found["tau"] == pytest.approx(3 / math.sqrt(30))
    assert (found["rows"], found["verdict"]) == (4, "unclear")


def test_the_order_agrees_or_differs_where_it_is_beyond_chance() -> None:
    up = [(float(i), float(i)) for i in range(6)]
    assert agreement.order(up) == {
        "tau": pytest.approx(1),
        "p": pytest.approx(2 / math.factorial(6)),  # one of 6! orders, and its mirror image
        "rows": 6,
        "verdict": "agrees",
    }
    assert agreement.order([(a, -b) for a, b in up])["verdict"] == "differs"
    assert agreement.order([*up, (7.0, math.inf)])["tau"] == pytest.approx(1)


@pytest.mark.parametrize("pairs", [[], [(1, 1), (2, 2)], [(1, 5), (2, 5), (3, 5)]])
def test_an_order_of_too_little_is_not_defined(pairs: list[tuple[float, float]]) -> None:
    assert agreement.order(pairs) == {
        "tau": None, "p": None, "rows": len(pairs), "verdict": "unclear",
    }  # fmt: skip
