"""Ranges to strengths, and what a sweep says of its runs; all numbers worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel_bench.api import Attack
from sentinel_bench.config import Cell, Component, Frozen, Scenario, Seeds
from sentinel_bench.errors import ConfigError
from sentinel_bench.runner import Finished
from sentinel_bench.sweep import Curve, curves, missing_text, refuse_ranges, strengths, summarize

SENTINEL = [Component(name="sentinel")]


def parse(*texts: str) -> list[Component]:
    return [Component.parse(text) for text in texts]


def sweep(text: str, points: int = 8, scale: Any = None) -> Curve:
    (curve,) = curves(parse(text), points, scale)
    return curve


def values(curve: Curve) -> list[float | None]:
    return [strength for strength, _ in curve.points]


# Ranges.


def test_a_range_above_zero_is_geometric() -> None:
    # 0.01 * 300 ** (i / 4): 0.041618, 0.173205, 0.720843.
    assert strengths(0.01, 3, 5, None) == [0.01, 0.04162, 0.1732, 0.7208, 3]
    assert strengths(1, 100, 3, None) == [1, 10, 100]


def test_a_range_from_zero_or_below_is_linear() -> None:
    assert strengths(0, 1, 5, None) == [0, 0.25, 0.5, 0.75, 1]
    assert strengths(-1, 2, 4, None) == [-1, 0, 1, 2]
    assert strengths(0.5, 1.5, 3, "linear") == [0.5, 1, 1.5]
    assert strengths(0.5, 2, 3, "log") == [0.5, 1, 2]


def test_what_is_left_of_zero_is_zero() -> None:
    assert strengths(-0.3, 0.6, 4, None) == [-0.3, 0, 0.3, 0.6]


def test_what_is_rounded_past_an_end_is_dropped() -> None:
    assert strengths(1.00001, 1.00003, 3, None) == [1.00001, 1.00003]  # 1.00002 rounds to 1
    assert strengths(0.99996, 0.99998, 3, None) == [0.99996, 0.99998]  # 0.99997 rounds to 1


def test_whole_numbers_are_not_repeated() -> None:
    # 10 ** (i / 7): 1.39, 1.93, 2.68, 3.73, 5.18, 7.20.
    found = strengths(1, 10, 8, None, whole=True)
    assert found == [1, 2, 3, 4, 5, 7, 10]
    assert all(isinstance(value, int) for value in found)
    with pytest.raises(ConfigError, match=r"whole numbers are needed, not 0.5 to 4"):
        strengths(0.5, 4, 3, None, whole=True)


finite = st.floats(-1e9, 1e9)


@given(finite, finite, st.integers(2, 30), st.sampled_from([None, "linear"]))
def test_the_ends_are_exact_and_the_rest_is_rounded_and_rising(
    a: float, b: float, points: int, scale: Any
) -> None:
    low, high = min(a, b), max(a, b)
    if low == high:
        return
    found = strengths(low, high, points, scale)
    assert (found[0], found[-1]) == (low, high)
    assert found == sorted(set(found))
    assert len(found) <= points
    assert all(v == float(f"{v:.4g}") for v in found[1:-1])


def test_a_whole_strength_is_typed_as_a_user_would_type_it() -> None:
    labels = [c.label() for _, c in sweep("bias:sigma=0.5..8", 3).points]
    assert labels == ["bias:sigma=0.5", "bias:sigma=2", "bias:sigma=8"]


def test_a_curve_knows_the_attack_with_and_without_its_range() -> None:
    curve = sweep("bias:kind=constant,sigma=0.1..10", 3)
    assert (curve.label, curve.name) == (
        "bias:kind=constant,sigma=0.1..10",
        "bias:kind=constant",
    )
    assert curve.parameter == "sigma"
    assert values(curve) == [0.1, 1, 10]
    assert curve.points[1][1] == Component(name="bias", params={"kind": "constant", "sigma": 1})


def test_an_attack_without_a_range_is_one_point() -> None:
    curve = sweep("delay:steps=20", 1)
    assert (curve.label, curve.name, curve.parameter) == ("delay:steps=20", "delay:steps=20", None)
    assert curve.points == ((None, Component(name="delay", params={"steps": 20})),)


def test_a_whole_parameter_gets_whole_strengths() -> None:
    assert values(sweep("delay:steps=1..10")) == [1, 2, 3, 4, 5, 7, 10]


class Inner(Frozen):
    count: int | None = 3
    share: float | int = 0.5


class NestedParams(Frozen):
    inner: Inner = Inner()
    attack: Component = Component(name="delay")


class Nested(Attack[NestedParams]):
    name = "nested"
    goal = formula = source = "test"
    Params = NestedParams


def test_a_nested_parameter_is_swept(plug: Callable[..., None]) -> None:
    plug(Nested)
    assert values(sweep("nested:inner.count=1..8", 3)) == [1, 3, 8]  # 2.83 rounded
    shared = sweep("nested:inner.count=2,inner.share=1..8", 3)
    assert values(shared) == [1, 2.828, 8]
    assert shared.points[1][1].params == {"inner": {"count": 2, "share": 2.828}}
    assert shared.name == "nested:inner.count=2"
    wrapped = sweep("nested:attack.name=delay,attack.params.steps=1..8", 3)
    assert values(wrapped) == [1, 3, 8]
    assert wrapped.parameter == "attack.params.steps"


@pytest.mark.parametrize(
    "attack, part",
    [
        ("bias:sigma=3..1", "smaller to a larger number, not 3 to 1"),
        ("bias:sigma=1..1", "smaller to a larger number"),
        ("bias:sigma=1..1e999", "smaller to a larger number"),
        ("bias:sgima=1..2", "unknown key 'sgima'; did you mean sigma"),
        ("bias:sigma=0..2", "sigma: Input should be greater than 0 .got 0"),
        ("bias:kind=1..2", "kind: Input should be"),
        ("bias:kind=1..2,sigma=1..2", "one range at a time, not kind, sigma"),
        ("bias:sigma=..", "sigma=.. is no range; write lo..hi"),
        ("bias:sigma=1..", "is no range"),
        ("bias:sigma=a..b", "is no range"),
        ("bias:sigma=1..2..3", "is no range"),
        ("delay:steps=1..2.5", "whole numbers are needed, not 1 to 2.5"),
        ("biass:sigma=1..2", "unknown attack 'biass'; did you mean bias"),
    ],
)
def test_a_range_that_cannot_be_swept_is_refused(attack: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        sweep(attack)


def test_points_and_scale_must_fit_the_range() -> None:
    with pytest.raises(ConfigError, match="at least 2 points, not 1"):
        sweep("bias:sigma=1..2", 1)
    with pytest.raises(ConfigError, match="logarithmic scale starts above 0, not at -1"):
        sweep("scaling:factor=-1..2", 3, "log")


def test_the_first_problem_of_each_attack_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        curves(parse("bias:sigma=-1..0.5", "zeros", "delay:steps=5..1"), 8, None)
    assert str(caught.value).count("; ") == 1
    assert "greater than 0" in str(caught.value)
    assert "steps" in str(caught.value)


def test_a_range_in_a_defense_is_refused() -> None:
    refuse_ranges(parse("sentinel:lambda=0.2", "none"))
    with pytest.raises(ConfigError, match=r"lambda.activation is a range; only attacks are swept"):
        refuse_ranges(parse("none", "sentinel:lambda.activation=0.1..0.3"))


# Results.


def ran(attack: str, defense: str, seed: int = 0, **scores: Any) -> Finished:
    """A run as `suite.run` returns it: by default found at once and without damage."""
    cell = Cell(
        scenario=Scenario(seeds=Seeds(model=seed, data=seed, threat=seed)),
        attack=Component.parse(attack),
        defense=Component.parse(defense),
    )
    good = {"outcome": "defended", "reason": None, "recall": 100.0, "f1": 100.0, "acted": 4}
    good |= {"false_bans": 0, "validation_loss": 4.0, "excess_loss": 0.0, "diverged": False}
    if scores.get("outcome") == "invalid":
        good = dict.fromkeys(good)
    return Finished(cell, Path("runs") / f"{cell.label}-{seed}", {"scores": good | scores})


def invalid(attack: str, defense: str, seed: int = 0) -> Finished:
    return ran(attack, defense, seed, outcome="invalid", reason="attack: oh no")


def diverged(attack: str, defense: str, seed: int = 0, recall: float = 0.0) -> Finished:
    lost = {"validation_loss": None, "excess_loss": None, "diverged": True, "recall": recall}
    return ran(attack, defense, seed, outcome="broken", reason="not finite", **lost)


def summary(attack: str, *finished: Finished, points: int = 3) -> dict[str, Any]:
    found = summarize(curves(parse(attack), points, None), SENTINEL, finished)
    json.dumps(found, allow_nan=False)
    return found


def test_a_point_is_mean_and_spread_over_the_seeds() -> None:
    runs = [
        ran("zeros", "sentinel", s, recall=r, f1=f, false_bans=b, excess_loss=e, validation_loss=v)
        for s, (r, f, b, e, v) in enumerate([(50.0, 40.0, 1, 0.1, 4.1), (100.0, 80.0, 4, 0.4, 4.4)])
    ]
    bare = [ran("zeros", "none", s, recall=0.0, excess_loss=e) for s, e in enumerate([2.0, 1.0])]
    base = [ran("none", "none", s, excess_loss=None, validation_loss=4.0 + s) for s in range(2)]
    found = summary("zeros", *base, *bare, *runs)
    (point,) = found["points"]
    assert point["recall"] == {"mean": 75.0, "min": 50.0, "max": 100.0, "n": 2}
    assert point["f1"]["mean"] == 60.0
    assert point["false_bans"] == {"mean": 2.5, "min": 1, "max": 4, "n": 2}
    assert point["damage"]["mean"] == pytest.approx(0.25)
    assert (point["damage"]["min"], point["damage"]["max"]) == (0.1, 0.4)
    assert point["damage"]["missing"] == {}
    assert point["unprotected"]["mean"] == 1.5
    assert point["validation_loss"]["mean"] == pytest.approx(4.25)
    assert point["outcomes"] == {"defended": 2}
    assert found["baseline"]["validation_loss"]["mean"] == 4.5
    assert found["unmeasured"] == []


def test_points_come_by_attack_then_strength_then_defense() -> None:
    both = parse("sentinel", "none")
    found = summarize(curves(parse("bias:sigma=1..4", "zeros"), 3, None), both, [])
    assert [(p["name"], p["strength"], p["cell"], p["defense"]) for p in found["points"]] == [
        ("bias", 1, "bias:sigma=1", "sentinel"),
        ("bias", 1, "bias:sigma=1", "none"),
        ("bias", 2, "bias:sigma=2", "sentinel"),
        ("bias", 2, "bias:sigma=2", "none"),
        ("bias", 4, "bias:sigma=4", "sentinel"),
        ("bias", 4, "bias:sigma=4", "none"),
        ("zeros", None, "zeros", "sentinel"),
        ("zeros", None, "zeros", "none"),
    ]


def test_what_is_missing_from_a_mean_is_counted_with_its_cause() -> None:
    runs = [
        ran("zeros", "sentinel", 0, excess_loss=0.25),
        invalid("zeros", "sentinel", 1),
        diverged("zeros", "sentinel", 2, recall=40.0),
        ran("zeros", "sentinel", 3, excess_loss=None, outcome="broken", reason="no rank left"),
        ran("zeros", "sentinel", 4, excess_loss=None),
        invalid("none", "none", 4),
    ]
    found = summary("zeros", *runs)
    (point,) = found["points"]
    causes = {"invalid": 1, "diverged": 1, "ended early": 1, "no baseline": 1}
    assert point["damage"] == {
        "mean": 0.25,
        "min": 0.25,
        "max": 0.25,
        "n": 1,
        "missing": causes,
    }
    assert missing_text(point["damage"]).startswith("1 of 5 invalid, 1 of 5 diverged")
    assert point["recall"]["mean"] == 85.0  # 100, 40, 100, 100; nothing is known of the invalid one
    assert point["recall"]["n"] == 4
    assert point["outcomes"] == {"defended": 2, "invalid": 1, "broken": 2}
    assert [(r["seeds"]["data"], r["attack"], r["why"]) for r in found["unmeasured"]] == [
        (1, "zeros", "invalid"),
        (2, "zeros", "diverged"),
        (3, "zeros", "ended early"),
        (4, "zeros", "no baseline"),
        (4, "none", "invalid"),
    ]
    assert found["unmeasured"][0]["reason"] == "attack: oh no"


def test_a_damage_that_is_not_known_is_none_and_not_zero() -> None:
    found = summary("zeros", diverged("zeros", "sentinel"), invalid("zeros", "none"))
    (point,) = found["points"]
    assert point["damage"]["mean"] is None
    assert point["unprotected"] == {
        "mean": None,
        "min": None,
        "max": None,
        "n": 0,
        "missing": {"invalid": 1},
    }


def test_nobody_acted_is_counted() -> None:
    runs = [ran("zeros", "sentinel", 0, acted=0), ran("zeros", "sentinel", 1)]
    (point,) = summary("zeros", *runs, invalid("zeros", "sentinel", 2))["points"]
    assert point["idle"] == 1


def bias(strength: str, *recall_and_damage: tuple[float, float | None]) -> list[Finished]:
    return [
        ran(f"bias:sigma={strength}", "sentinel", seed, recall=recall, excess_loss=damage)
        for seed, (recall, damage) in enumerate(recall_and_damage)
    ]


def test_the_largest_undetected_damage_is_that_of_means_below_half_recall() -> None:
    # Mean recall 25, 49.5, 50; mean damage 0.3, 0.2, 0.9: the last is detected.
    runs = [
        *bias("1", (0.0, 0.5), (50.0, 0.1)),
        *bias("2", (0.0, 0.1), (99.0, 0.3)),
        *bias("4", (0.0, 0.9), (100.0, 0.9)),
    ]
    (row,) = summary("bias:sigma=1..4", *runs)["undetected"]
    assert row["damage"] == pytest.approx(0.3)
    assert (row["strength"], row["cell"]) == (1, "bias:sigma=1")
    assert (row["undetected"], row["points"]) == (2, 3)
    assert (row["unmeasured"], row["unknown"]) == ({}, [])


def test_nothing_undetected_is_none() -> None:
    runs = [run for s in "124" for run in bias(s, (50.0, 1.0))]
    (row,) = summary("bias:sigma=1..4", *runs)["undetected"]
    assert (row["damage"], row["strength"], row["cell"]) == (None, None, None)
    assert (row["undetected"], row["unknown"]) == (0, [])


def test_an_undetected_damage_may_be_negative() -> None:
    runs = [*bias("1", (0.0, -0.25)), *bias("2", (0.0, -0.5)), *bias("4", (100.0, 0.0))]
    (row,) = summary("bias:sigma=1..4", *runs)["undetected"]
    assert (row["damage"], row["strength"]) == (-0.25, 1)


def test_what_may_hide_a_larger_undetected_damage_is_named() -> None:
    runs = [
        *bias("1", (0.0, 0.125)),
        diverged("bias:sigma=2", "sentinel"),
        invalid("bias:sigma=4", "sentinel"),
    ]
    (row,) = summary("bias:sigma=1..4", *runs)["undetected"]
    assert (row["damage"], row["undetected"]) == (0.125, 2)
    assert row["unmeasured"] == {"bias:sigma=2": "1 of 1 diverged"}
    assert row["unknown"] == ["bias:sigma=4"]


def test_without_an_attack_there_is_no_undetected_damage_and_its_baseline_is_zero() -> None:
    found = summary(
        "none", ran("none", "none", excess_loss=None), ran("none", "sentinel", excess_loss=0.5)
    )
    assert found["undetected"] == []
    (point,) = found["points"]
    assert (point["damage"]["mean"], point["unprotected"]["mean"]) == (0.5, 0.0)
