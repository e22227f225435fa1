"""Attacks that use what the worker received: a stage adds a small update to it.

`x` is the honest signal and `r` what was received in the same direction, both `[batch, tokens,
hidden]`. Where nothing was received, at the ends of the pipeline, all of these are honest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from sentinel_bench.api import Attack, AttackContext, NoParams
from sentinel_bench.config import Frozen

if TYPE_CHECKING:
    from torch import Tensor

TINY = 1e-37
"""About the smallest normal float32."""


def along(x: Tensor, r: Tensor) -> Tensor:
    """Return the component of each token of `x` along that of `r`, float32; 0 where `r` is 0."""
    # scaled first, so that squares neither vanish nor overflow
    r = r / r.abs().amax(-1, keepdim=True).clamp_min(TINY)
    size = r.square().sum(-1, keepdim=True)  # at least 1, or 0
    return (x * r).sum(-1, keepdim=True) / size.clamp_min(1) * r


class Identity(Attack[NoParams]):
    """Sends what it received."""

    name = "identity"
    goal = "be paid and compute nothing: in a residual network the input is close to the output"
    formula = "r"
    source = "sentinel-bench (free rider)"

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return what was received."""
        return x if ctx.received is None else ctx.received


class UpdateFlipParams(Frozen):
    """Parameters of `update-flip`."""

    gain: float = Field(1.0, gt=0, description="factor on the update")


class UpdateFlip(Attack[UpdateFlipParams]):
    """Takes the stage's update away instead of adding it."""

    name = "update-flip"
    goal = "undo the work of a stage, with a signal that is close to what it received"
    formula = "r - gain * (x - r)"
    source = "sentinel-bench"
    Params = UpdateFlipParams

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return what was received, less the update."""
        if ctx.received is None:
            return x
        full, r = x.float(), ctx.received.float()
        return (r - self.params.gain * (full - r)).to(x.dtype)


class Mirror(Attack[NoParams]):
    """Reflects each token at what was received for it.

    Made against a detector that compares each signal with what the same worker received: norm and
    angle to it stay exactly those of the honest signal. A token for which zeros were received is
    negated.
    """

    name = "mirror"
    goal = "turn all that a stage computed beside its input around, and keep norm and angle to it"
    formula = "a r - w, where x = a r + w, w orthogonal to r, per token"
    source = "sentinel-bench (white box against coherence)"
    adaptive = True

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the mirror image."""
        if ctx.received is None:
            return x
        full, r = x.float(), ctx.received.float()
        return (2 * along(full, r) - full).to(x.dtype)


class MirrorSurrogateParams(Frozen):
    """Parameters of `mirror-surrogate`."""

    ridge: float = Field(
        1e-3, ge=1e-6, description="of the regression, in units of its mean diagonal"
    )
    forgetting: float = Field(0.98, gt=0, le=1, description="weight of a step one step later")


class MirrorSurrogate(Attack[MirrorSurrogateParams]):
    """Reflects each token at the plane of what was received and what a linear map predicts.

    Made against a detector that predicts the relative change `(x - r) / norm(r)` from what the
    worker received: norms, the angle to `r` and the component along the prediction stay. The
    prediction is the attacker's own, fitted on its own honest traffic up to the current step. With
    few tokens so far it fits all there is, and the attack hardly changes anything.
    """

    name = "mirror-surrogate"
    goal = "turn around what neither the input nor a linear prediction of the update explains"
    formula = "a r + b p - w, where x = a r + b p + w, p the prediction less its part along r"
    source = "sentinel-bench (white box against surrogate)"
    Params = MirrorSurrogateParams
    adaptive = True

    def __init__(self, params: MirrorSurrogateParams) -> None:
        super().__init__(params)
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the mirror image."""
        if ctx.received is None:
            return x
        full, r = x.float(), ctx.received.float()
        predicted = self._predict(full, r, ctx.direction)
        straight = along(full, r)
        aside = along(full - straight, predicted - along(predicted, r))
        return (2 * (straight + aside) - full).to(x.dtype)

    def _predict(self, x: Tensor, r: Tensor, direction: str) -> Tensor:
        """Take `x` and `r` in, and return the relative change predicted for them, same shape.

        A ridge regression without intercept from `r / norm(r)` per token to `(x - r) / norm(r)`;
        tokens for which zeros were received do not count. As the ridge is relative, it is the same
        for inputs in units of their rms.
        """
        import torch

        norm: Tensor = torch.linalg.vector_norm(r, dim=-1, keepdim=True)
        scale = torch.where(norm > 0, 1 / norm, 0.0)
        hidden = x.shape[-1]
        inputs = (r * scale).flatten(0, 1)
        changes = ((x - r) * scale).flatten(0, 1)
        gram, cross = inputs.T @ inputs, inputs.T @ changes
        if direction in self._sums:
            past_gram, past_cross = self._sums[direction]
            gram = gram + self.params.forgetting * past_gram
            cross = cross + self.params.forgetting * past_cross
        self._sums[direction] = gram, cross
        ridge = (self.params.ridge * gram.diagonal().mean()).clamp_min(TINY)
        weights: Tensor = torch.linalg.solve(gram + ridge * torch.eye(hidden).to(gram), cross)
        return (inputs @ weights).view(x.shape)
