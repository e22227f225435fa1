"""Attacks that leave the honest signal so slowly that a moving average may follow them."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sentinel_bench.api import Attack, AttackContext
from sentinel_bench.attacks.noise import FixedVector, rms
from sentinel_bench.config import Frozen

if TYPE_CHECKING:
    from torch import Tensor


class SlowDriftParams(Frozen):
    """Parameters of `slow-drift`."""

    ramp: int = Field(1000, ge=1, description="steps until the full strength")
    sigma: float = Field(1.0, gt=0, description="full strength, in units of the signal's rms")


class SlowDrift(Attack[SlowDriftParams]):
    """Adds one fixed direction, a little more in each step."""

    name = "slow-drift"
    goal = "grow so slowly that what a detector learns drifts along"
    formula = "x + min(1, t / ramp) * sigma * rms(x) * u, rms(u) = 1, t = 1 in the first step"
    source = "sentinel-bench"
    Params = SlowDriftParams

    def __init__(self, params: SlowDriftParams) -> None:
        super().__init__(params)
        self._fixed = FixedVector()

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the signal with the drift so far."""
        full = x.float()
        share = min(1.0, (ctx.age + 1) / self.params.ramp)
        drift = share * self.params.sigma * rms(full) * self._fixed.get(full, ctx)
        return (full + drift).to(x.dtype)


class Decays(Frozen):
    """Decay of a moving average, for each direction."""

    activation: float = Field(0.9, gt=0, lt=1)
    gradient: float = Field(0.8, gt=0, lt=1)


class EmaDriftParams(Frozen):
    """Parameters of `ema-drift`."""

    beta: Decays = Field(Decays(), description="decay of the detector's average; sets its age too")
    a: float = Field(1.0, ge=0, description="size of a step to the target, in units of the signal")
    sigma: float = Field(0.1, ge=0, description="noise, in units of the signal's rms")
    target: Literal["negated", "zeros", "random"] = Field(
        "negated", description="-x, 0, or one fixed vector of the signal's rms"
    )
    norm: Literal["l2", "rms"] = Field("l2", description="norm of the whole average")


class EmaDrift(Attack[EmaDriftParams]):
    """Moves an old average of what it sent towards a target, and sends that.

    `m'` is the attacker's own moving average of what it sent, as it was `d` steps ago: by then a
    step weighs a tenth, `beta^d <= .1` (22 steps at .9, 11 at .8). The average starts from its own
    honest signals; the attacker is honest until it has one that is old enough.
    """

    name = "ema-drift"
    goal = "stay close to the detector's moving average, and lead it away"
    formula = "m' + a (target - m') / norm(m') + sigma * rms(x) * e, m' = m_{t-d}"
    source = "SENTINEL, arXiv 2603.03592, Table 8 (a, target, norm and sigma are not printed)"
    Params = EmaDriftParams
    adaptive = True

    def __init__(self, params: EmaDriftParams) -> None:
        super().__init__(params)
        self._averages: dict[str, SentAverage] = {}
        self._fixed = FixedVector()

    def delay(self, direction: str) -> int:
        """Return `d`, the age of the average in a direction, in steps."""
        return math.ceil(math.log(0.1) / math.log(self._beta(direction)))

    def memory(self) -> int:
        """Return what starts an average that is old enough and no longer dwells on its first."""
        return 2 * max(self.delay("activation"), self.delay("gradient"))

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return the old average on its way to the target, or the honest signal."""
        direction = ctx.direction
        if direction not in self._averages:
            self._averages[direction] = SentAverage(self._beta(direction), self.delay(direction))
        average = self._averages[direction]
        average.catch_up(ctx)
        sent = x if average.oldest is None else self._lead(average.oldest, x, ctx)
        average.take(sent, ctx.step)
        return sent

    def _beta(self, direction: str) -> float:
        beta = self.params.beta
        return beta.gradient if direction == "gradient" else beta.activation

    def _lead(self, average: Tensor, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return one step from the average to the target; without step if the average is 0."""
        full = x.float()
        size = rms(average) if self.params.norm == "rms" else average.norm()
        step = (self._target(full, ctx) - average) / size.where(size > 0, math.inf)
        noise = self.params.sigma * rms(full) * ctx.normal(full)
        return (average + self.params.a * step + noise).to(x.dtype)

    def _target(self, x: Tensor, ctx: AttackContext) -> Tensor:
        if self.params.target == "random":
            return rms(x) * self._fixed.get(x, ctx)
        return -x if self.params.target == "negated" else x.new_zeros(x.shape)


class SentAverage:
    """Moving averages of what a worker sent in one direction, as they were in the last steps.

    Args:
        beta: decay, `m = beta m + (1 - beta) sent`; starts at the first signal.
        delay: how many steps back they are kept.
    """

    def __init__(self, beta: float, delay: int) -> None:
        self._beta = beta
        self._delay = delay
        self._past: deque[Tensor] = deque(maxlen=delay)
        self._step: int | None = None

    @property
    def oldest(self) -> Tensor | None:
        """The average that is `delay` steps old, float32; None while there is none so old."""
        return self._past[0] if len(self._past) == self._delay else None

    def catch_up(self, ctx: AttackContext) -> None:
        """Take in what was sent, honestly, in steps that the attack was not asked."""
        known = len(ctx.history)
        missed = known if self._step is None else ctx.step - self._step - 1
        if missed > known:  # all that is known is honest: start again from there
            self._past.clear()
            missed = known
        for honest in ctx.history[known - missed :]:
            self._append(honest)

    def take(self, sent: Tensor, step: int) -> None:
        """Take in what is sent in `step`."""
        self._append(sent)
        self._step = step

    def _append(self, sent: Tensor) -> None:
        last = self._past[-1] if self._past else sent.float()
        self._past.append(self._beta * last + (1 - self._beta) * sent.float())
