"""Faults: workers that stop or are slow. What they do send is honest; no tensor gives them away."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from sentinel_bench.api import Attack, AttackContext, Late, Message, Silence
from sentinel_bench.config import Frozen

if TYPE_CHECKING:
    from torch import Tensor


class CrashParams(Frozen):
    """Parameters of `crash`."""

    after: int = Field(0, ge=0, description="steps from the attacker's start until it crashes")


class Crash(Attack[CrashParams]):
    """Sends nothing any more from some step on: the worker has crashed."""

    name = "crash"
    goal = "stop in the middle of a run, as machines do"
    formula = "nothing, from step `after` of the attacker on; x before"
    source = "sentinel-bench (simulated fault)"
    Params = CrashParams
    fault = True
    note: ClassVar[str] = (
        "A real crash is silent in both directions: use mode both; in one direction it is the loss "
        "of a link. By default it ends the run, which is then invalid, as it would end a system "
        "that handles no faults. With --on-crash ban the receiver puts zeros in place of the "
        "message and bans the sender at the end of the step. No defense has a part in that: "
        "recall is the same under all of them, none included."
    )

    def signal(self, x: Tensor, ctx: AttackContext) -> Message:
        """Return silence, or the honest signal."""
        return Silence() if ctx.age >= self.params.after else x


class StraggleParams(Frozen):
    """Parameters of `straggle`."""

    seconds: float = Field(0.5, gt=0, le=86_400, description="how late a message comes")
    rate: float = Field(1.0, gt=0, le=1, description="share of its messages that are late")


class Straggle(Attack[StraggleParams]):
    """Sends the honest signal, but late: everybody waits for the slowest."""

    name = "straggle"
    goal = "slow everybody down without a single wrong number"
    formula = "x, `seconds` late, in a share `rate` of its messages"
    source = "sentinel-bench (simulated fault)"
    Params = StraggleParams
    fault = True
    note: ClassVar[str] = (
        "Nobody sleeps: the simulated seconds are added to those of the step, and those of all "
        "boundaries and directions of a step add up. A late worker has acted, so recall counts it, "
        "but no defense here looks at a clock: while its messages come before the deadline nobody "
        "is banned for it, and recall and F1 are 0. What it costs shows in tokens per second; its "
        "harm is 0, the training is that of honest workers. With a --deadline of fewer seconds its "
        "late messages are lost, as those of crash."
    )

    def signal(self, x: Tensor, ctx: AttackContext) -> Message:
        """Return the honest signal, late or not."""
        late = self.params.rate == 1 or ctx.chance(self.params.rate)
        return Late(x, self.params.seconds) if late else x
