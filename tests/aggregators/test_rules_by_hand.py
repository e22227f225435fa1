"""Every rule on rows small enough to work out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sentinel_bench import registry
from sentinel_bench.aggregators.bulyan import closest
from sentinel_bench.config import Component


def aggregate(name: str, rows: list[list[float]], f: int, **params: Any) -> list[float]:
    aggregator = registry.aggregators.create(Component(name=name, params=params))
    values: list[float] = aggregator(torch.tensor(rows, dtype=torch.float64), f).tolist()
    return values


PLANE = [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0], [100.0, -1000.0]]
LINE = [[0.0], [1.0], [3.0], [4.5], [100.0]]


@pytest.mark.parametrize(
    "name, f, expected",
    [
        ("mean", 1, [22, -180]),
        ("median", 1, [3, 20]),
        ("trimmed-mean", 0, [22, -180]),
        ("trimmed-mean", 1, [3, 20]),
        ("trimmed-mean", 2, [3, 20]),
    ],
)
def test_rules_by_coordinate(name, f, expected):
    assert aggregate(name, PLANE, f) == pytest.approx(expected)


def test_of_an_even_number_the_median_is_the_mean_of_the_two_middle_ones():
    assert aggregate("median", PLANE[:4], 1) == [2.5, 25]


def test_the_trimmed_mean_drops_the_extremes_and_keeps_the_others():
    assert aggregate("trimmed-mean", [[0.0], [1.0], [5.0], [6.0], [9.0]], 1) == [4]


def test_krum_sums_over_the_n_f_2_nearest_without_itself():
    # sums of two: 10, 5, 6.25, 14.5, ...; of one (itself counted): the first; of three: the third
    assert aggregate("krum", LINE, 1) == [1]


def test_krum_sums_squared_distances_not_distances_nor_their_fourth_powers():
    # from a: 1 and 3, sum of squares 10; from d: 2.3 and 2.3, 10.58 (sums 4 and 4.6, fourth powers
    # 82 and 56); from i: 0.1 and 3.4, 11.57 (sum 3.5); all others are further
    far = [[1e3, 0.0], [1e3, 50.0]]
    a = [[0.0, 0.0], [1.0, 0.0], [-3.0, 0.0]]
    d = [[100.0, 0.0], [102.3, 0.0], [97.7, 0.0]]
    i = [[200.0, 0.0], [200.1, 0.0], [196.6, 0.0]]
    rows = [*d, *i, *a, *far]
    assert aggregate("krum", rows, len(rows) - 4, strict=False) == [0, 0]


def test_krum_takes_the_first_of_equals():
    assert aggregate("krum", [[2.0], [1.0], [0.0], [3.0]], 0) == [2]
    assert aggregate("krum", [[1.0], [2.0], [0.0], [3.0]], 0) == [1]


def test_multi_krum_averages_the_best():
    assert aggregate("multi-krum", LINE, 1) == [(0 + 1 + 3 + 4.5) / 4]
    assert aggregate("multi-krum", LINE, 1, m=2) == [2]
    assert aggregate("multi-krum", LINE, 1, m=1) == [1]


def test_bulyan_chooses_again_among_those_that_remain_and_averages_around_the_median():
    # Scores 42.25, 24.25, 16.25, 23, 31.25, ...: 2 is chosen. Of 0, 1, 3.5, 5, 7, 100 with three
    # neighbours 3.5 (20.75 against 22.25 for 5), of 0, 1, 5, 7, 100 with two 1 (17 against 20 for
    # 5), of 0, 5, 7, 100 with one 5, which is as good as 7, and of 0, 7, 100 then 0, as good as 7.
    # The median of 2, 3.5, 1, 5, 0 is 2; the three closest are 1, 2, 3.5.
    rows = [[0.0], [1.0], [2.0], [3.5], [5.0], [7.0], [100.0]]
    assert aggregate("bulyan", rows, 1) == pytest.approx([6.5 / 3])


@pytest.mark.parametrize(
    "ordered, count, expected",
    [
        ([0, 1, 5, 6, 7], 3, [5, 6, 7]),
        ([0, 4, 5, 6, 20], 3, [4, 5, 6]),
        ([-1, 0, 1, 9, 20], 3, [-1, 0, 1]),
        ([0, 4, 6, 20], 2, [4, 6]),
        ([0, 0, 0, 7], 2, [0, 0]),
        ([1, 2, 3], 3, [1, 2, 3]),
        ([1, 2, 3], 2, [1, 2]),  # 1 and 3 are as close
        ([3], 1, [3]),
    ],
)
def test_the_values_closest_to_the_median(ordered, count, expected):
    values = closest([torch.tensor([float(v)]) for v in ordered], count)
    assert sorted(float(v) for v in values) == expected


def test_the_geometric_median_of_a_triangle_sees_its_sides_under_120_degrees():
    rows = [[-1.0, 0.0], [1.0, 0.0], [0.0, 2.0]]
    found = aggregate("geometric-median", rows, 1)
    assert found == pytest.approx([0, 1 / math.sqrt(3)], abs=1e-5)


def test_the_geometric_median_of_points_on_a_line_is_the_middle_one():
    assert aggregate("geometric-median", [[0.0], [1.0], [10.0]], 1) == pytest.approx([1], abs=1e-5)


def test_one_step_to_the_geometric_median_weighs_by_the_inverse_distance_from_the_start():
    # The median is 2, from where the distances are 2, 0, 1, 4, 1, their median 1. The start is
    # (0 / 2 + 2 + 3 + 6 / 4 + 1) / 3.75 = 2 again; there is a distance 0, for which nu stands.
    rows = [[0.0], [2.0], [3.0], [6.0], [1.0]]
    weights = [1 / 2, 1 / 0.5, 1 / 1, 1 / 4, 1 / 1]
    expected = sum(w * row[0] for w, row in zip(weights, rows, strict=True)) / sum(weights)
    found = aggregate("geometric-median", rows, 1, nu=0.5, iterations=1)
    assert found == pytest.approx([expected])


@pytest.mark.parametrize(
    "params, expected",
    [
        ({"tau": 1, "iterations": 1}, 1.9),  # -1 -1 0 0.5 1 from 2
        ({"tau": 1, "iterations": 2}, 1.86),  # -1 -0.9 0.1 0.6 1 from 1.9
        ({"iterations": 1}, 1.9),  # distances 2 1 0 0.5 98: their median is 1
        ({"tau": 10, "iterations": 1}, 2 + (-2 - 1 + 0.5 + 10) / 5),
        ({"tau": 1000, "iterations": 1}, 105.5 / 5),  # nothing is clipped: the mean
    ],
)
def test_centered_clipping_moves_the_median_by_clipped_differences(params, expected):
    rows = [[0.0], [1.0], [2.0], [2.5], [100.0]]
    assert aggregate("centered-clipping", rows, 1, **params) == pytest.approx([expected])


@pytest.mark.parametrize(
    "name, f, expected",
    [
        ("mean", 1, 3),
        ("median", 1, 3),
        ("trimmed-mean", 1, 3),
        ("krum", 1, 2),
        ("multi-krum", 0, 3),
        ("multi-krum", 1, 2),
        ("bulyan", 0, 3),
        ("bulyan", 1, 2),
        ("geometric-median", 1, 3),
        ("centered-clipping", 1, 3),
    ],
)
def test_two_rows_relaxed(name, f, expected):
    assert aggregate(name, [[2.0], [4.0]], f, strict=False) == pytest.approx([expected])


@pytest.mark.parametrize("name", ["krum", "bulyan"])
def test_eight_replicas_with_three_attackers_are_enough_when_relaxed(name):
    honest = [[1.0], [1.1], [1.2], [1.3], [1.4]]
    (found,) = aggregate(name, [*honest, [50.0], [60.0], [70.0]], 3, strict=False)
    assert 1 <= found <= 1.4
