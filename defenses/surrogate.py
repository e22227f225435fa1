"""Surrogate: an online linear model of what a stage does, fitted on its honest workers.

Per stage and direction a ridge regression maps what was received, scaled to rms 1 per token, to the
relative change `(sent - received) / norm(received)`. Only what is orthogonal to the received token
is compared with its prediction: along it, `coherence` looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from sentinel_bench.api import Setup, Signals
from sentinel_bench.defenses.fenced import Fenced, FencedParams, ResidualFloor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    Rows = tuple[Tensor, Tensor, Tensor]
    """sent and received, `[replicas, tokens, hidden]` each, and which replicas are clean"""

GREATEST = 1e3
"""A token that changes more than this is not fitted: it would outweigh all others."""
RESOLUTION = 1e-3
"""Share of a vector below which float32 cannot tell what is orthogonal to another: a difference of
squares."""


class SurrogateParams(FencedParams):
    """Parameters of `surrogate`."""

    floor: ResidualFloor = Field(
        ResidualFloor(), description="least half width for cosine and for ratio"
    )
    tokens: int = Field(128, ge=1, description="of each signal that are compared")
    fitted: int = Field(32, ge=1, description="of each signal that are learnt from in a fit")
    every: int = Field(5, ge=1, description="steps from one fit to the next")
    forgetting: float = Field(0.9, gt=0, le=1, description="weight of a fit in the next one")
    ridge: float = Field(1e-3, gt=0, description="penalty on the map, per fitted token")
    seed: int = Field(0, ge=0, description="of the drawing of tokens")


class Surrogate(Fenced[SurrogateParams]):
    """Flags changes that the stage's linear model does not explain.

    With `u` and `v` the parts orthogonal to the received token of the change and of its prediction,
    the statistics are the means over tokens of `cosine(u, v)` and of `log(norm(u) / norm(v))`. A
    mirrored contribution moves the first, and a halved one the second.
    """

    name = "surrogate"
    goal = "flag what is not what a linear model of the stage makes of the received signal"
    formula = (
        "(x - r) / norm(r) ~ W r / rms(r) by ridge regression; mean cosine and mean log norm ratio "
        "of both sides, orthogonal to r, outside median +- max(mads * 1.4826 MAD, floor)"
    )
    source = "ours"
    blind_to: ClassVar[str] = (
        "lies that change only what its linear model does not explain (`mirror-surrogate`), or only"
        " the part along what was received, lies inside of both fences, the activations of the"
        " first stage and the gradients of the last, which received nothing, and attacks on weight"
        " gradients or weights, which are no signals"
    )
    Params = SurrogateParams
    needs_received = True
    statistics = ("cosine", "ratio")

    def floors(self) -> Mapping[str, float]:
        """Return the floors of the parameters."""
        return self.params.floor.model_dump()

    def start(self, setup: Setup) -> None:
        """Make the fences, and an empty fit per stage and direction."""
        super().start(setup)
        from sentinel_bench.defenses.ridge import OnlineRidge
        from sentinel_bench.defenses.tokens import TokenSample

        p, channels = self.params, 2 * setup.stages
        self._ridge: OnlineRidge = OnlineRidge(
            channels, setup.shape[-1], p.forgetting, p.ridge, setup.device
        )
        self._microbatches = setup.microbatches
        self._rows: dict[int, dict[int, Rows]] = {}
        self._fitted: set[int] = set()
        self._sample = TokenSample(self.params.seed)

    def measure(self, signals: Signals) -> Tensor | None:
        """Return cosine and log norm ratio of change and prediction, `[2, replicas]`."""
        channel = self._channel(signals)
        if signals.received is None or channel not in self._fitted:
            return None
        import torch

        from sentinel_bench.defenses.tokens import across, cosine, dots, log_ratio, norms, over

        sent, received = self._sample(signals, self.params.tokens)
        # what is orthogonal to r is the same for sent and for sent - r
        predicted = received @ (self._ridge.weights[channel] * received.shape[-1] ** 0.5)
        s, r, p = norms(sent), norms(received), norms(predicted)
        s_along, p_along = over(dots(sent, received), r), over(dots(predicted, received), r)
        u, v = across(s, s_along), across(p, p_along)
        s_least, r_least = RESOLUTION * s, RESOLUTION * r
        angle = cosine(dots(sent, predicted) - s_along * p_along, u, v)
        angle *= (u > s_least) & (v > r_least)
        return torch.stack([angle, log_ratio(u.maximum(s_least), v.maximum(r_least))]).mean(2)

    def learn(self, signals: Signals, clean: Tensor) -> None:
        """Take in the values of the clean signals, and now and then some tokens for the fit."""
        super().learn(signals, clean)
        if signals.received is not None and signals.step % self.params.every == 0:
            sent, received = self._sample(signals, self.params.fitted)
            parts = self._rows.setdefault(self._channel(signals), {})
            parts[signals.microbatch] = (sent, received, clean)

    def end_step(self, step: int) -> None:
        """Move the fences, and fit the maps to what was taken in."""
        super().end_step(step)
        if self._rows:
            self._ridge.fit(list(self._rows), *_pairs(*self._taken()))
            self._fitted |= self._rows.keys()
            self._rows = {}

    def state_bytes(self) -> int:
        """Return the bytes of the windows and of the fits."""
        return super().state_bytes() + self._ridge.state_bytes()

    def _taken(self) -> Rows:
        """Return what was taken in: `[channels, microbatches * replicas, ...]` each.

        For a microbatch that was not there stand zeros, which do not count.
        """
        import torch

        channels, m = len(self._rows), self._microbatches
        some = next(iter(next(iter(self._rows.values())).values()))
        blank = tuple(map(torch.zeros_like, some))
        messages = [parts.get(i, blank) for parts in self._rows.values() for i in range(m)]
        stacked = map(torch.stack, zip(*messages, strict=True))
        sent, received, clean = (x.view(channels, -1, *x.shape[2:]) for x in stacked)
        return sent, received, clean

    def _channel(self, signals: Signals) -> int:
        return signals.stage * 2 + (signals.direction == "gradient")


def _pairs(sent: Tensor, received: Tensor, clean: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and outputs of the map, `[channels, replicas * tokens, hidden]`.

    Args:
        sent, received: `[channels, replicas, tokens, hidden]`.
        clean: `[channels, replicas]`; the rows of the others are zeros.
    """
    from sentinel_bench.defenses.tokens import norms, over

    change = (sent - received).nan_to_num_()
    r = norms(received)
    good = clean[..., None] & (norms(change) < GREATEST * r)  # also: neither overflows
    weight = over(good.to(r.dtype), r)[..., None]
    x = received * (weight * received.shape[-1] ** 0.5)
    return x.flatten(1, 2), (change * weight).flatten(1, 2)
