"""Attacks that take another one: when it acts, how much of it is sent, and who draws which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import (
    OWN,
    Attack,
    AttackContext,
    Judgement,
    Knowledge,
    NoParams,
)
from sentinel_bench.attacks.wrap import PUBLISHED, MixedParams
from sentinel_bench.config import Component, Scenario
from sentinel_bench.errors import ConfigError, KnowledgeError
from sentinel_bench.pipeline.tamper import History, Tamperer
from sentinel_bench.threat import place

INF = float("inf")
Create = Callable[[str], Attack[Any]]
Context = Callable[..., AttackContext]


class Shout(Attack[NoParams]):
    """Of another package: adds one, counts how often it is asked, and knows the honest."""

    name = "shout"
    goal = formula = source = "test"
    knowledge = frozenset({Knowledge.HONEST})

    def __init__(self, params: NoParams) -> None:
        super().__init__(params)
        self.asked: list[int] = []

    def memory(self) -> int:
        return 3

    def activation(self, h: Tensor, ctx: AttackContext) -> Tensor:
        self.asked.append(ctx.step)
        return h + 1

    def gradient(self, g: Tensor, ctx: AttackContext) -> Tensor:
        return g - 1


class Linear:
    """A detector with a fence around the mean of the signal; it counts the questions."""

    def __init__(self, low: float, high: float, *, flags_at: float = INF) -> None:
        self.low, self.high, self.flags_at = low, high, flags_at
        self.asked: list[float] = []

    def judge(self, x: Tensor) -> Judgement:
        value = float(x.mean())
        self.asked.append(value)
        outside = not self.low < value < self.high or abs(value) >= self.flags_at
        return Judgement(outside, {"mean": (value, self.low, self.high)})


class Silent:
    """A detector that offers nothing."""

    def judge(self, x: Tensor) -> Judgement | None:
        return None


@pytest.fixture
def ride(create: Create, context: Context, x: Tensor) -> Callable[..., Tensor]:
    """Send `x` less its mean by a rider on the ones, before a detector."""

    def run(detector: Any, options: str = "", inner: str = "ones") -> Tensor:
        attack = create(f"fence-rider:attack={inner}{options}")
        granted = {Knowledge.DETECTOR: lambda: detector}
        return attack.send(torch.zeros_like(x), context(granted=granted))

    return run


# --- on-off ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "awake"),
    [
        ("on-off:burst=2,period=5", [0, 1, 5, 6, 10, 11]),
        ("on-off:burst=1,period=2", [0, 2, 4, 6, 8, 10]),
        ("on-off:burst=9,period=9", [*range(12)]),
        ("on-off", [0, 1, 2, 3]),
    ],
)
def test_on_off_is_awake_in_the_first_steps_of_each_period_of_its_attackers_age(
    create: Create, context: Context, x: Tensor, text: str, awake: list[int]
) -> None:
    for start in (0, 7):  # the attacker's first step, not the run's, is the first of a period
        attack = create(text)
        sent = [attack.send(x, context(step=start + age, age=age)) for age in range(12)]
        assert [age for age, y in enumerate(sent) if y is not x] == awake
        assert all(not sent[age].any() for age in awake)


def test_on_off_keeps_no_more_violations_than_are_forgiven(
    create: Create, context: Context, x: Tensor
) -> None:
    """The published rule forgives one after 100 clean steps: a burst of 4 stays below 5."""
    params = registry.attacks.params(Component(name="on-off"))
    policy = registry.defenses.params(Component(name="sentinel"))
    assert params.burst < policy.violations
    assert params.period - params.burst >= policy.forgive_after


def test_asleep_it_does_not_ask_the_attack_inside(
    create: Create, context: Context, plug: Callable[..., None], x: Tensor
) -> None:
    plug(Shout)
    attack = create("on-off:attack=shout,burst=2,period=4")
    for step in range(8):
        attack.send(x, context(step=step, age=step))
    assert attack.inner.asked == [0, 1, 4, 5]


@pytest.mark.parametrize("direction", ["activation", "gradient"])
def test_the_attack_inside_acts_in_the_direction_of_the_signal(
    create: Create, context: Context, plug: Callable[..., None], x: Tensor, direction: str
) -> None:
    plug(Shout)
    sign = 1 if direction == "activation" else -1
    granted = {Knowledge.DETECTOR: Silent}
    for name in ("on-off", "fence-rider"):
        sent = create(f"{name}:attack=shout").send(x, context(direction=direction, granted=granted))
        torch.testing.assert_close(sent, x + sign)


@pytest.mark.parametrize(
    ("name", "own"), [("on-off", OWN), ("fence-rider", {Knowledge.OWN, Knowledge.DETECTOR})]
)
def test_a_wrapper_needs_what_the_attack_inside_needs_and_its_own(
    create: Create, plug: Callable[..., None], name: str, own: frozenset[Knowledge]
) -> None:
    plug(Shout)
    assert create(name).needs() == own
    wrapped = create(f"{name}:attack=shout")
    assert wrapped.needs() == own | {Knowledge.HONEST}
    assert wrapped.memory() == 3
    assert create(f"{name}:attack='delay:steps=20'").memory() == 20
    twice = create(f"on-off:attack='{name}:attack=shout'")
    assert (twice.needs(), twice.memory()) == (own | {Knowledge.HONEST}, 3)


def test_inside_of_a_rider_nobody_asks_the_detector(
    create: Create, context: Context, x: Tensor
) -> None:
    """The context of the attack inside holds what that one declares, not what its wrapper does."""
    attack = create("fence-rider")
    inner = context(granted={k: lambda: 1 for k in Knowledge}).narrow(attack.inner)
    assert inner.name == "bias"
    assert set(inner.granted) <= OWN
    with pytest.raises(KnowledgeError, match="attack bias asks for 'detector'"):
        _ = inner.detector


# --- fence-rider ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", [0.3, 1.0, 3.9])
@pytest.mark.parametrize("margin", [0.5, 0.98, 1.0])
@pytest.mark.parametrize("bisections", [1, 6, 12, 20])
def test_the_strength_is_margin_times_the_fence_to_so_many_bisections(
    ride: Callable[..., Tensor], fence: float, margin: float, bisections: int
) -> None:
    detector = Linear(-fence, fence)
    options = f",margin={margin},bisections={bisections}"
    strength = ride(detector, options)
    assert strength.unique().numel() == 1
    step = 4.0 * 2.0**-bisections
    # where even one bisection is too coarse, the honest signal is sent
    assert margin * fence - step - 1e-6 <= float(strength.max()) <= margin * fence + 1e-6
    assert float(strength.max()) < fence
    assert len(detector.asked) == bisections + 2


@pytest.mark.parametrize(
    ("low", "high", "best"), [(-1.0, 3.0, 2.96), (0.0, 1.0, 0.99), (-5.0, 0.5, 0.445)]
)
def test_the_margin_is_taken_from_both_sides_of_a_fence_that_is_not_around_zero(
    ride: Callable[..., Tensor], low: float, high: float, best: float
) -> None:
    # |s - middle| <= .98 half; a fence from 0 to 1 starts outside of the margin, and leads into it
    detector = Linear(low, high)
    strength = float(ride(detector).max())
    assert strength == pytest.approx(best, abs=4 * 2**-12)


def test_at_most_the_limit_is_sent(ride: Callable[..., Tensor]) -> None:
    assert float(ride(Linear(-99, 99), ",limit=2.5").max()) == 2.5
    assert float(ride(Linear(-INF, INF)).max()) == 4.0


def test_where_nothing_passes_the_honest_signal_itself_is_sent(
    create: Create, context: Context, x: Tensor
) -> None:
    attack = create("fence-rider:attack=ones")
    granted = {Knowledge.DETECTOR: lambda: Linear(7.0, 8.0)}
    assert attack.send(x, context(granted=granted)) is x


def test_a_flag_counts_beside_the_fences(ride: Callable[..., Tensor]) -> None:
    strength = float(ride(Linear(-3, 3, flags_at=0.7)).max())
    assert strength == pytest.approx(0.7, abs=4 * 2**-12)
    assert strength < 0.7
    one_sided = float(ride(Linear(-INF, 0.7)).max())
    assert one_sided == pytest.approx(0.7, abs=4 * 2**-12)
    assert one_sided < 0.7


def test_all_statistics_hold_at_once(ride: Callable[..., Tensor]) -> None:
    class Two(Linear):
        def judge(self, x: Tensor) -> Judgement:
            value = float(x.mean())
            return Judgement(
                False, {"a": (value, -2, 2), "open": (value, -INF, INF), "b": (-value, -1, 1)}
            )

    assert float(ride(Two(0, 0)).max()) == pytest.approx(0.98, abs=4 * 2**-12)


def test_a_statistic_that_is_no_number_does_not_pass(ride: Callable[..., Tensor]) -> None:
    class Broken(Linear):
        def judge(self, x: Tensor) -> Judgement:
            value = float(x.mean())
            return Judgement(False, {"a": (float("nan") if value > 0.5 else value, -2, 2)})

    assert 0.4 < float(ride(Broken(0, 0)).max()) <= 0.5


@pytest.mark.parametrize("inner", ["ones", "zeros", "scaling", "bias"])
def test_where_no_statistics_are_offered_the_plain_perturbation_is_sent(
    create: Create, context: Context, x: Tensor, inner: str
) -> None:
    plain = create(inner).send(x, context())
    granted = {Knowledge.DETECTOR: Silent}
    sent = create(f"fence-rider:attack={inner}").send(x, context(granted=granted))
    torch.testing.assert_close(sent, plain)
    assert sent.shape == x.shape


def test_the_attack_inside_is_asked_once_for_a_signal(
    create: Create, context: Context, plug: Callable[..., None], x: Tensor
) -> None:
    plug(Shout)
    attack = create("fence-rider:attack=shout")
    attack.send(x, context(granted={Knowledge.DETECTOR: lambda: Linear(-1, 1)}))
    assert attack.inner.asked == [0]


def test_a_rider_without_its_tier_is_an_error(create: Create, context: Context, x: Tensor) -> None:
    with pytest.raises(KnowledgeError):
        create("fence-rider").send(x, context())


# --- mixed ----------------------------------------------------------------------------------------


def deal(text: str, n: int = 400, seed: int = 0) -> list[tuple[Component, str]]:
    own, rng = Component.parse(text), np.random.default_rng(seed)
    return [registry.attacks.get(own.name).deal(own, "both", rng) for _ in range(n)]


def test_every_attack_and_mode_of_the_pool_is_drawn_about_as_often_as_another() -> None:
    dealt = deal("mixed", 2400)
    attacks = Counter(c.label() for c, _ in dealt)
    assert set(attacks) == set(PUBLISHED)
    # 200 of 2400 each: 4 sigma = 4 sqrt(2400 / 12 * 11 / 12) = 54
    assert all(abs(n - 200) < 55 for n in attacks.values())
    modes = Counter(mode for _, mode in dealt)
    assert set(modes) == {"activation", "gradient"}
    assert abs(modes["gradient"] - 1200) < 98  # 4 sigma
    pairs = Counter((c.label(), mode) for c, mode in dealt)
    assert len(pairs) == 24


def test_a_pool_and_modes_of_ones_own(plug: Callable[..., None]) -> None:
    plug(Shout)
    text = 'mixed:pool=[shout,"delay:steps=20"],modes=[both]'
    drawn = {(c.name, str(c.params), mode) for c, mode in deal(text, 50)}
    assert drawn == {("shout", "{}", "both"), ("delay", "{'steps': 20}", "both")}


def test_the_published_pool_is_valid_and_printed_as_it_is_read() -> None:
    params = registry.attacks.params(Component(name="mixed"))
    assert isinstance(params, MixedParams)
    assert params.model_dump(mode="json")["pool"] == list(PUBLISHED)
    for component in params.pool:
        registry.attacks.create(component)


def test_attacks_that_do_not_deal_keep_what_was_asked_for() -> None:
    own = Component.parse("delay:steps=3")
    rng = np.random.default_rng(0)
    state = rng.bit_generator.state
    assert registry.attacks.get("delay").deal(own, "both", rng) == (own, "both")
    assert rng.bit_generator.state == state


# --- plugins of others, and what is refused -------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "on-off:attack=shout",
        "fence-rider:attack=shout",
        "mixed:pool=[shout]",
        "on-off:attack='fence-rider:attack=shout'",
    ],
)
def test_a_plugin_of_others_works_inside(plug: Callable[..., None], text: str) -> None:
    plug(Shout)
    scenario = Scenario.model_validate(
        {
            "threat": {"mode": "activation", "schedule": "at-once"},
            "train": {"steps": 9, "warmup_steps": 0},
        }
    )
    crowd = [a for a in place(scenario, Component.parse(text)) if a.stage == 1]
    assert {a.record()["knowledge"] for a in crowd} == (
        {"honest+detector"} if "rider" in text else {"honest"}
    )
    side = Tamperer(crowd, History(), "cpu", lambda stage, replica: False)
    for direction in ("activation", "gradient"):
        sent = side.send(1, direction, 0, torch.zeros(8, 1, 2, 4), None)
        for a in crowd:
            acts = direction == a.mode or a.mode == "both"
            change = 0.0 if not acts else 1.0 if direction == "activation" else -1.0
            assert sent.x[a.replica].unique().tolist() == [change]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("on-off:attack=zeroes", "unknown attack 'zeroes'; did you mean zeros"),
        ("on-off:attack='delay:step=3'", "attack delay: unknown key 'step'; did you mean steps"),
        ("on-off:attack='delay:steps=0'", "attack delay: steps: "),
        ("on-off:attack=':x=1'", "names nothing"),
        ("on-off:attack='delay:steps'", "'steps' is not key=value"),
        ("on-off:attack=label-flip", "label-flip acts on weights: only signals can be wrapped"),
        ("fence-rider:attack=backdoor", "backdoor acts on weights"),
        ("fence-rider:attack='on-off:attack=update-ipm'", "update-ipm acts on weights"),
        ("mixed:pool=[zeros,oness]", "unknown attack 'oness'; did you mean ones"),
        ("mixed:pool=[zeros,'delay:steps=0']", "attack delay: steps: "),
        ("mixed:pool=[]", "attack mixed: pool: "),
        ("mixed:modes=[]", "attack mixed: modes: "),
        ("mixed:modes=[sideways]", "attack mixed: modes.0: "),
        ("on-off:attack=3", "attack on-off: attack: "),
    ],
)
def test_what_cannot_be_wrapped_is_told_before_anything_runs(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        registry.attacks.params(Component.parse(text))
    assert message in str(error.value)


def test_what_is_inside_may_be_given_as_a_mapping() -> None:
    text = "on-off:attack={name: delay, params: {steps: 3}},burst=2"
    params = registry.attacks.params(Component.parse(text))
    assert params == registry.attacks.params(
        Component.parse("on-off:attack='delay:steps=3',burst=2")
    )


@pytest.mark.parametrize(
    "text", ["on-off:attack=mixed", "fence-rider:attack=mixed", "mixed:pool=[zeros,mixed]"]
)
def test_an_attack_that_only_deals_others_is_refused_inside_of_one(text: str) -> None:
    with pytest.raises(ConfigError, match="mixed deals"):
        registry.attacks.params(Component.parse(text))


def test_nobody_is_dealt_a_mode_in_which_its_stage_sends_nothing() -> None:
    scenario = Scenario.model_validate({"threat": {"honest_first": 0, "schedule": "at-once"}})
    for pool in ("[zeros]", "[label-flip]"):
        try:
            crowd = place(scenario, Component.parse(f"mixed:pool={pool},modes=[gradient]"))
        except ConfigError:
            assert pool == "[zeros]"
        else:
            assert "gradient" not in {a.mode for a in crowd if a.stage == 0}


def test_where_no_statistics_are_offered_the_attack_inside_is_sent_to_the_bit(
    create: Create, context: Context
) -> None:
    x = torch.rand(2, 3, 64, generator=torch.Generator().manual_seed(1)) * 1000
    granted = {Knowledge.DETECTOR: Silent}
    sent = create("fence-rider:attack='ones:value=.1'").send(x, context(granted=granted))
    assert torch.equal(sent, torch.full_like(x, 0.1))
