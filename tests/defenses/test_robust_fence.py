"""The fence of medians: by hand, against a literal reading, and at its edges."""

from __future__ import annotations

import math
import random
import statistics
from collections import deque

import pytest
import torch
from torch import Tensor

from sentinel_bench.defenses.robust import RobustFences

ONE = slice(0, 1)


def fences(
    replicas: int = 5,
    window: int = 10,
    mads: float = 2.0,
    min_steps: int = 1,
    floor: tuple[float, ...] = (0.01,),
) -> RobustFences:
    return RobustFences(torch.tensor(floor), replicas, window, mads, min_steps)


def row(*values: float) -> Tensor:
    return torch.tensor([values])


def bounds(fence: RobustFences) -> tuple[float, float]:
    return float(fence.median), float(fence.half_width)


def test_median_and_half_width_by_hand() -> None:
    fence = fences()
    fence.push(row(1, 2, 3, 4, 100))  # deviations 2 1 0 1 97: MAD 1
    assert bounds(fence) == (3.0, pytest.approx(2 * 1.4826))
    fence.push(row(5, 5, 5, 5, math.nan))  # 1 2 3 4 5 5 5 5 100: median 5, deviations 4 3 2 1 0 0 0
    assert bounds(fence) == (5.0, pytest.approx(2 * 1.4826 * 1))


def test_an_even_number_of_values_has_its_median_between_the_two_in_the_middle() -> None:
    fence = fences()
    fence.push(row(1, 2, 4, 8, math.nan))  # deviations from 3: 2 1 1 5, MAD 1.5
    assert bounds(fence) == (3.0, pytest.approx(2 * 1.4826 * 1.5))


def test_the_half_width_never_falls_below_the_floor_of_its_channel() -> None:
    fence = fences(floor=(0.25, 4.0))
    fence.push(torch.tensor([[1.0, 1, 1, 1, 1], [2, 3, 4, 5, 6]]))
    assert fence.half_width.tolist() == [0.25, 4.0]


def test_what_lies_exactly_on_the_fence_is_outside() -> None:
    fence = fences(floor=(0.25,))
    fence.push(row(1, 1, 1, 1, 1))
    outside, distance = fence.outside(ONE, row(0.75, 0.76, 1.0, 1.24, 1.25))
    assert outside.tolist() == [[True, False, False, False, True]]
    assert distance[0].tolist() == pytest.approx([1.0, 0.96, 0.0, 0.96, 1.0], abs=1e-5)


def test_what_cannot_be_measured_is_outside_of_a_closed_fence_and_inside_of_an_open_one() -> None:
    fence, nan = fences(replicas=2), row(math.nan, 1.0)
    outside, distance = fence.outside(ONE, nan)
    assert not outside.any()
    assert distance.tolist() == [[0.0, 0.0]]
    fence.push(row(1.0, 1.0))
    outside, distance = fence.outside(ONE, nan)
    assert outside.tolist() == [[True, False]]
    assert distance[0, 0].isnan()


def test_a_fence_is_open_until_it_has_seen_enough_steps_with_a_value() -> None:
    fence = fences(replicas=2, min_steps=2)
    closed = []
    for values in ((1, 2), (math.nan, math.nan), (1, math.nan), (1, 1)):
        fence.push(row(*values))
        closed.append(not bool(fence.half_width.isinf()))
    assert closed == [False, False, True, True]


def test_a_window_shorter_than_min_steps_is_full_when_it_is_full() -> None:
    fence = fences(replicas=1, window=2, min_steps=10)
    fence.push(row(1))
    assert bounds(fence)[1] == math.inf
    fence.push(row(1))
    assert bounds(fence)[1] < math.inf


def test_steps_beyond_the_window_are_forgotten() -> None:
    fence = fences(replicas=1, window=2)
    for value in (100, 100, 1, 3):
        fence.push(row(value))
    assert bounds(fence) == (2.0, pytest.approx(2 * 1.4826))


def test_a_fence_without_values_stays_open_and_opens_again_when_all_are_forgotten() -> None:
    fence, nothing = fences(replicas=2, window=3), row(math.nan, math.nan)
    for _ in range(4):
        fence.push(nothing)
    assert bounds(fence) == (0.0, math.inf)
    fence.push(row(1, 2))
    assert bounds(fence) == (1.5, pytest.approx(2 * 1.4826 / 2))
    for _ in range(3):
        fence.push(nothing)
    assert bounds(fence) == (0.0, math.inf)
    assert fence.all_inside(ONE, row(1e30, -1e30), torch.tensor([True, True]))


def test_fewer_than_half_of_the_values_cannot_move_a_fence_far() -> None:
    honest, bought = fences(replicas=9), fences(replicas=9)
    spread = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8]
    honest.push(row(*spread))
    bought.push(row(*spread[:5], *[1e9] * 4))
    assert bounds(honest) == (pytest.approx(1.4), pytest.approx(2 * 1.4826 * 0.2))
    median, half = bounds(bought)
    assert 1.0 <= median <= 1.4  # among the honest
    assert half < 2 * 1.4826 * 0.5


def test_all_inside_means_that_everybody_is_active_and_nobody_outside() -> None:
    rng = random.Random(3)
    fence = fences(floor=(0.1, 0.1))
    fence.push(torch.tensor([[0.0, 0.1, 0.2, 0.3, 0.4], [1.0, 1, 1, 1, 1]]))
    both = slice(0, 2)
    answers = set()
    for _ in range(300):
        values = torch.tensor([[rng.gauss(0.2, 0.1) for _ in range(5)], [1.0] * 5])
        if rng.random() < 0.2:
            values[rng.randrange(2), rng.randrange(5)] = rng.choice([math.nan, 9.0])
        active = torch.tensor([rng.random() < 0.95 for _ in range(5)])
        outside, _ = fence.outside(both, values)
        expected = bool(active.all()) and not bool(outside.any())
        assert fence.all_inside(both, values, active) == expected
        answers.add(expected)
    assert answers == {True, False}


def test_the_order_of_the_replicas_does_not_matter() -> None:
    rng = random.Random(1)
    one, other = fences(min_steps=2), fences(min_steps=2)
    for _ in range(15):
        values = [rng.gauss(0, 1) for _ in range(5)]
        one.push(row(*values))
        other.push(row(*rng.sample(values, 5)))
        assert bounds(one) == bounds(other)


@pytest.mark.parametrize("seed", range(8))
def test_the_fence_follows_the_literal_definition(seed: int) -> None:
    rng = random.Random(seed)
    replicas, window, least = rng.choice([1, 3, 8]), rng.choice([1, 4, 20]), rng.choice([1, 3])
    fence = fences(replicas, window, 3.0, least, floor=(0.05, 0.3))
    steps: deque[list[list[float]]] = deque(maxlen=window)
    for step in range(40):
        now = [
            [
                math.nan if rng.random() < 0.2 else rng.choice([rng.gauss(step / 9, 1), 0.0, -7e4])
                for _ in range(replicas)
            ]
            for _ in range(2)
        ]
        steps.append(now)
        fence.push(torch.tensor(now))
        for channel, floor in enumerate((0.05, 0.3)):
            per_step = [[v for v in s[channel] if not math.isnan(v)] for s in steps]
            values = [v for s in per_step for v in s]
            if sum(bool(s) for s in per_step) < min(least, window):
                assert fence.half_width[channel].isinf()
                continue
            median = statistics.median(values)
            mad = statistics.median(abs(v - median) for v in values)
            half = max(3.0 * 1.4826 * mad, floor)
            assert float(fence.median[channel]) == pytest.approx(median, rel=1e-5, abs=1e-6)
            assert float(fence.half_width[channel]) == pytest.approx(half, rel=1e-4)


def test_the_memory_is_the_window_and_the_fence() -> None:
    assert fences(replicas=3, window=7, floor=(1.0, 1.0)).state_bytes() == 2 * (7 * 3 + 2) * 4
