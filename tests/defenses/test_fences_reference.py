"""The fence against a slow, literal reading of its definition, on random sequences."""

from __future__ import annotations

import math
import random
from collections import deque

import pytest
import torch

from sentinel_bench.defenses.fence import Fences, FenceSettings


class Literal:
    """One channel in plain Python, without a single trick."""

    def __init__(self, settings: dict[str, float], window: int, changes: int, least_values: int):
        self.s = settings
        self.steps: deque[list[float]] = deque(maxlen=window)
        self.changes = changes
        self.least_values = least_values
        self.k = settings["k0"]
        self.median, self.half = 0.0, math.inf

    def push(self, deviations: list[float]) -> None:
        self.steps.append(deviations)
        values = sorted(v for step in self.steps for v in step if not math.isnan(v))
        if len(values) < self.least_values:
            self.half = math.inf
            return
        q1, q2, q3 = (quantile(values, q) for q in (0.25, 0.5, 0.75))
        iqr = max(q3 - q1, self.s["eps"])

        def share() -> float:
            return sum(abs(v - q2) >= self.k * iqr for v in values) / len(values)

        few = self.s["slack"] * self.s["alpha"]
        if share() > self.s["alpha"]:
            for _ in range(self.changes):
                if share() > self.s["alpha"]:
                    self.k *= self.s["grow"]
        else:
            for _ in range(self.changes):
                if share() < few:
                    self.k *= self.s["shrink"]
        self.median, self.half = q2, max(self.k * iqr, self.s["lambda"] * abs(q2))

    def outside(self, deviation: float) -> bool:
        if math.isinf(self.half):
            return False
        return math.isnan(deviation) or abs(deviation - self.median) >= self.half


def quantile(ordered: list[float], q: float) -> float:
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def draw(rng: random.Random, step: int, replicas: int) -> list[float]:
    """Deviations that drift, with outliers, ties and gaps; the first step is complete."""
    level = 3 + math.sin(step / 7)
    values = [
        rng.choice([rng.lognormvariate(0, 0.4), rng.gauss(0, 1)]) + level for _ in range(replicas)
    ]
    if rng.random() < 0.2:
        values = [level] * replicas
    if rng.random() < 0.3:
        values[rng.randrange(replicas)] *= rng.choice([-4.0, 3.0, 20.0])
    return [math.nan if step and rng.random() < 0.15 else v for v in values]


@pytest.mark.parametrize("seed", range(12))
def test_the_fence_follows_the_literal_definition(seed):
    rng = random.Random(seed)
    replicas, window, changes = (
        rng.choice([2, 3, 8]),
        rng.choice([2, 5, 20]),
        rng.choice([1, 3, 10]),
    )
    names = {"lambda": "least"}
    channels = [
        {
            "k0": rng.uniform(0.5, 4),
            "alpha": rng.choice([0.0137, 0.0413, 0.2171]),  # no share of these windows
            "grow": rng.uniform(1.01, 1.5),
            "shrink": rng.uniform(0.5, 0.99),
            "slack": rng.choice([0.0, 0.1, 0.713]),
            "lambda": rng.choice([0.0, 0.05, 0.3]),
            "eps": rng.choice([1e-3, 0.3]),
        }
        for _ in range(4)
    ]
    settings = FenceSettings(
        **{names.get(key, key): torch.tensor([c[key] for c in channels]) for key in channels[0]}
    )
    fences = Fences(settings, replicas, window, changes, min_steps=1)
    literal = [Literal(c, window, changes, max(1, replicas // 2)) for c in channels]
    for step in range(60):
        values = [draw(rng, step, replicas) for _ in channels]
        flags, _ = fences.outside(slice(0, 4), torch.tensor(values))
        expected = [[o.outside(v) for v in row] for o, row in zip(literal, values, strict=True)]
        assert flags.tolist() == expected, step
        fences.push(torch.tensor(values))
        for one, row in zip(literal, values, strict=True):
            one.push(row)
        assert fences.k.tolist() == pytest.approx([o.k for o in literal], rel=1e-4), step
        assert fences.half_width.tolist() == pytest.approx([o.half for o in literal], rel=1e-4)
        closed = [(m, o.median) for m, o in zip(fences.median.tolist(), literal, strict=True)]
        assert all(m == pytest.approx(o, rel=1e-4, abs=1e-5) for m, o in closed), step
