"""Constants in place of the signal (SENTINEL, arXiv 2603.03592, section 2.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from sentinel_bench.api import Attack, AttackContext, NoParams
from sentinel_bench.config import Frozen

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = "SENTINEL, arXiv 2603.03592, section 2.1"


class Zeros(Attack[NoParams]):
    """Sends nothing but zeros."""

    name = "zeros"
    goal = "send nothing: the simplest free rider, and the heaviest blow to the model"
    formula = "0"
    source = SOURCE

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return zeros."""
        return x.new_zeros(x.shape)


class OnesParams(Frozen):
    """Parameters of `ones`."""

    value: float = Field(1.0, description="the constant; the paper's text also says -1")


class Ones(Attack[OnesParams]):
    """Sends one value everywhere."""

    name = "ones"
    goal = "send a constant"
    formula = "value everywhere"
    source = SOURCE
    Params = OnesParams

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the constant."""
        return x.new_full(x.shape, self.params.value)
