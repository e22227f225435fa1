"""Coherence: compares what a worker sends with what it received, without memory of other data.

A transformer block adds a little to its residual stream, in both directions: the angle and the
size of what is sent, against what was received, are nearly the same for all honest workers of a
stage, whatever their data. Blind to a lie that keeps both, like a mirrored contribution; see
`surrogate`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from sentinel_bench.api import Setup, Signals
from sentinel_bench.defenses.fenced import Fenced, FencedParams, ResidualFloor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class CoherenceParams(FencedParams):
    """Parameters of `coherence`."""

    floor: ResidualFloor = Field(
        ResidualFloor(), description="least half width for cosine and for ratio"
    )
    tokens: int | None = Field(
        None, ge=1, description="of each signal that are compared; default: all"
    )
    seed: int = Field(0, ge=0, description="of the drawing of tokens")


class Coherence(Fenced[CoherenceParams]):
    """Flags signals at an unusual angle to, or of an unusual size against, what came in.

    Both statistics are means over the tokens of a replica. At the ends of the pipeline, where
    nothing was received, nothing is flagged.
    """

    name = "coherence"
    goal = "flag what does not follow from what the same worker received"
    formula = (
        "mean cosine(sent, received) and mean log(norm(sent) / norm(received)) over tokens, "
        "each outside median +- max(mads * 1.4826 MAD, floor)"
    )
    source = "ours"
    blind_to: ClassVar[str] = (
        "lies that keep the angle and the size against what was received, like a mirrored"
        " contribution (`mirror`), lies inside of both fences, the activations of the first stage"
        " and the gradients of the last, which received nothing, and attacks on weight gradients or"
        " weights, which are no signals"
    )
    Params = CoherenceParams
    needs_received = True
    statistics = ("cosine", "ratio")

    def floors(self) -> Mapping[str, float]:
        """Return the floors of the parameters."""
        return self.params.floor.model_dump()

    def start(self, setup: Setup) -> None:
        """Make the fences."""
        super().start(setup)
        from sentinel_bench.defenses.tokens import TokenSample

        self._sample = TokenSample(self.params.seed)

    def measure(self, signals: Signals) -> Tensor | None:
        """Return cosine and log norm ratio, `[2, replicas]`."""
        if signals.received is None:
            return None
        import torch

        from sentinel_bench.defenses.tokens import cosine, dots, log_ratio, norms

        sent, received = self._sample(signals, self.params.tokens)
        s, r = norms(sent), norms(received)
        both = torch.stack([cosine(dots(sent, received), s, r), log_ratio(s, r)])
        return both.mean(2)
