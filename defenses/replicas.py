"""Cross-replica: compares the replicas of a stage with each other, channel by channel.

Replicas see different data, so single values say nothing; means and spreads over all tokens of a
channel (hidden unit) do. Everything is measured against the median over the replicas, which a
minority cannot move far, and needs no memory but that of the fences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from sentinel_bench.api import Signals
from sentinel_bench.defenses.fenced import Fenced, FencedParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

LEAST = 3
"""Active replicas without which a median says nothing about a minority."""
GREATEST = 100.0
"""A channel further off than so many deviations counts as these."""
ROUNDING = 1e-5
"""Replicas closer than this share of a signal's size count as equal."""
SMALL = 0.03
"""Mean distances below are taken for this one: replicas that are equal up to rounding."""
CLOSE = 1e-6
"""The same for 1 - cosine."""


class CrossReplicaParams(FencedParams):
    """Parameters of `cross-replica`."""

    floor: float = Field(0.05, gt=0, description="least half width of a fence; all are logarithms")


class CrossReplica(Fenced[CrossReplicaParams]):
    """Flags replicas whose channels are distributed unlike those of the others.

    With mean m and standard deviation v of each channel over batch and tokens:

    * `mean`, `std`: log of the mean over channels of abs(z), where z is the distance of m (of v)
      to the median over active replicas, in 1.4826 MAD over active replicas;
    * `profile`: log of 1 - cosine(m, median of m);
    * `norm`: log of the rms of the signal over its median.
    """

    name = "cross-replica"
    goal = "flag a replica that is distributed unlike the other replicas of its stage"
    formula = (
        "per channel mean and std over tokens, against the median over replicas in MADs; also the "
        "profile of the means and the rms; outside median +- max(mads * 1.4826 MAD, floor)"
    )
    source = "ours"
    blind_to: ClassVar[str] = (
        "lies that leave mean and spread of every channel as they are, like samples or tokens in"
        " another order (`swap`, `token-shift`) and honest signals of another time or replica"
        " (`delay`, `mimic`), lies inside of all fences, liars who are half of a stage, stages with"
        " fewer than three replicas, and attacks on weight gradients or weights, which are no"
        " signals"
    )
    Params = CrossReplicaParams
    statistics = ("mean", "std", "profile", "norm")

    def floors(self) -> Mapping[str, float]:
        """Return the same floor for all."""
        return dict.fromkeys(self.statistics, self.params.floor)

    def measure(self, signals: Signals) -> Tensor | None:
        """Return the four statistics, `[4, replicas]`; None below three active replicas."""
        active = signals.active
        n = int(active.sum())
        if n < LEAST:
            return None
        import torch

        from sentinel_bench.defenses.robust import SIGMA
        from sentinel_bench.defenses.tokens import TINY, cosine, dots, log_ratio, norms

        x = signals.sent.float().flatten(1, 2)
        mean = x.mean(1, keepdim=True)
        std = (x - mean).square_().mean(1).sqrt_()
        moments = torch.stack([mean[:, 0], std])  # [2, replicas, hidden]
        middle = _middle(moments, active, n)
        distance = (moments - middle).abs()
        sigma = SIGMA * _middle(distance, active, n)
        size = norms(moments.mT.flatten(0, 1).T)  # rms * sqrt(hidden)
        typical = _middle(size[None, :, None], active, n).flatten()
        z = (distance / sigma.maximum(ROUNDING * typical).clamp_min(TINY)).clamp_max(GREATEST)
        away, profile = z.mean(2), middle[0]
        angle = cosine(dots(moments[0], profile), norms(moments[0]), norms(profile))
        return torch.stack(
            [
                away[0].clamp_min(SMALL).log(),
                away[1].clamp_min(SMALL).log(),
                (1 - angle).clamp_min(CLOSE).log(),
                log_ratio(size, typical),
            ]
        )


def _middle(x: Tensor, active: Tensor, n: int) -> Tensor:
    """Return the median over the n active replicas, `[k, 1, hidden]` of `[k, replicas, hidden]`."""
    ordered = x.masked_fill(~active[:, None], float("inf")).sort(1).values
    return (ordered[:, (n - 1) // 2] + ordered[:, n // 2]).div_(2)[:, None]
