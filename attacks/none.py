"""No attack: every worker is honest. The baseline of every score."""

from __future__ import annotations

from sentinel_bench.api import Attack, NoParams


class NoAttack(Attack[NoParams]):
    """All workers stay honest."""

    name = "none"
    goal = "nothing: the run without attackers that every other run is compared with"
    formula = "x"
    source = "baseline"
