"""Every rule against a literal reading of its definition in plain Python, on random rows."""

from __future__ import annotations

import math
import random

import pytest
import torch
from naive_rules import RULES, krum_order

from sentinel_bench import registry
from sentinel_bench.aggregators import AGGREGATORS, order
from sentinel_bench.config import Component


def draw(rng: random.Random, n: int, d: int) -> list[list[float]]:
    """Rows around a common one, some far off, some equal to others."""
    common = [rng.gauss(0, 3) for _ in range(d)]
    rows = [[c + rng.gauss(0, 1) for c in common] for _ in range(n)]
    for i in range(n):
        if rng.random() < 0.2:
            rows[i] = [v * rng.choice([-5.0, 30.0]) for v in rows[i]]
        elif rng.random() < 0.1:
            rows[i] = list(rng.choice(rows))
    return rows


def test_every_rule_has_a_reference():
    assert RULES.keys() == AGGREGATORS.keys()


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("name", RULES)
def test_a_rule_follows_its_literal_definition(name, seed, monkeypatch):
    rng = random.Random(seed)
    n, d = rng.choice([1, 2, 3, 5, 8, 9, 11, 15, 16]), rng.randint(1, 7)
    f = rng.randint(0, n // 2)
    monkeypatch.setattr(order, "ELEMENTS", rng.choice([n, 3 * n, 2**18]))  # blocks of 1, 3, all
    rows = draw(rng, n, d)
    aggregator = registry.aggregators.create(Component(name=name, params={"strict": False}))
    found = aggregator(torch.tensor(rows, dtype=torch.float64), f).tolist()
    expected = RULES[name](rows, f)
    if name == "geometric-median":  # there may be many, all as good
        sums = [sum(math.dist(row, z) for row in rows) for z in (found, expected)]
        assert sums[0] <= sums[1] * (1 + 1e-5)
    else:
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_multi_krum_averages_as_many_rows_as_it_is_told(seed):
    rng = random.Random(seed)
    rows = draw(rng, 9, 4)
    m = rng.randint(1, 6)
    best = RULES["mean"]([rows[i] for i in krum_order(rows, 3)[:m]], 3)
    aggregator = registry.aggregators.create(Component(name="multi-krum", params={"m": m}))
    found = aggregator(torch.tensor(rows, dtype=torch.float64), 3).tolist()
    assert found == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_nothing_near_the_geometric_median_is_nearer_to_all_rows(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    rows[0] *= 100
    found = registry.aggregators.create(Component(name="geometric-median"))(rows, 1)
    steps = torch.randn(200, 5, generator=generator, dtype=torch.float64)
    steps *= 1e-2 / steps.norm(dim=1, keepdim=True)
    around = (rows[:, None] - (found + steps)).norm(dim=2).sum(0)
    assert (around > (rows - found).norm(dim=1).sum()).all()
