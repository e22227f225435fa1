"""Attacks on the sign or the scale of the signal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from sentinel_bench.api import Attack, AttackContext
from sentinel_bench.attacks.rated import Rated, RateParams
from sentinel_bench.config import Frozen

if TYPE_CHECKING:
    from torch import Tensor


class ScalingParams(Frozen):
    """Parameters of `scaling`."""

    alpha: float = Field(-1.0, description="the factor")


class Scaling(Attack[ScalingParams]):
    """Multiplies the signal."""

    name = "scaling"
    goal = "turn the signal around, or blow it up"
    formula = "alpha * x"
    source = "SENTINEL, arXiv 2603.03592, section 2.1"
    Params = ScalingParams

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the scaled signal."""
        return x * self.params.alpha


class SignFlipParams(RateParams):
    """Parameters of `sign-flip`."""

    rate: float = Field(1.0, gt=0, le=1, description="share of the steps; 0.7 in Lu et al.")


class SignFlip(Rated[SignFlipParams]):
    """Negates the signal in a share of the steps."""

    name = "sign-flip"
    goal = "turn the signal around now and then"
    formula = "-x with probability rate per step, else x"
    source = "Lu et al., ICML 2024"
    Params = SignFlipParams

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the negated signal, or the honest one."""
        return -x if self.acts(ctx) else x


class RandomSignParams(Frozen):
    """Parameters of `random-sign`."""

    p: float = Field(0.1, gt=0, le=1, description="probability of each element; tables: .01 .1 .3")


class RandomSign(Attack[RandomSignParams]):
    """Negates each element with a probability."""

    name = "random-sign"
    goal = "small damage that keeps every norm exactly"
    formula = "x_i * s_i, s_i = -1 with probability p, else 1"
    source = "SENTINEL, arXiv 2603.03592, section 2.1"
    Params = RandomSignParams

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the signal with some signs turned."""
        # drawn in float32: bfloat16 has too few values below a small p to hit it
        return x.where(ctx.uniform(x.float()) >= self.params.p, -x)
