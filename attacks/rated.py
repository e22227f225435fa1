"""What attacks share that act in a share of the steps only."""

from __future__ import annotations

from typing import TypeVar

from pydantic import Field

from sentinel_bench.api import Attack, AttackContext
from sentinel_bench.config import Frozen


class RateParams(Frozen):
    """Parameters of an attack that acts in a share of the steps."""

    rate: float = Field(1.0, gt=0, le=1, description="share of the steps")


R = TypeVar("R", bound=RateParams)


class Rated(Attack[R]):
    """Acts with probability `rate` per step. Base class: call `acts` in `signal`."""

    Params = RateParams

    def __init__(self, params: R) -> None:
        super().__init__(params)
        self._drawn: tuple[tuple[int, int], bool] = ((-1, 0), True)

    def acts(self, ctx: AttackContext) -> bool:
        """Tell whether it acts in this pass: drawn once, for both directions; not at rate 1."""
        now = (ctx.step, ctx.attempt)
        if self.params.rate < 1 and self._drawn[0] != now:
            self._drawn = (now, ctx.chance(self.params.rate))
        return self._drawn[1]
