"""Noise in place of the signal or on top of it (SENTINEL, arXiv 2603.03592, section 2.1)."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sentinel_bench.api import Attack, AttackContext
from sentinel_bench.config import Frozen

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = "SENTINEL, arXiv 2603.03592, section 2.1"


def rms(x: Tensor) -> Tensor:
    """Return the root mean square over all elements, a scalar tensor."""
    return x.square().mean().sqrt()


class RandomValueParams(Frozen):
    """Parameters of `random-value`."""

    scale: float = Field(1.0, gt=0, description="standard deviation of what is sent")


class RandomValue(Attack[RandomValueParams]):
    """Sends fresh Gaussian noise."""

    name = "random-value"
    goal = "send noise that has nothing to do with the signal"
    formula = "scale * e, e ~ N(0, I)"
    source = SOURCE
    Params = RandomValueParams

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return noise."""
        return ctx.normal(x) * self.params.scale


class BiasParams(Frozen):
    """Parameters of `bias`."""

    kind: Literal["random", "constant"] = Field(
        "random", description="fresh noise each step, or one fixed vector per attacker"
    )
    sigma: float = Field(1.0, gt=0, description="strength, in units of the signal's rms")


class Bias(Attack[BiasParams]):
    """Adds noise, or one fixed direction, in proportion to the signal's own size."""

    name = "bias"
    goal = "push the signal away from where it should be, in proportion to its size"
    formula = "x + sigma * rms(x) * e   (random), x + sigma * rms(x) * u, rms(u) = 1   (constant)"
    source = SOURCE + " (its sigma is nowhere stated)"
    Params = BiasParams

    def __init__(self, params: BiasParams) -> None:
        super().__init__(params)
        self._fixed: dict[str, Tensor] = {}

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the signal with the bias."""
        if self.params.kind == "random":
            direction = ctx.normal(x)
        else:
            if ctx.direction not in self._fixed:
                u = ctx.normal(x)
                self._fixed[ctx.direction] = u / rms(u)
            direction = self._fixed[ctx.direction]
        return x + self.params.sigma * rms(x) * direction


class InvisibleNoiseParams(Frozen):
    """Parameters of `invisible-noise`."""

    p: float = Field(0.99, gt=0.5, lt=1, description="quantile of the normal law that sets z")
    axis: Literal["hidden", "tensor"] = Field(
        "hidden", description="mean and std per token over hidden, or over the whole tensor"
    )


class InvisibleNoise(Attack[InvisibleNoiseParams]):
    """Noise with the mean of the signal and a multiple of its spread."""

    name = "invisible-noise"
    goal = "noise that hides within the spread of the honest signal"
    formula = "mean(x) + z * std(x) * e, z = Phi^-1(p)"
    source = SOURCE + " (z = sqrt(2) erfinv(2p - 1))"
    Params = InvisibleNoiseParams

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the noise."""
        axes = (2,) if self.params.axis == "hidden" else (0, 1, 2)
        z = NormalDist().inv_cdf(self.params.p)
        mean, std = x.mean(axes, keepdim=True), x.std(axes, correction=0, keepdim=True)
        return mean + z * std * ctx.normal(x)
