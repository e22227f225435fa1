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
