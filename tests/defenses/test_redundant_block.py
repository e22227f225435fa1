"""`redundant-block` on signals and plans worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Defense, Recovery, Setup, Signals
from sentinel_bench.config import Component

SHAPE = (1, 2, 2)
STAGES = 6


class Holders:
    """What the holders of the copies say."""

    def __init__(self, answers: Tensor) -> None:
        self.answers = answers

    def recompute(self, of: Sequence[int]) -> Tensor:
        raise AssertionError("the holders are asked, not the verifier")

    def ask(self, of: Sequence[int], by: Sequence[int]) -> Tensor:
        assert list(of) == list(by)
        return self.answers[list(of)]


def made(text: str, device: str = "cpu", stages: int = STAGES) -> Defense[Any]:
    defense = registry.defenses.create(Component.parse(text))
    defense.start(Setup(stages, 3, SHAPE, device))
    return defense


def signals(sent: Tensor, answers: Tensor, active: Sequence[bool] = (True,) * 3) -> Signals:
    return Signals(1, "activation", 0, sent, None, torch.tensor(active), Holders(answers))


def rows(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """One replica for each value, which all its elements have."""
    return torch.tensor(values).view(-1, 1, 1, 1).expand(-1, *SHAPE).to(dtype)


def test_whoever_is_off_by_more_than_rtol_is_flagged() -> None:
    verdict = made("redundant-block:rtol=0.1").check(
        signals(rows(1.0, 1.0, 1.0), rows(1.0, 0.95, 0.8))
    )
    assert verdict.flagged.tolist() == [False, False, True]
    assert not verdict.severe.any()
    values, low, high = verdict.statistics["mismatch"]
    # |x - x'| / max(|x|, |x'|) = 0, .05 / 1, .2 / 1
    assert values.tolist() == pytest.approx([0.0, 0.05, 0.2])
    assert (low, high) == (-0.1, 0.1)


def test_a_mismatch_in_one_element_counts_in_proportion() -> None:
    sent, answers = rows(1.0, 1.0, 1.0), rows(1.0, 1.0, 1.0).clone()
    answers[1, 0, 1, 1] = 3.0
    verdict = made("redundant-block").check(signals(sent, answers))
    # |x'| = sqrt(1 + 1 + 1 + 9), |x - x'| = 2
    assert verdict.statistics["mismatch"][0].tolist() == pytest.approx([0.0, 2 / 12**0.5, 0.0])
    assert verdict.flagged.tolist() == [False, True, False]


@pytest.mark.parametrize(
    "dtype, device, off, flagged",
    [
        (torch.float32, "cpu", 0.001, True),
        (torch.float32, "cuda", 0.001, False),
        (torch.bfloat16, "cpu", 0.01, False),
        (torch.bfloat16, "cpu", 0.1, True),
        (torch.float32, "cuda", 0.1, True),
    ],
)
def test_the_tolerance_follows_the_precision(
    dtype: torch.dtype, device: str, off: float, flagged: bool
) -> None:
    given = signals(rows(1.0, 1.0, 1.0, dtype=dtype), rows(1.0, 1.0, 1.0 - off, dtype=dtype))
    verdict = made("redundant-block", device).check(given)
    assert verdict.flagged.tolist() == [False, False, flagged]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_an_answer_that_is_not_finite_is_a_mismatch(wrong: float) -> None:
    verdict = made("redundant-block").check(signals(rows(1.0, 1.0, 1.0), rows(1.0, wrong, 1.0)))
    assert verdict.flagged.tolist() == [False, True, False]
    assert verdict.statistics["mismatch"][0].isfinite().all()


def test_zeros_that_should_be_zeros_are_no_mismatch() -> None:
    verdict = made("redundant-block").check(signals(rows(0.0, 0.0, 0.0), rows(0.0, 0.0, 0.0)))
    assert not verdict.flagged.any()


def test_who_is_not_active_is_not_flagged() -> None:
    given = signals(rows(1.0, 1.0, 1.0), rows(5.0, 1.0, 5.0), active=(True, True, False))
    assert made("redundant-block").check(given).flagged.tolist() == [True, False, False]


def plan(text: str, suspects: set[int], passes: int = 1, last: Recovery | None = None) -> Any:
    return made(text).recover(frozenset(suspects), passes, last or Recovery())


@pytest.mark.parametrize(
    "suspects, bypass, freeze",
    [
        ({2}, {2, 3}, {1}),
        ({0}, {0, 1}, set()),
        ({5}, {5, 0}, {4}),
        ({1, 4}, {1, 2, 4, 5}, {0, 3}),
        ({2, 3}, {2, 3, 4}, {1}),
    ],
)
def test_skip_layer_bypasses_both_suspects_and_freezes_the_one_before_them_as_well(
    suspects: set[int], bypass: set[int], freeze: set[int]
) -> None:
    assert plan("skip-layer", suspects) == Recovery(frozenset(bypass), frozenset(freeze))


def test_skip_layer_bypasses_more_at_a_second_alarm() -> None:
    first = plan("skip-layer", {1})
    second = plan("skip-layer", {4}, 2, first)
    assert second == Recovery(frozenset({1, 2, 4, 5}), frozenset({0, 3}))


def test_restart_bypasses_nothing_and_none_lets_the_pass_count() -> None:
    assert plan("redundant-block:recovery=restart", {2}) == Recovery()
    assert plan("redundant-block:recovery=none", {2}) is None
    assert plan("redundant-block:recovery=none", {2}, 99) is None


@pytest.mark.parametrize("recovery", ["restart", "skip-layer"])
def test_a_step_gets_so_many_tries_after_its_first_pass(recovery: str) -> None:
    text = f"redundant-block:tries=3,recovery={recovery}"
    assert [plan(text, {2}, passes).skip for passes in (1, 2, 3, 4)] == [False] * 3 + [True]


def test_skip_layer_is_redundant_block_with_that_recovery() -> None:
    one, two = (
        registry.defenses.params(Component.parse(text)).model_dump()
        for text in ("skip-layer", "redundant-block:recovery=skip-layer")
    )
    assert one == two
    default = registry.defenses.params(Component(name="redundant-block")).model_dump()
    assert default == {**one, "recovery": "restart"}
    assert (one["bans"], one["amnesty"]) == (False, False)


def test_copies_are_asked_for_with_the_tolerance_of_weights() -> None:
    asked = made("redundant-block:resync=7").redundancy()
    assert (asked.resync, asked.rtol) == (7, 1e-4)  # type: ignore[union-attr]
    assert made("redundant-block", "cuda").redundancy().rtol == 2e-2  # type: ignore[union-attr]
