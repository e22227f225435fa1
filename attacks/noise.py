"""Noise in place of the signal, on top of it, or as numbers that are none."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sentinel_bench.api import Attack, AttackContext
from sentinel_bench.attacks.rated import Rated, RateParams
from sentinel_bench.config import Frozen

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = "SENTINEL, arXiv 2603.03592, section 2.1"
LU = "Lu et al., ICML 2024"


def rms(x: Tensor) -> Tensor:
    """Return the root mean square over all elements, a scalar tensor."""
    return x.square().mean().sqrt()


class FixedVector:
    """One vector of unit rms for each direction, drawn when it is first asked for."""

    def __init__(self) -> None:
        self._drawn: dict[str, Tensor] = {}

    def get(self, like: Tensor, ctx: AttackContext) -> Tensor:
        """Return the vector of this direction, of the shape and dtype of the first `like`."""
        if ctx.direction not in self._drawn:
            u = ctx.normal(like)
            self._drawn[ctx.direction] = u / rms(u)
        return self._drawn[ctx.direction]


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
        self._fixed = FixedVector()

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the signal with the bias."""
        fresh = self.params.kind == "random"
        direction = ctx.normal(x) if fresh else self._fixed.get(x, ctx)
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


class GaussianNoiseParams(RateParams):
    """Parameters of `gaussian-noise`."""

    rate: float = Field(0.7, gt=0, le=1, description="share of the steps")


class GaussianNoise(Rated[GaussianNoiseParams]):
    """Adds noise with the mean and the spread of the signal in a share of the steps."""

    name = "gaussian-noise"
    goal = "drown the signal in noise of its own size now and then"
    formula = "x + mean(x) + std(x) * e with probability rate per step, else x"
    source = LU
    Params = GaussianNoiseParams

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the noisy signal, or the honest one; mean and std are over all elements."""
        if not self.acts(ctx):
            return x
        return x + x.mean() + x.std(correction=0) * ctx.normal(x)


class UniformNoiseParams(RateParams):
    """Parameters of `uniform-noise`."""

    rate: float = Field(0.5, gt=0, le=1, description="share of the steps")


class UniformNoise(Rated[UniformNoiseParams]):
    """Sends uniform noise in a share of the steps."""

    name = "uniform-noise"
    goal = "send noise that has nothing to do with the signal now and then"
    formula = "U[0, 1) with probability rate per step, else x"
    source = LU
    Params = UniformNoiseParams

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the noise, or the honest signal."""
        return ctx.uniform(x) if self.acts(ctx) else x


class NonFiniteParams(Frozen):
    """Parameters of `non-finite`."""

    p: float = Field(0.001, gt=0, le=1, description="share of the elements; at least one is hit")
    kind: Literal["nan", "inf", "-inf"] = Field("nan", description="what they become")


class NonFinite(Attack[NonFiniteParams]):
    """Sends NaN or infinity in a few places."""

    name = "non-finite"
    goal = "spoil the whole model, or a detector's state, with a few elements"
    formula = "x with max(1, round(p n)) of its n elements NaN, Inf or -Inf"
    source = "sentinel-bench"
    finite = False
    Params = NonFiniteParams

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the signal with what is not finite in fresh random places."""
        count = max(1, round(self.params.p * x.numel()))
        places = ctx.uniform(x.float()).flatten().topk(count).indices
        return x.flatten().index_fill(0, places, float(self.params.kind)).view(x.shape)
