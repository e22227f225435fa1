"""Attacks on the weight gradients that a worker contributes to its stage's all-reduce.

The setting of the Byzantine-ML literature: all replicas of a stage estimate one gradient. `grad` is
`[parameters]`, flat; the formulas are those of `byzantine.py`, around the mean of the honest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from sentinel_bench.api import Attack, UpdateContext
from sentinel_bench.attacks import byzantine
from sentinel_bench.attacks.byzantine import (
    HONEST,
    AlieParams,
    IpmParams,
    MimicParams,
    MinParams,
    fit,
    steer,
)
from sentinel_bench.config import Frozen

if TYPE_CHECKING:
    from torch import Tensor


class UpdateSignFlipParams(Frozen):
    """Parameters of `update-sign-flip`."""

    gain: float = Field(1.0, gt=0, description="length of what is contributed, times the honest")


class UpdateSignFlip(Attack[UpdateSignFlipParams]):
    """Contributes its weight gradients with the wrong sign."""

    name = "update-sign-flip"
    goal = "train the stage away from where its data lead"
    formula = "-gain * grad"
    source = "Li et al., RSA, AAAI 2019 (arXiv 1811.03761)"
    axis = "weights"
    Params = UpdateSignFlipParams

    def update(self, grad: Tensor, ctx: UpdateContext) -> Tensor:
        """Return the negated weight gradients."""
        return fit(-self.params.gain * grad.float(), grad)


class UpdateIpm(Attack[IpmParams]):
    """Inner product manipulation: contributes the negative mean of the honest replicas."""

    name = "update-ipm"
    goal = "turn the aggregate around, or shrink it, and pass as a small outlier"
    formula = "-eps * mean of the honest replicas"
    source = byzantine.IPM
    knowledge = HONEST
    axis = "weights"
    Params = IpmParams

    def update(self, grad: Tensor, ctx: UpdateContext) -> Tensor:
        """Return the negative mean, the same for all attackers of the stage."""
        return steer(grad, ctx.honest, lambda _, h: byzantine.oppose(h, self.params.eps))


class UpdateAlie(Attack[AlieParams]):
    """A little is enough: the honest mean, shifted within the spread of the honest replicas."""

    name = "update-alie"
    goal = "the same small shift from all attackers, within the spread of honest gradients"
    formula = "mean - z * std of the honest replicas, per element (population std)"
    source = byzantine.ALIE
    knowledge = HONEST
    axis = "weights"
    Params = AlieParams

    def update(self, grad: Tensor, ctx: UpdateContext) -> Tensor:
        """Return the shifted mean, the same for all attackers of the stage."""
        z = self.params.z
        return steer(grad, ctx.honest, lambda _, h: byzantine.shift_by_std(h.mean(0), h, z))


class UpdateMinMax(Attack[MinParams]):
    """The furthest that is no further from any honest gradient than two of them are apart."""

    name = "update-min-max"
    goal = "the largest perturbation that no distance between replicas gives away"
    formula = (
        "m + gamma d, m = mean of the honest h_i; "
        "largest gamma: max_i |sent - h_i|^2 <= max_ij |h_i - h_j|^2"
    )
    source = byzantine.MIN
    knowledge = HONEST
    axis = "weights"
    Params = MinParams
    summed: ClassVar[bool] = False

    def update(self, grad: Tensor, ctx: UpdateContext) -> Tensor:
        """Return the perturbed mean, the same for all attackers of the stage."""

        def formula(_: Tensor, honest: Tensor) -> Tensor:
            mean, d = honest.mean(0), self.params.d
            return byzantine.push(mean, honest, d, summed=self.summed, counted=False)

        return steer(grad, ctx.honest, formula)


class UpdateMinSum(UpdateMinMax):
    """The furthest whose distances to the honest gradients add up to no more than one of theirs."""

    name = "update-min-sum"
    goal = "the largest perturbation that no sum of distances between replicas gives away"
    formula = (
        "m + gamma d, m = mean of the honest h_i; "
        "largest gamma: sum_i |sent - h_i|^2 <= max_i sum_j |h_i - h_j|^2"
    )
    summed = True


class UpdateMimic(Attack[MimicParams]):
    """Contributes what one honest replica contributes, as all attackers of the stage do."""

    name = "update-mimic"
    goal = "give the data of one replica the weight of many"
    formula = "h_j of one honest replica j"
    source = byzantine.MIMIC + "; the replica is chosen by number"
    knowledge = HONEST
    axis = "weights"
    Params = MimicParams

    def update(self, grad: Tensor, ctx: UpdateContext) -> Tensor:
        """Return a copy of the other's weight gradients."""
        return byzantine.pick(grad, ctx.honest, self.params.of)


class LabelFlipParams(Frozen):
    """Parameters of `label-flip`."""

    shift: int = Field(1, ge=1, description="added to every target token, modulo the vocabulary")


class LabelFlip(Attack[LabelFlipParams]):
    """Contributes the weight gradients of its own stage for wrong labels."""

    name = "label-flip"
    goal = "train the stage on wrong labels, while all that it sends along the pipeline is honest"
    formula = "grad of the loss for targets (y + shift) mod vocabulary"
    source = "Tolpegin et al., ESORICS 2020 (arXiv 2007.08432)"
    axis = "weights"
    whole_model = True
    Params = LabelFlipParams

    def update(self, grad: Tensor, ctx: UpdateContext) -> Tensor:
        """Return the weight gradients for the shifted targets."""
        return ctx.relabel((ctx.targets + self.params.shift) % ctx.vocabulary)
