"""What each defense costs a step: operations, bytes that travel, and bytes that it keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from sentinel_bench.leaderboard._read import Result

METRICS = ("extra_flops", "extra_bytes", "state_bytes")


def costs(results: Iterable[Result], scenarios: Sequence[str]) -> list[dict[str, Any]]:
    """Return one entry for each defense in each setting for which results say what it costs.

    It has `defense`, `setting`, and the means of `METRICS` over these results.

    Args:
        results: of one track, one for each cell and seeds.
        scenarios: digests of the settings, in the order of their numbers.
    """
    groups: dict[tuple[str, str], list[Mapping[str, float | None]]] = defaultdict(list)
    for item in results:
        if all(item.scores[name] is not None for name in METRICS):
            groups[item.defense, item.scenario].append(item.scores)
    return [
        {
            "defense": defense,
            "setting": scenarios.index(scenario) + 1,
            **{name: fmean(scores[name] or 0.0 for scores in found) for name in METRICS},
        }
        for (defense, scenario), found in groups.items()
    ]


def price(cost: Mapping[str, Any]) -> str:
    """Return a cost in words; empty if it is not known.

    Args:
        cost: `METRICS` by name.
    """
    if any(cost.get(name) is None for name in METRICS):
        return ""
    return (
        f"{100 * cost['extra_flops']:+.2f} % floating-point operations, "
        f"{cost['extra_bytes']:,.0f} bytes a step, {cost['state_bytes']:,.0f} bytes of state"
    )
