"""Attacks that take another attack, built-in or a plugin's, and decide when or how much of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from pydantic import Field, model_validator

from sentinel_bench.api import Attack, AttackContext, Judgement, Knowledge, Late, Message, Silence
from sentinel_bench.config import Component, Frozen, Mode, Named

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


def _refuse_dealer(attack: Component) -> None:
    """Refuse an attack that only deals others: there is nobody to deal to inside of another one.

    Raises:
        ValueError: it is one.
    """
    from sentinel_bench import registry

    deal = registry.attacks.get(attack.name).deal.__func__  # type: ignore[attr-defined]
    if deal is not Attack.deal.__func__:  # type: ignore[attr-defined]
        raise ValueError(
            f"{attack.name} deals attacks to attackers: it cannot be inside of another"
        )


class WrapParams(Frozen):
    """Parameters of an attack that takes another one."""

    attack: Named = Field(
        Component(name="zeros"), description="the attack inside: name, or name:key=value in quotes"
    )

    @model_validator(mode="after")
    def _acts_on_signals(self) -> Self:
        from sentinel_bench import registry

        if registry.attacks.get(self.attack.name).axis != "signals":
            raise ValueError(f"{self.attack.name} acts on weights: only signals can be wrapped")
        _refuse_dealer(self.attack)
        return self


W = TypeVar("W", bound=WrapParams)


class Wrapper(Attack[W], Generic[W]):
    """Base of attacks on signals that take another one. It knows what that one knows, and more."""

    Params = WrapParams

    def __init__(self, params: W) -> None:
        from sentinel_bench import registry

        super().__init__(params)
        self.inner: Attack[Any] = registry.attacks.create(params.attack)

    @classmethod
    def wraps(cls, params: W) -> Sequence[Component]:
        """Return the attack inside."""
        return (params.attack,)

    def needs(self) -> frozenset[Knowledge]:
        """Return what the two have to know."""
        return super().needs() | self.inner.needs()

    def memory(self) -> int:
        """Return how much past the attack inside needs."""
        return self.inner.memory()

    def inside(self, x: Tensor, ctx: AttackContext) -> Message:
        """Return what the attack inside sends."""
        return self.inner.send(x, ctx.narrow(self.inner))


class OnOffParams(WrapParams):
    """Parameters of `on-off`."""

    burst: int = Field(4, ge=1, description="steps in a row with an attack")
    period: int = Field(104, ge=2, description="steps from one burst to the next")


class OnOff(Wrapper[OnOffParams]):
    """Attacks in short bursts, with honest steps between them in which violations are forgiven."""

    name = "on-off"
    goal = "stay below the count of violations: be clean for long enough that one is forgiven"
    formula = "attack(x) in the first `burst` of every `period` steps, else x"
    source = "sentinel-bench"
    Params = OnOffParams
    adaptive = True

    def signal(self, x: Tensor, ctx: AttackContext) -> Message:
        """Return what the attack inside sends, or the honest signal."""
        awake = ctx.age % self.params.period < self.params.burst
        return self.inside(x, ctx) if awake else x


class FenceRiderParams(WrapParams):
    """Parameters of `fence-rider`."""

    attack: Named = Field(
        Component(name="bias"), description="the direction: attack(x) - x, of any other attack"
    )
    margin: float = Field(0.98, gt=0, le=1, description="share of each fence that is used")
    bisections: int = Field(12, ge=1, le=40, description="halvings of the strength")
    limit: float = Field(4.0, gt=0, description="largest strength that is tried")


class FenceRider(Wrapper[FenceRiderParams]):
    """Sends the largest perturbation that the running detector would still pass.

    White box: it asks the detector before it sends. Where the detector offers no statistics, or
    there is none, it sends what the attack inside sends; so it does with silence and what is late,
    which have no strength.
    """

    name = "fence-rider"
    goal = "do as much damage as the running detector allows, and never be flagged"
    formula = "x + s (attack(x) - x), largest s <= limit with all statistics in margin * fence"
    source = "sentinel-bench (white box)"
    Params = FenceRiderParams
    knowledge = frozenset({Knowledge.DETECTOR})
    adaptive = True

    def signal(self, x: Tensor, ctx: AttackContext) -> Message:
        """Bisect the strength between a passed one and one that is not."""
        plain = self.inside(x, ctx)
        if isinstance(plain, Silence | Late) or ctx.detector.judge(x) is None:
            return plain
        push, p = plain - x, self.params

        def passes(strength: float) -> bool:
            judgement = ctx.detector.judge(x + strength * push)
            return judgement is not None and _inside(judgement, p.margin)

        low, high = 0.0, p.limit
        if passes(high):
            return x + high * push
        for _ in range(p.bisections):
            middle = (low + high) / 2
            low, high = (middle, high) if passes(middle) else (low, middle)
        return x + low * push if low > 0 else x


def _inside(judgement: Judgement, margin: float) -> bool:
    """Tell whether each statistic lies in the inner `margin` of its fence."""
    if judgement.flagged:
        return False
    for value, low, high in judgement.statistics.values():
        half = (high - low) / 2
        if half < float("inf") and not abs(value - (low + high) / 2) <= margin * half:
            return False
    return True


PUBLISHED = (
    *("zeros", "ones", "random-value", "scaling", "delay", "bias"),
    *("random-sign:p=0.01", "random-sign:p=0.1", "random-sign:p=0.3"),
    *("invisible-noise:p=0.9", "invisible-noise:p=0.95", "invisible-noise:p=0.99"),
)


class MixedParams(Frozen):
    """Parameters of `mixed`."""

    pool: tuple[Named, ...] = Field(
        tuple(map(Component.parse, PUBLISHED)), min_length=1, description="attacks to draw from"
    )
    modes: tuple[Mode, ...] = Field(
        ("activation", "gradient"), min_length=1, description="modes to draw from"
    )

    @model_validator(mode="after")
    def _deals_once(self) -> Self:
        for attack in self.pool:
            _refuse_dealer(attack)
        return self


class Mixed(Attack[MixedParams]):
    """Each attacker draws one attack and one mode, and keeps them for the whole run."""

    name = "mixed"
    goal = "attack in many ways at once: no detector that knows one of them is enough"
    formula = "attack_i(x) in mode_i, drawn once for each attacker i from the pool"
    source = "SENTINEL, arXiv 2603.03592, Table 2 (its pool is not printed)"
    Params = MixedParams

    @classmethod
    def wraps(cls, params: MixedParams) -> Sequence[Component]:
        """Return the pool."""
        return params.pool

    @classmethod
    def deal(cls, own: Component, mode: Mode, rng: np.random.Generator) -> tuple[Component, Mode]:
        """Draw from the pool; the mode of the scenario does not count."""
        params = MixedParams.model_validate(own.params)
        drawn = params.pool[int(rng.integers(len(params.pool)))]
        return drawn, params.modes[int(rng.integers(len(params.modes)))]
