"""Attacks of the Byzantine-ML literature, on signals: they hide among the honest replicas.

Made for gradients that a server averages, where every worker answers the same question. The
replicas of a stage have different data, so here each attacker moves its own signal `x` by what it
sees of the others; only gradients of `ipm` and what `mimic` sends are the same for all attackers.

The formulas are functions of `x` of any shape and `honest` `[n, *shape of x]`, n >= 1: the attacks
on weight gradients (`updates.py`) share them. Without an honest replica every attack is honest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from sentinel_bench.api import Attack, AttackContext, Knowledge
from sentinel_bench.config import Frozen

if TYPE_CHECKING:
    from torch import Tensor

IPM = "Xie et al., Fall of Empires, UAI 2019 (arXiv 1903.03936)"
ALIE = "Baruch et al., A Little Is Enough, NeurIPS 2019 (arXiv 1902.06156)"
MIN = "Shejwalkar and Houmansadr, Manipulating the Byzantine, NDSS 2021"
MIMIC = "Karimireddy et al., ICLR 2022 (arXiv 2006.09365)"

HONEST = frozenset({Knowledge.HONEST})
Way = Literal["mean", "sign", "std"]


# --- formulas -------------------------------------------------------------------------------------


def steer(x: Tensor, honest: Tensor, formula: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return `formula(x, honest)`, worked out in float32, finite in the dtype of `x`.

    Every formula here scales with its arguments. So it is given numbers below 2, and the result is
    scaled back: no square overflows or vanishes. Returns `x` itself if there is no honest replica.
    """
    import torch

    if len(honest) == 0:
        return x
    mine, others = x.float(), honest.float()
    largest = mine.abs().max().maximum(others.abs().max())
    # a power of two: no digit changes, and what a formula leaves alone comes back bit for bit
    scale = torch.where(largest > 0, largest / (2 * largest.frexp()[0]), 1.0)
    return fit(formula(mine / scale, others / scale) * scale, x)


def fit(sent: Tensor, like: Tensor) -> Tensor:
    """Return `sent` in the dtype of `like`, cut off at the largest number of that dtype."""
    import torch

    limit = torch.finfo(like.dtype).max
    return sent.clamp(-limit, limit).to(like.dtype)


def reflect(x: Tensor, honest: Tensor, eps: float) -> Tensor:
    """Return `x` with its component along the mean of `honest` replaced by -eps times itself."""
    mean = honest.mean(0)
    size = mean.square().sum()
    along = ((x * mean).sum() / size).where(size > 0, 0.0)
    return x - (1 + eps) * along * mean


def oppose(honest: Tensor, eps: float) -> Tensor:
    """Return -eps times the mean of `honest`: a negative inner product with it."""
    return -eps * honest.mean(0)


def shift_by_std(x: Tensor, honest: Tensor, z: float) -> Tensor:
    """Return `x` less `z` population standard deviations of `honest`, element by element."""
    return x - z * honest.std(0, correction=0)


def perturbation(honest: Tensor, d: Way) -> Tensor:
    """Return the direction called `d`: against the mean of `honest`, its signs, or their std.

    The mean is brought to length 1; a mean of zero stays zero. The std is that of the population.
    """
    if d == "std":
        return -honest.std(0, correction=0)
    mean = honest.mean(0)
    if d == "sign":
        return -mean.sign()
    norm = mean.square().sum().sqrt()
    return (-mean / norm).where(norm > 0, 0.0)


def largest_gamma(
    x: Tensor, honest: Tensor, direction: Tensor, *, summed: bool, counted: bool
) -> Tensor:
    """Return how far `x` can go along `direction` without standing out: a scalar, 0 at least.

    That is the largest gamma for which the largest (`summed`: the sum) of the squared distances
    from `x + gamma * direction` to `honest` is no more than the largest squared distance between
    two of the crowd (`summed`: the largest sum of those from one to all others). The crowd is
    `honest`, and `x` too if it is `counted`; if not, `x` has to be the mean of `honest`.

    With a = x - h the squared distance to one h is `D gamma^2 + 2 b gamma + a.a`, D = d.d, b = a.d:
    the bound is met at a root of a quadratic. Of a direction of zeros gamma is 0.
    """
    import torch

    points = torch.cat([honest, x[None]]).flatten(1)
    # differences first: with squares and products a common offset would cost the digits
    distances = torch.stack([(points - p).square().sum(1) for p in points])
    crowd = distances if counted else distances[:-1, :-1]
    flat = direction.flatten()
    b = ((points[-1] - points[:-1]) * flat).sum(1)
    if summed:  # the quadratics of all h added up, over n
        b = b.mean()
        c = (distances.sum(1)[-1] - crowd.sum(1).max()) / len(honest)
    else:
        c = distances[-1, :-1] - crowd.max()
    size = flat.square().sum()
    # gamma = 0 is within the bound: c > 0 is rounding. So no root is negative.
    roots = (b.square() - size * c.clamp(max=0)).sqrt() - b
    return (roots.min() / size).where(size > 0, 0.0)


def push(x: Tensor, honest: Tensor, d: Way, *, summed: bool, counted: bool) -> Tensor:
    """Return `x` moved in the direction called `d` by the largest gamma (see `largest_gamma`)."""
    direction = perturbation(honest, d)
    return x + largest_gamma(x, honest, direction, summed=summed, counted=counted) * direction


# --- attacks --------------------------------------------------------------------------------------


class IpmParams(Frozen):
    """Parameters of `ipm` and `update-ipm`."""

    eps: float = Field(0.5, gt=0, description="length of what is sent against the honest mean")


class Ipm(Attack[IpmParams]):
    """Inner product manipulation: what is sent points against the mean of the honest replicas."""

    name = "ipm"
    goal = "turn the honest mean around, small enough to pass as an outlier"
    formula = "h - (1 + eps) proj(h on m); -eps m for gradients; m = mean of the honest replicas"
    source = IPM + "; for activations here"
    knowledge = HONEST
    Params = IpmParams

    def activation(self, h: Tensor, ctx: AttackContext) -> Tensor:
        """Return the activation with what it shares with the others turned around."""
        return steer(h, ctx.honest, lambda x, honest: reflect(x, honest, self.params.eps))

    def gradient(self, g: Tensor, ctx: AttackContext) -> Tensor:
        """Return the negative mean, the same for all attackers of the stage."""
        return steer(g, ctx.honest, lambda _, honest: oppose(honest, self.params.eps))


class AlieParams(Frozen):
    """Parameters of `alie` and `update-alie`."""

    z: float = Field(
        1.5,
        gt=0,
        description="standard deviations; the published rule gives 0 at 8 replicas, 2 attackers",
    )


class Alie(Attack[AlieParams]):
    """A little is enough: a shift that hides in the spread of the honest replicas."""

    name = "alie"
    goal = "the same small shift from all attackers, within the spread of honest signals"
    formula = "x - z * std over the honest replicas, per element (population std)"
    source = ALIE + "; around the own signal instead of the mean"
    knowledge = HONEST
    Params = AlieParams

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the shifted signal."""
        return steer(x, ctx.honest, lambda x, honest: shift_by_std(x, honest, self.params.z))


class MinParams(Frozen):
    """Parameters of `min-max`, `min-sum` and of the same on updates."""

    d: Way = Field("std", description="direction: against the honest mean, its signs, or the std")


class MinMax(Attack[MinParams]):
    """The furthest that is no further from any honest signal than two signals are apart."""

    name = "min-max"
    goal = "the largest perturbation that no distance between replicas gives away"
    formula = (
        "x + gamma d; largest gamma: max |sent - h_i|^2 <= max |p - q|^2, "
        "h_i honest, p and q among h_i and x"
    )
    source = MIN + "; around the own signal instead of the mean"
    knowledge = HONEST
    Params = MinParams
    summed: ClassVar[bool] = False

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the perturbed signal; unchanged if `x` is at its bound already."""

        def formula(x: Tensor, honest: Tensor) -> Tensor:
            return push(x, honest, self.params.d, summed=self.summed, counted=True)

        return steer(x, ctx.honest, formula)


class MinSum(MinMax):
    """The furthest whose distances to the honest signals add up to no more than another's."""

    name = "min-sum"
    goal = "the largest perturbation that no sum of distances between replicas gives away"
    formula = (
        "x + gamma d; largest gamma: sum_i |sent - h_i|^2 <= max_p sum_q |p - q|^2, "
        "h_i honest, p and q among h_i and x"
    )
    summed = True


class MimicParams(Frozen):
    """Parameters of `mimic` and `update-mimic`."""

    of: int = Field(0, ge=0, description="which honest replica, modulo their number")


class Mimic(Attack[MimicParams]):
    """Sends what one honest replica sends, as all attackers of the stage do."""

    name = "mimic"
    goal = "give one replica the weight of many: no signal is odd, but the data are less diverse"
    formula = "h_j of one honest replica j"
    source = MIMIC + "; the replica is chosen by number"
    knowledge = HONEST
    Params = MimicParams

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return a copy of the other's signal."""
        return pick(x, ctx.honest, self.params.of)


def pick(x: Tensor, honest: Tensor, of: int) -> Tensor:
    """Return a copy of one of `honest`, by its number modulo theirs; `x` if there is none."""
    return honest[of % len(honest)].clone() if len(honest) else x
