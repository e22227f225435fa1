"""Distances by matrix products, and the sorting network."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from sentinel_bench.aggregators import geometry, order
from sentinel_bench.aggregators.geometry import gram, squared_distances

SIZE = 3000


def rows(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, SIZE, generator=torch.Generator().manual_seed(5), dtype=dtype)


def direct(x: Tensor) -> Tensor:
    x = x.double()
    return torch.stack([(x - row).square().sum(1) for row in x])


def groups() -> Tensor:
    """Four honest rows, three colluders near each other, two more, each group further out."""
    x = rows(9)
    x[4:7] = 1e5 + 0.1 * x[4:7]
    x[7:] = -1e10 + 1e4 * x[7:]
    return x


CASES = {
    "ordinary": rows(8),
    "one row": rows(1),
    "two rows": rows(2),
    "nearly equal": 1000 + 0.01 * rows(8),
    "far from zero": rows(8) + 1e4 * rows(1),
    "huge": 1e30 * rows(8),
    "tiny": 1e-30 * rows(8),
    "an outlier": torch.cat([rows(8), 1e6 * rows(1)]),
    "outliers whose squares overflow": torch.cat([rows(8), 1e36 * rows(2)]),
    "outliers both ways": torch.cat([rows(8), rows(1).sign() * 3e38, rows(1).sign() * -3e38]),
    "colluders": torch.cat([rows(8), 1e6 + rows(3)]),
    "groups": groups(),
    "equal rows among others": torch.cat([rows(3), rows(3)]),
    "float64": rows(8, torch.float64),
}


@pytest.mark.parametrize("x", CASES.values(), ids=CASES)
@pytest.mark.parametrize("elements", [1000, 2**18])
def test_distances_are_those_of_float64(x, elements, monkeypatch):
    monkeypatch.setattr(order, "ELEMENTS", elements)
    found = squared_distances(x)
    assert found.dtype == torch.float64
    assert found.diagonal().eq(0).all()
    assert torch.equal(found, found.T)
    torch.testing.assert_close(found, direct(x), rtol=1e-4, atol=0)


@pytest.mark.parametrize("x", CASES.values(), ids=CASES)
def test_distances_do_not_depend_on_the_row_that_is_taken_for_the_middle(x, monkeypatch):
    expected = direct(x)
    for middle in range(len(x)):
        monkeypatch.setattr(geometry, "_central", lambda given, i=middle: min(i, len(given) - 1))
        torch.testing.assert_close(squared_distances(x), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("sample", [1, 7, 4096])
def test_the_row_in_the_middle_is_one_of_the_majority(sample, monkeypatch):
    monkeypatch.setattr(geometry, "SAMPLE", sample)
    for faulty in ([0], [0, 1, 2, 3], [0, 2, 4, 8], [5, 6, 7, 8]):
        for spread in (0.0, 0.1, 1e4):  # colluders closer than the honest, and wild ones
            x = rows(9)
            x[faulty] = 1e5 + spread * x[faulty]
            assert geometry._central(x) not in faulty


def test_equal_rows_have_no_distance():
    assert squared_distances(rows(1).expand(7, -1) * 1e3).eq(0).all()


def test_inner_products_around_a_centre_stay_exact_for_the_rows_near_it_beside_an_outlier():
    x = torch.cat([rows(4), 1e36 * rows(1)])
    around = (x - 1).double()
    found = gram(x, torch.ones(SIZE))
    torch.testing.assert_close(found[:4, :4], (around @ around.T)[:4, :4], rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("n", range(1, 11))
def test_the_network_brings_every_wanted_rank_to_its_place(n):
    """A network that sorts all sequences of 0 and 1 sorts everything."""
    inputs = torch.tensor(list(itertools.product([0.0, 1.0], repeat=n))).T
    expected = inputs.sort(0).values
    for start, stop in itertools.combinations(range(n + 1), 2):
        columns: list[Tensor] = []

        def keep(values: list[Tensor], into: list[Tensor] = columns) -> Tensor:
            into.extend(values)
            return values[0]

        order.reduce_sorted(inputs.unbind(), range(start, stop), keep)
        assert torch.equal(torch.stack(columns), expected[start:stop])


@pytest.mark.parametrize("n", [13, 16, 31, 33])
def test_the_network_finds_the_median_of_many_rows(n):
    x = torch.randn(n, 500, generator=torch.Generator().manual_seed(n))
    expected = x.quantile(0.5, dim=0)
    torch.testing.assert_close(order.coordinate_median(x.unbind()), expected)


def test_the_network_of_16_takes_63_comparisons_and_the_median_fewer():
    assert len(order._network(16, 0, 16)) == 63
    assert len(order._network(16, 7, 9)) < 60


def test_blocks_do_not_change_a_result(monkeypatch):
    x = rows(7)
    whole = order.coordinate_median(x.unbind())
    monkeypatch.setattr(order, "ELEMENTS", 7 * random.Random(0).randint(100, 200))
    assert torch.equal(order.coordinate_median(x.unbind()), whole)
