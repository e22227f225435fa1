"""Attacks that send old signals again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from sentinel_bench.api import Attack, AttackContext
from sentinel_bench.config import Frozen

if TYPE_CHECKING:
    from torch import Tensor


class DelayParams(Frozen):
    """Parameters of `delay`."""

    steps: int = Field(100, ge=1, description="age of what is sent; also 1, 5, 20")


class Delay(Attack[DelayParams]):
    """Replays its own honest signal of some steps ago."""

    name = "delay"
    goal = "save the work: send what was right some steps ago, for other data"
    formula = "x_{t - steps}; honest until that much history exists"
    source = "SENTINEL, arXiv 2603.03592, section 2.1"
    Params = DelayParams

    def memory(self) -> int:
        """Return the delay."""
        return self.params.steps

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the old signal, or the honest one while there is none."""
        steps = self.params.steps
        return ctx.history[-steps] if len(ctx.history) >= steps else x


class MeanReplayParams(Frozen):
    """Parameters of `mean-replay`."""

    window: int = Field(100, ge=1, description="steps that the mean is over")


class MeanReplay(Attack[MeanReplayParams]):
    """Sends the mean of its own past honest signals."""

    name = "mean-replay"
    goal = "save the work: send what a moving average of the signals expects"
    formula = "mean of x_{t - window} ... x_{t - 1}, as many as exist; honest while there is none"
    source = "sentinel-bench"
    Params = MeanReplayParams

    def __init__(self, params: MeanReplayParams) -> None:
        super().__init__(params)
        self._totals: dict[str, tuple[int, Tensor]] = {}

    def memory(self) -> int:
        """Return the window and one more, which leaves the sum."""
        return self.params.window + 1

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the mean, or the honest signal while there is no other."""
        if not ctx.history:
            return x
        step, total = self._totals.get(ctx.direction, (None, x))
        total = self._move(total, ctx) if step == ctx.step - 1 else self._sum(ctx)
        self._totals[ctx.direction] = (ctx.step, total)
        return (total / min(len(ctx.history), self.params.window)).to(x.dtype)

    def _move(self, total: Tensor, ctx: AttackContext) -> Tensor:
        """Return the sum of the step before with the newest signal, and without the oldest."""
        total = total + ctx.history[-1]
        if len(ctx.history) > self.params.window:
            total -= ctx.history[-self.params.window - 1]
        return total

    def _sum(self, ctx: AttackContext) -> Tensor:
        """Return the sum over the window, in float64: it does not drift as it moves."""
        first, *others = ctx.history[-self.params.window :]
        total = first.double()
        for past in others:
            total = total + past
        return total
