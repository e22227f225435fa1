"""What the base class does for every aggregator: rows left out, numbers of rows, its own checks."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.aggregators.krum import Krum
from sentinel_bench.api import Aggregator, AggregatorParams
from sentinel_bench.config import Component
from sentinel_bench.errors import ConfigError, PluginError


class Spy(Aggregator[AggregatorParams]):
    """Keeps what it is given."""

    name = "spy"
    goal = formula = source = "test"

    def aggregate(self, rows: Tensor, f: int) -> Tensor:
        self.seen = rows.clone(), f
        return rows.sum(0)


class InPlace(Spy):
    name: ClassVar[str] = "in-place"

    def aggregate(self, rows: Tensor, f: int) -> Tensor:
        return rows.mul_(2).sum(0)


class Shapeless(Spy):
    name: ClassVar[str] = "shapeless"

    def aggregate(self, rows: Tensor, f: int) -> Tensor:
        return rows.sum()


ROWS = torch.arange(8.0).reshape(4, 2)


@pytest.mark.parametrize(
    "bad, f, left, f_left",
    [
        ({}, 2, [0, 1, 2, 3], 2),
        ({1: float("nan")}, 2, [0, 2, 3], 1),
        ({0: float("inf"), 3: float("-inf")}, 2, [1, 2], 0),
        ({0: float("nan"), 1: float("nan"), 2: float("inf")}, 2, [3], 0),
    ],
)
def test_rows_that_are_not_finite_are_left_out_and_each_lowers_f(bad, f, left, f_left):
    rows = ROWS.clone()
    for row, value in bad.items():
        rows[row, row % 2] = value
    spy = Spy(AggregatorParams())
    spy(rows, f)
    seen, told = spy.seen
    assert torch.equal(seen, ROWS[left])
    assert told == f_left


def test_a_row_of_plus_and_minus_infinity_is_left_out():
    rows = ROWS.clone()
    rows[2] = torch.tensor([float("inf"), float("-inf")])
    spy = Spy(AggregatorParams())
    spy(rows, 1)
    assert torch.equal(spy.seen[0], ROWS[[0, 1, 3]])


def test_a_finite_row_whose_sum_overflows_is_used():
    rows = ROWS.clone()
    rows[2] = 3e38
    rows[3, 0] = float("nan")
    spy = Spy(AggregatorParams())
    spy(rows, 1)
    assert torch.equal(spy.seen[0], rows[:3])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_without_a_finite_row_there_is_a_clear_error(value):
    with pytest.raises(PluginError, match="aggregator spy: none of 4 rows is finite"):
        Spy(AggregatorParams())(torch.full((4, 2), value), 1)


def test_the_parameter_f_overrides_the_harness():
    spy = Spy(AggregatorParams(f=1))
    spy(ROWS, 3)
    assert spy.seen[1] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    spy = Spy(AggregatorParams())
    assert spy(ROWS.to(dtype), 1).dtype == dtype
    assert spy.seen[0].dtype == torch.float32


def test_a_rule_that_changes_its_rows_or_returns_another_shape_is_caught():
    with pytest.raises(PluginError, match="in-place changed its input"):
        InPlace(AggregatorParams())(ROWS.clone(), 1)
    with pytest.raises(PluginError, match=r"shapeless returned shape \[\] for rows of shape"):
        Shapeless(AggregatorParams())(ROWS, 1)


def test_the_mean_tells_infinite_rows_from_a_result_that_overflows():
    aggregator = registry.aggregators.create(Component(name="mean"))
    rows = torch.full((3, 2), 3e38)
    torch.testing.assert_close(aggregator(rows, 0), rows[0])
    rows[1] = float("inf")
    torch.testing.assert_close(aggregator(rows, 0), rows[0])


@pytest.mark.parametrize(
    "name, n, f, message",
    [
        ("median", 4, 2, r"median needs n > 2f: 5 rows for f = 2, but there are 4"),
        ("trimmed-mean", 6, 3, r"trimmed-mean needs n > 2f: 7 rows for f = 3, but there are 6"),
        ("krum", 8, 3, r"krum needs n >= 2f\+3: 9 rows for f = 3, but there are 8"),
        ("krum", 2, 0, r"krum needs n >= 2f\+3: 3 rows for f = 0, but there are 2"),
        ("multi-krum", 8, 3, r"multi-krum needs n >= 2f\+3: 9 rows for f = 3, but there are 8"),
        ("multi-krum:m=7", 9, 3, r"multi-krum needs m <= n-f: at most 6 of 9 rows .*, not 7"),
        ("bulyan", 10, 2, r"bulyan needs n >= 4f\+3: 11 rows for f = 2, but there are 10"),
        ("geometric-median", 4, 2, r"geometric-median needs n > 2f: 5 rows for f = 2"),
        ("centered-clipping", 4, 2, r"centered-clipping needs n > 2f: 5 rows for f = 2"),
    ],
)
def test_too_few_rows_are_refused_in_words_unless_relaxed(name, n, f, message):
    component = Component.parse(name)
    strict = registry.aggregators.create(component)
    rows = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    for refused in (lambda: strict.check(n, f), lambda: strict(rows, f)):
        with pytest.raises(ConfigError, match=message + ".*; lower f, add replicas, or set strict"):
            refused()
    relaxed = Component(name=component.name, params={**component.params, "strict": False})
    assert registry.aggregators.create(relaxed)(rows, f).isfinite().all()
    own = Component(name=component.name, params={**component.params, "f": f})
    with pytest.raises(ConfigError, match=message):
        registry.aggregators.create(own).check(n, 0)


@pytest.mark.parametrize("name, n, f", [("krum", 9, 3), ("bulyan", 11, 2), ("median", 5, 2),
                                        ("multi-krum:m=6", 9, 3)])  # fmt: skip
def test_just_enough_rows_are_enough(name, n, f):
    aggregator = registry.aggregators.create(Component.parse(name))
    aggregator.check(n, f)
    assert aggregator.requires(n, f) is None


def test_the_condition_is_put_to_the_rows_as_they_came():
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    rows[1:] = float("nan")
    assert torch.equal(Krum(AggregatorParams())(rows, 1), rows[0])
