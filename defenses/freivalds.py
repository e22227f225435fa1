"""Freivalds: an audit that tests the products of matrices and does not compute them again."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from sentinel_bench.api import Signals, Verdict
from sentinel_bench.defenses.draws import place
from sentinel_bench.defenses.recompute import AuditParams, Proof, distance


class FreivaldsParams(AuditParams):
    """Parameters of `freivalds`."""

    q: float = Field(0.02, gt=0, le=1, description="share of the signals whose layers are tested")
    k: int = Field(4, ge=1, description="random vectors that test each linear layer")


class Freivalds(Proof[FreivaldsParams]):
    """Audits a few signals by random projections of the linear layers that made them.

    A worker that is drawn hands over the outputs of all linear layers of its stage (for a gradient
    also the gradients with respect to their inputs). The verifier runs the stage with these in
    place of the products, tests each one against what went into it, and computes the rest (norms,
    attention, activation functions, loss) itself. A layer with N tokens costs it
    `2 k (in out + N (in + out))` operations and not `2 N in out`. The price is traffic: what is
    handed over for one signal is that signal many times (width of all layers / hidden; some 14
    times for a layer of the published model forward, 26 times backward).

    Caught like this is who is drawn and lies by more than the tolerance: of a layer that is wrong
    by d relative to its output, k vectors miss a token with probability `(0.8 rtol / d)^k`.

    Honest workers claim what they computed. A malicious one tells the most consistent story there
    is: all is true, but for the last linear layer of that direction, which is what makes its stage
    end in what it sent.
    """

    name = "freivalds"
    goal = "audit for less than the work: test products of matrices, do not compute them again"
    formula = (
        "with probability q: |y r - x (W r)| > rtol |y| for a linear layer's claim y and one of k"
        " random r, or |x - x'| > rtol max(|x|, |x'|), x' by the verifier from the claims"
    )
    source = "sentinel-bench; after Freivalds, IFIP Congress 1977"
    blind_to: ClassVar[str] = (
        "the lies that are not drawn (at q = 2 % it takes 34 to be found with even odds), changes"
        " below rtol (of each linear layer: over many layers they can add up to more), and attacks"
        " on weight gradients or weights, which are no signals"
    )
    Params = FreivaldsParams

    def check(self, signals: Signals) -> Verdict:
        """Draw, have the claims tested, compare. Where nobody is drawn nothing is computed."""
        drawn = self.draw(signals, self.params.q)
        if not drawn or signals.again is None:
            return self.verdict(signals, {})
        seed = self._draws.seed("vectors", *place(signals))
        found = signals.again.check_linears(drawn, self.params.k, seed)
        values = {
            "projection": found.error,
            "mismatch": distance(signals.sent[drawn], found.result),
        }
        limit = self.tolerance(signals)
        return self.verdict(
            signals,
            {
                name: (dict(zip(drawn, row.tolist(), strict=True)), limit)
                for name, row in values.items()
            },
        )
