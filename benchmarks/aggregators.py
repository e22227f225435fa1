"""What an aggregation costs: every rule beside that of byzfl, in one process.

Both take turns on the same rows, on one thread. Printed are the processor time of a call (median
over the rounds), the ratio (median over the rounds of the ratio within a round; above 1 ours is
faster) and the largest difference of the two results, over the largest value.

    python benchmarks/aggregators.py [--rounds 5] [--rows 16] [--size 1000000] [--faulty 3]
                                     [--factor 10]

byzfl is no dependency. `pip install --no-deps byzfl` is enough: only its aggregators are imported,
which need numpy, scipy and torch. Without it, its columns are left out.

The rules are set so that both mean the same:

* Krum of byzfl sums over n - f - 1 neighbours, ours over n - f - 2 (the paper): byzfl gets f + 1.
* Multi-Krum likewise; with f + 1 byzfl averages n - f - 1 rows, so ours gets that `m`.
* The geometric median of byzfl starts at zero, ours at the median: both take enough steps to be at
  the same place.
* Centered clipping of byzfl starts at zero, ours at the median: byzfl gets the median as its start,
  without being timed for it; both get the same radius, about that of an honest row, and steps.
* byzfl has no Bulyan: ours is timed alone. `distances` are what Krum and Bulyan start from; byzfl's
  Krum takes them from `torch.cdist`. Here the difference is that to float64, printed for ours: in
  float32 `cdist` itself is some 5e-4 off for rows as long as these.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.aggregators.geometry import squared_distances
from sentinel_bench.config import Component

Rule = Callable[[Tensor], Tensor]
STEPS = {"geometric-median": 5, "centered-clipping": 3}


def byzfl_aggregators() -> Any:
    """Return byzfl's module of aggregators, or None; without the rest of the package.

    Importing byzfl itself would import all of it, and torchvision and seaborn with it.
    """
    spec = importlib.util.find_spec("byzfl")
    if spec is None or spec.submodule_search_locations is None:
        return None
    package = types.ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["byzfl"] = package
    return importlib.import_module("byzfl.aggregators.aggregators")


def draw(n: int, d: int, faulty: int, factor: float) -> Tensor:
    """Return n gradients with noise as large as what they share, the first ones faulty."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(n, d, generator=generator) + torch.randn(d, generator=generator)
    rows[:faulty] *= -factor
    return rows


def ours(name: str, f: int, **params: Any) -> Rule:
    """Return one of our rules as a function of the rows."""
    aggregator = registry.aggregators.create(Component(name=name, params=params))
    return lambda rows: aggregator(rows, f)


def rules(rows: Tensor, f: int, byzfl: Any) -> dict[str, tuple[Rule, Rule | None]]:
    """Return each rule, ours and byzfl's."""
    n, d = rows.shape
    tau = (2 * d) ** 0.5
    median = (
        rows.median(0).values if n % 2 else rows.sort(0).values[n // 2 - 1 : n // 2 + 1].mean(0)
    )

    def clipping(given: Tensor) -> Tensor:
        rule = byzfl.CenteredClipping(L=STEPS["centered-clipping"], tau=tau)
        rule.m = median
        clipped: Tensor = rule(given)
        return clipped

    table: dict[str, tuple[Rule, Callable[[], Rule] | None]] = {
        "mean": (ours("mean", f), lambda: byzfl.Average()),
        "median": (ours("median", f), lambda: byzfl.Median()),
        "trimmed-mean": (ours("trimmed-mean", f), lambda: byzfl.TrMean(f)),
        "krum": (ours("krum", f), lambda: byzfl.Krum(f + 1)),
        "multi-krum": (ours("multi-krum", f, m=n - f - 1), lambda: byzfl.MultiKrum(f + 1)),
        "distances": (squared_distances, lambda: lambda given: torch.cdist(given, given) ** 2),
        "bulyan": (ours("bulyan", f), None),
        "geometric-median": (
            ours("geometric-median", f),
            lambda: byzfl.GeometricMedian(nu=0.1, T=STEPS["geometric-median"]),
        ),
        "centered-clipping": (
            ours("centered-clipping", f, tau=tau, iterations=STEPS["centered-clipping"]),
            lambda: clipping,
        ),
    }
    return {k: (a, b() if b and byzfl else None) for k, (a, b) in table.items()}


def timed(rule: Rule, rows: Tensor) -> float:
    """Return the milliseconds of processor time that one call takes."""
    started = time.process_time()
    rule(rows)
    return 1e3 * (time.process_time() - started)


def main() -> None:
    """Measure what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--size", type=int, default=10**6)
    parser.add_argument("--faulty", type=int, default=3)
    parser.add_argument("--factor", type=float, default=10, help="faulty: minus so many times")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = draw(arguments.rows, arguments.size, arguments.faulty, arguments.factor)
    byzfl = byzfl_aggregators()
    print(
        f"{arguments.rows} rows of {arguments.size:,}, float32, one thread, "
        f"{arguments.faulty} rows times {-arguments.factor:g}, {arguments.rounds} rounds"
    )
    if byzfl is None:
        print("byzfl is missing: pip install --no-deps byzfl")
    print(f"{'':<20}{'ours, ms':>10}{'byzfl, ms':>11}{'ratio':>8}{'difference':>12}")
    for name, (own, other) in rules(rows, arguments.faulty, byzfl).items():
        value = own(rows)
        took = []
        if other is None:
            for _ in range(arguments.rounds):
                took.append(timed(own, rows))
            print(f"{name:<20}{statistics.median(took):>10.1f}{'-':>11}{'-':>8}{'-':>12}")
            continue
        expected = other(rows.double() if name == "distances" else rows)
        difference = float((value - expected).abs().max() / expected.abs().max())
        pairs = [(timed(own, rows), timed(other, rows)) for _ in range(arguments.rounds)]
        mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"{name:<20}{mine:>10.1f}{theirs:>11.1f}{ratio:>8.2f}{difference:>12.1e}")


if __name__ == "__main__":
    main()
