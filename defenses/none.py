"""No defense: every signal is passed on as it is. The unprotected baseline."""

from __future__ import annotations

from typing import ClassVar

from sentinel_bench.api import Defense, ResponseParams, Signals, Verdict


class NoDefense(Defense[ResponseParams]):
    """Flags nothing."""

    name = "none"
    goal = "nothing: shows what an attack costs when nobody looks"
    formula = "flag nobody"
    source = "baseline"
    blind_to: ClassVar[str] = "any attack: nothing is looked at"
    passive = True

    def check(self, signals: Signals) -> Verdict:
        """Flag nobody."""
        nobody = signals.active.new_zeros(signals.active.shape)
        return Verdict(nobody, nobody)
