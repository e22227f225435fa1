"""Attacks that send honest signals at the wrong place: of another sample, or another token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from sentinel_bench.api import Attack, AttackContext, NoParams
from sentinel_bench.config import Frozen

if TYPE_CHECKING:
    from torch import Tensor


def step_before(x: Tensor, ctx: AttackContext) -> Tensor:
    """Return the worker's own honest signal of the step before; `x` if there is none."""
    return ctx.history[-1] if ctx.history else x


class Swap(Attack[NoParams]):
    """Sends for each sample the honest signal of another sample of the same batch."""

    name = "swap"
    goal = "keep all statistics over a batch exactly, and be wrong for every sample"
    formula = "x[s(i)] for sample i, s a fresh random cycle; a batch of one: x_{t-1}"
    source = "sentinel-bench"

    def memory(self) -> int:
        """Return the one step that a batch of one needs."""
        return 1

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the samples in another order: each takes the place of the next on the cycle."""
        import torch

        if len(x) == 1:
            return step_before(x, ctx)
        device = ctx.generator.device
        cycle = torch.randperm(len(x), generator=ctx.generator, device=device).to(x.device)
        return x.new_empty(x.shape).index_copy_(0, cycle, x[cycle.roll(1)])


class TokenShiftParams(Frozen):
    """Parameters of `token-shift`."""

    by: int = Field(1, ge=1, description="tokens; the last ones come first")


class TokenShift(Attack[TokenShiftParams]):
    """Sends for each token the honest signal of an earlier token."""

    name = "token-shift"
    goal = "keep all statistics over tokens exactly, and be wrong for every token"
    formula = "x_{i - by} for token i, cyclic; where that is x itself: x_{t-1}"
    source = "sentinel-bench"
    Params = TokenShiftParams

    def memory(self) -> int:
        """Return the one step that a signal of one token needs."""
        return 1

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the tokens shifted."""
        by = self.params.by
        return x.roll(by, 1) if by % x.shape[1] else step_before(x, ctx)
