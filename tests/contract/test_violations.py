"""Every check finds what it is there for, and says what is wrong and what to do."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ConfigDict, Field

from sentinel_bench import registry
from sentinel_bench.api import (
    Aggregator,
    AggregatorParams,
    Attack,
    Defense,
    Knowledge,
    Late,
    NoParams,
    ResponseParams,
    Silence,
    Verdict,
)
from sentinel_bench.config import Frozen
from sentinel_bench.contract import Violation, checks, judge
from sentinel_bench.errors import ConfigError

TEXTS = {"goal": "test", "formula": "test", "source": "test", "__doc__": "Is tested."}
SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def _only_here() -> Iterator[None]:
    """What the checks make known is forgotten."""
    SEEN.clear()
    every = (registry.attacks, registry.defenses, registry.aggregators)
    before = [(reg, set(reg.names())) for reg in every]
    yield
    for reg, names in before:
        for name in set(reg.names()) - names:
            reg.drop(name)


def violation(plugin: type[Any], name: str) -> Violation:
    """Return what a check says of a plugin."""
    (check,) = (c for c in checks(plugin) if c.name == name)
    with pytest.raises(Violation) as error:
        check()
    assert error.value.remedy
    return error.value


def attack(signal: Callable[..., Any] | None = None, **parts: Any) -> type[Attack[Any]]:
    """Make an attack of its parts; by default it doubles."""
    send = signal or (lambda self, x, ctx: 2 * x)
    return type("Broken", (Attack,), {"name": "broken", **TEXTS, "signal": send, **parts})


def of(function: Callable[..., Any]) -> type[Attack[Any]]:
    """Make an attack of a function of the signal and its context."""
    return attack(lambda self, x, ctx: function(x, ctx))


class Required(Frozen):
    depth: int = Field(description="has to be given")


class Bare(Frozen):
    depth: int = 3


class Lax(Frozen):
    model_config = ConfigDict(extra="ignore")
    depth: int = Field(3, description="how deep")


class Hasty(Frozen):
    depth: float = Field(3.0, description="how deep")

    def model_dump(self, **style: Any) -> dict[str, Any]:
        return {"depth": 4.0}


def fail(*_: Any) -> Any:
    raise ValueError("oh no")


def in_place(x: Any, ctx: Any) -> Any:
    return x.mul_(2)


def onto_received(x: Any, ctx: Any) -> Any:
    return 2 * x if ctx.received is None else ctx.received.add_(1) * 2


def once_more(x: Any, ctx: Any) -> Any:
    SEEN.append(x)
    return x * len(SEEN)


def by_the_seed(x: Any, ctx: Any) -> Any:
    return x * ctx.generator.initial_seed()


def for_nothing(x: Any, ctx: Any) -> Any:
    ctx.normal(x)
    return 2 * x


def colluding(x: Any, ctx: Any) -> Any:
    torch.rand(1, generator=ctx.colluders.generator)
    return 2 * x


FORM = "keeps-shape-dtype-and-device-and-stays-finite"
GIVEN = "leaves-its-input-its-past-and-what-it-received-alone"
SEED = "that-draws-sends-something-else-for-another-seed"
LATE = "is-silent-or-late-only-as-a-fault"
GLOBAL = "does-not-touch-the-global-random-numbers"
PARAMETERS = "has-parameters-with-defaults-and-descriptions"
ENDS = "works-at-the-ends-of-the-pipeline-and-without-honest-company"
ATTACKS = [
    (attack(__init__=fail), "can-be-made", "cannot be made: ValueError: oh no"),
    (attack(goal=" "), "says-what-it-is", "its `goal` is ' '"),
    (attack(version=3), "says-what-it-is", "its `version` is 3"),
    (attack(__doc__=None), "says-what-it-is", "no docstring"),
    (attack(knowledge={"honest"}), "says-what-it-is", r"its `knowledge` is \{'honest'\}"),
    (attack(memory=lambda self: 1.5), "says-what-it-is", r"'float' object|`memory` returns 1.5"),
    (attack(Params=Required), PARAMETERS, "depth: Field required"),
    (attack(Params=Bare), PARAMETERS, "parameter depth has no description"),
    (attack(Params=Hasty), PARAMETERS, "are others once they were written"),
    (attack(Params=Lax), "refuses-a-misspelt-parameter", "takes an unknown parameter, 'depthh'"),
    (attack(fault=True), "says-what-it-is", "it is a fault, and its `note` is empty"),
    (of(lambda x, ctx: Silence()), LATE, "says `fault = False`, and some of its messages"),
    (of(lambda x, ctx: Late(x, 1.0)), LATE, "says `fault = False`, and some of its messages"),
    (attack(fault=True), LATE, "says `fault = True`, and none of its messages"),
    (of(lambda x, ctx: Late(x, float("inf"))), FORM, "sends a message inf seconds late"),
    (of(lambda x, ctx: Late(x, -1.0)), FORM, "sends a message -1.0 seconds late"),
    (of(lambda x, ctx: Late(2 * x.float(), 1.0)), FORM, r"torch.float32.*usual, torch.bfloat16"),
    (of(lambda x, ctx: Late(None, 1.0)), FORM, "it sends Late for activation"),
    (of(lambda x, ctx: Late(in_place(x, ctx), 1.0)), GIVEN, "changes its input in place"),
    (of(lambda x, ctx: x), "changes-something", "is the honest signal, five times"),
    (of(lambda x, ctx: x.clone()), "changes-something", "is the honest signal, five times"),
    (of(lambda x, ctx: None), FORM, "it sends NoneType for activation"),
    (of(lambda x, ctx: 2 * x[:, :1]), FORM, r"it sends \(\(3, 1, 8\)"),
    (of(lambda x, ctx: 2 * x.float()), FORM, r"torch.float32.*usual, torch.bfloat16"),
    (of(lambda x, ctx: x / 0), FORM, "sends NaN or Inf"),
    (of(lambda x, ctx: x / x.std()), "stays-finite-on-a-constant-signal", "signal of 0 only"),
    (of(lambda x, ctx: x / (x - ctx.received)), "stays-finite-where-everybody-is-alike",
     "everybody sends 1 and received 1"),
    (of(lambda x, ctx: x + ctx.received), ENDS, r"raised TypeError at test_violations.py:\d+"),
    (attack(lambda self, x, ctx: 2 * x, knowledge=frozenset({Knowledge.HONEST}),
            needs=lambda self: frozenset()),
     "sees-what-it-declares-and-nothing-else", "`needs` leaves out honest"),
    (of(lambda x, ctx: ctx.honest[0]), FORM, r"asks for 'honest'.*add Knowledge.HONEST"),
    (of(in_place), GIVEN, r"changes its input in place \(activation, torch.float32\)"),
    (of(onto_received), GIVEN, "changes what it received in place"),
    (attack(lambda self, x, ctx: ctx.history[0].zero_() + 1, memory=lambda self: 2), GIVEN,
     "changes its past signal 0 in place"),
    (of(lambda x, ctx: x[:]), "does-not-change-the-signal-through-what-it-sent", "sends a view"),
    (of(once_more), "is-the-same-run-for-the-same-seed", "two runs with one seed differ"),
    (of(once_more), "two-workers-share-no-state", "when another worker runs beside it"),
    (of(lambda x, ctx: x + torch.rand_like(x)), GLOBAL, "numbers of torch"),
    (of(lambda x, ctx: x * np.random.rand()), GLOBAL, "numbers of numpy"),  # noqa: NPY002
    (of(lambda x, ctx: x * random.random()), GLOBAL, "numbers of Python"),
    (of(for_nothing), SEED, "it draws, and sends the same for another seed"),
    (attack(lambda self, x, ctx: colluding(x, ctx), knowledge=frozenset({Knowledge.COLLUDERS})),
     SEED, "it draws, and sends the same for another seed"),
    (of(by_the_seed), SEED, "draws from nowhere, and sends something else"),
]  # fmt: skip


@pytest.mark.parametrize("plugin, name, reason", ATTACKS, ids=range(len(ATTACKS)))
def test_what_an_attack_does_wrong_is_found(plugin: Any, name: str, reason: str) -> None:
    found = violation(plugin, name).reason
    assert re.search(reason, found), found


def test_an_attack_that_may_do_all_that_keeps_the_contract() -> None:
    assert [o.name for o in judge(checks(attack())) if o.status != "passed"] == []
    honest = frozenset({Knowledge.HONEST, Knowledge.COLLUDERS})
    knowing = attack(
        lambda self, x, ctx: x + ctx.colluders.signals.mean(0) - ctx.honest.sum(0),
        knowledge=honest,
        name="knowing",
    )
    assert [o.name for o in judge(checks(knowing)) if o.status != "passed"] == []


# --- defenses -------------------------------------------------------------------------------------


class Watch(Defense[ResponseParams]):
    """Flags who is far from the mean of what it saw, in a way that keeps the contract."""

    name = "watch"
    goal = formula = source = "test"

    def start(self, setup: Any) -> None:
        self.seen = torch.zeros(setup.stages, 2)
        self.steps = 0

    def size(self, signals: Any) -> Any:
        return signals.sent.float().square().mean((1, 2, 3)).sqrt()

    def place(self, signals: Any) -> Any:
        return signals.stage, int(signals.direction == "gradient")

    def check(self, signals: Any) -> Verdict:
        size, last, width = self.size(signals), float(self.seen[self.place(signals)]), 1.0
        if self.steps < 3:
            width = 1e9
        odd = ((size - last).abs() > width) & signals.active
        return Verdict(odd, odd.clone(), None, {"size": (size, last - width, last + width)})

    def learn(self, signals: Any, clean: Any) -> None:
        if clean.any():
            self.seen[self.place(signals)] = self.size(signals)[clean].mean()

    def end_step(self, step: int) -> None:
        self.steps += 1

    def state_bytes(self) -> int:
        return self.seen.nbytes


def watch(**parts: Any) -> type[Watch]:
    """Make a defense that is Watch but for some parts."""
    return type("Broken", (Watch,), {"__doc__": "Is tested.", **parts})


def verdict(change: Callable[[Any, Verdict], Verdict | None]) -> type[Watch]:
    """Make a defense that gives other verdicts."""
    return watch(check=lambda self, signals: change(signals, Watch.check(self, signals)))


def nobody(signals: Any) -> Any:
    return signals.active & False


def said(signals: Any, given: Verdict, **parts: Any) -> Verdict:
    values = {"flagged": given.flagged, "severe": given.severe, "statistics": given.statistics}
    return Verdict(**(values | parts))


def spoil(self: Any, signals: Any) -> Verdict:
    given = Watch.check(self, signals)
    signals.sent.mul_(1)
    return given


def spoil_learning(self: Any, signals: Any, clean: Any) -> None:
    Watch.learn(self, signals, clean)
    clean.fill_(True)


def learn_everything(self: Any, signals: Any, clean: Any) -> None:
    self.seen[self.place(signals)] = self.size(signals)[clean].mean()


def first_is_odd(signals: Any, given: Verdict) -> Verdict:
    row = torch.arange(len(signals.active)) == 1
    odd = signals.active & row & (signals.sent.abs().amax() > 20)
    return said(signals, given, flagged=odd, severe=odd)


def pooled(signals: Any, given: Verdict) -> Verdict:
    far = signals.sent.abs().amax() > 100
    return said(signals, given, flagged=signals.active & far, severe=signals.active & far)


def draw_and_say(self: Any, signals: Any) -> Verdict:
    torch.rand(1)
    return Watch.check(self, signals)


def drawn(signals: Any, given: Verdict) -> Verdict:
    odd = signals.active & (len(SEEN) % 7 == 1)
    SEEN.append(1)
    return said(signals, given, flagged=odd)


def hoard(self: Any, step: int) -> None:
    self.seen = torch.zeros(*self.seen.shape[:1], self.seen.shape[1] + 1)


def shared(self: Any, setup: Any) -> None:
    Watch.start(self, setup)
    self.hook = lambda signals, kept=self.seen: kept  # a closure is not copied


def by_hook(self: Any, signals: Any, clean: Any) -> None:
    Watch.learn(self, signals, clean)
    kept = self.hook(signals)
    kept += 0.01
    self.seen = kept.clone()


def lying(self: Any, signals: Any) -> Verdict:
    return said(signals, Watch.check(self, signals), flagged=signals.active)


def storing(self: Any, signals: Any) -> Verdict:
    self.asked = getattr(self, "asked", 0) + 1
    return Watch.check(self, signals)


def touching(self: Any, signals: Any) -> Verdict:
    signals.sent.mul_(1)
    return Watch.check(self, signals)


def partial_lie(self: Any, signals: Any) -> Verdict:
    given = Watch.check(self, signals)
    return said(signals, given, statistics={"other": (given.flagged.float(), 0.0, 1.0)})


VERDICTS = "gives-verdicts-of-the-right-form"
PREVIEW = "says-in-a-preview-what-it-then-says"
DEFENSES = [
    (watch(start=fail), "can-be-made", "raised ValueError at test_violations.py"),
    (watch(formula=""), "says-what-it-is", "its `formula` is ''"),
    (watch(across_stages="no"), "says-what-it-is", "`across_stages` is 'no'"),
    (watch(check=spoil), "leaves-all-that-it-is-given-alone", "`check` changes `sent` in place"),
    (watch(learn=spoil_learning), "leaves-all-that-it-is-given-alone", "`learn` changes `clean`"),
    (verdict(lambda s, v: None), VERDICTS, "`check` returns NoneType"),
    (verdict(lambda s, v: said(s, v, flagged=v.flagged.float())), VERDICTS, r"float32\) for 4"),
    (verdict(lambda s, v: said(s, v, severe=v.severe[:1])), VERDICTS, r"`severe` is \(\(1,\), to"),
    (verdict(lambda s, v: said(s, v, reference=s.sent[0] / 0)), VERDICTS, "NaN or Inf"),
    (verdict(lambda s, v: said(s, v, reference=s.sent.mean(0).float())), VERDICTS,
     r"its reference is \(\(2, 4, 8\), torch.float32\).*bfloat16"),
    (verdict(lambda s, v: said(s, v, statistics={"x": (v.flagged / 0, 0.0, 1.0)})), VERDICTS,
     "statistic x is not finite"),
    (verdict(lambda s, v: said(s, v, statistics={"x": (v.flagged * 1.0, 2.0, 1.0)})), VERDICTS,
     "statistic x is not finite, or its fence is none"),
    (verdict(lambda s, v: said(s, v, flagged=~s.active)), "never-takes-in-what-was-not-finite",
     "`flagged` holds for a replica that is not active with one lost"),
    (watch(learn=learn_everything), "passes-steps-in-which-nobody-is-active", "not finite"),
    (verdict(lambda s, v: said(s, v, statistics={"x": (v.flagged / (len(v.flagged) - 1), 0, 1)})),
     "works-with-one-replica", "statistic x is not finite.*with one replica"),
    (verdict(lambda s, v: said(s, v, flagged=s.active.clone())),
     "flags-nobody-where-all-send-the-same", "flags honest workers where all 1 send the same"),
    (verdict(pooled), "never-flags-who-is-not-active", "severe where two that are not active"),
    (verdict(first_is_odd), "follows-the-replicas-when-these-are-permuted", "in another order"),
    (verdict(drawn), "gives-the-same-verdicts-for-the-same-signals", "two instances"),
    (watch(check=draw_and_say), GLOBAL, "numbers of torch"),
    (watch(start=shared, learn=by_hook), "can-be-copied-with-its-state", "changes its own"),
    (watch(end_step=hoard), "states-its-memory", "`state_bytes` says"),
    (watch(state_bytes=lambda self: 0), "states-its-memory", r"says 0, and it holds \d+ bytes"),
    (watch(preview=lying), PREVIEW, "`check` says something else than `preview` did"),
    (watch(preview=storing), PREVIEW, "`preview` changes the state"),
    (watch(preview=touching), PREVIEW, "`preview` changes what it is given"),
    (watch(preview=draw_and_say), PREVIEW, "`preview` draws random numbers"),
    (watch(preview=partial_lie), PREVIEW, "`preview` says something that `check` does not"),
    (watch(preview=storing), "comes-to-the-same-verdicts-when-it-is-asked-all-the-time",
     "in another state"),
    (watch(preview=lambda self, s: drawn(s, Watch.check(self, s))),
     "previews-whatever-the-order-of-questions", "depend on the questions before"),
]  # fmt: skip


@pytest.mark.parametrize("plugin, name, reason", DEFENSES, ids=range(len(DEFENSES)))
def test_what_a_defense_does_wrong_is_found(plugin: Any, name: str, reason: str) -> None:
    found = violation(plugin, name).reason
    assert re.search(reason, found), found


def test_a_defense_that_keeps_the_contract_does() -> None:
    outcomes = judge(checks(Watch))
    assert [(o.name, o.reason) for o in outcomes if o.status == "failed"] == []
    assert {o.reason for o in outcomes if o.status == "not asked"} == {"it offers no `preview`"}
    offering = watch(preview=Watch.check, name="offering")
    assert [(o.name, o.reason) for o in judge(checks(offering)) if o.status != "passed"] == []


def test_a_defense_without_state_may_say_so() -> None:
    def stateless(self: Any, signals: Any) -> Verdict:
        return Verdict(nobody(signals), nobody(signals))

    plugin = type("Still", (Defense,), {**TEXTS, "name": "still", "check": stateless})
    assert [o.name for o in judge(checks(plugin)) if o.status == "failed"] == []


# --- aggregators ----------------------------------------------------------------------------------


class Rule(Aggregator[AggregatorParams]):
    """Averages what is left without the f lowest and the f highest."""

    name = "rule"
    goal = formula = source = "test"

    def requires(self, n: int, f: int) -> str | None:
        return self.condition("n > 2f", 2 * f + 1, n, f)

    def aggregate(self, rows: Any, f: int) -> Any:
        cut = min(f, (len(rows) - 1) // 2)
        return rows.sort(0).values[cut : len(rows) - cut].mean(0)


def rule(function: Callable[..., Any] | None = None, **parts: Any) -> type[Rule]:
    """Make a rule of what it makes of rows and f."""
    if function is not None:
        parts["aggregate"] = lambda self, rows, f: function(rows, f)
    return type("Broken", (Rule,), {"__doc__": "Is tested.", **parts})


class Loose(AggregatorParams):
    strict: bool = Field(False, description="never mind")


class AnyFaults(AggregatorParams):
    f: int | None = Field(None, description="any number")


def onto_rows(rows: Any, f: int) -> Any:
    rows.data.mul_(2)
    return rows.sum(0)


def grow(rows: Any, f: int) -> Any:
    SEEN.append(1)
    return rows.median(0).values * len(SEEN)


def squares(rows: Any, f: int) -> Any:
    """Trimmed by squared size: in float32 the squares of outliers swallow the rest."""
    return (rows.sum(0) - rows[rows.abs().sum(1).topk(min(f, len(rows) - 1)).indices].sum(0)) / max(
        1, len(rows) - f
    )


RULES = [
    (rule(__init__=fail), "can-be-made", "ValueError: oh no"),
    (rule(source=""), "says-what-it-is", "its `source` is ''"),
    (rule(Params=Loose), "says-what-it-is", "`strict` is False by default"),
    (rule(Params=AnyFaults), "refuses-a-misspelt-or-impossible-parameter", "it takes f=-1"),
    (rule(lambda rows, f: rows.mean()), "keeps-dtype-device-and-size-of-the-rows",
     r"returned shape \[\]"),
    (rule(__call__=lambda self, rows, f: rows.double().mean(0)),
     "keeps-dtype-device-and-size-of-the-rows", "torch.float64.*for rows of 40 numbers, torch.fl"),
    (rule(lambda rows, f: rows.mul_(1).mean(0)),
     "leaves-the-rows-alone-and-shares-no-memory-with-them", "changed its input"),
    (rule(onto_rows), "leaves-the-rows-alone-and-shares-no-memory-with-them",
     "changes the rows in place"),
    (rule(lambda rows, f: rows[0]), "leaves-the-rows-alone-and-shares-no-memory-with-them",
     "returns a view of the rows"),
    (rule(grow), "keeps-no-state", "another aggregate the second time"),
    (rule(lambda rows, f: rows.median(0).values + torch.rand(1)), GLOBAL, "numbers of torch"),
    (rule(__call__=lambda self, rows, f: rows.mean(0)), "leaves-out-rows-that-are-not-finite",
     "the aggregate is off by nan where two of 15 rows hold nan"),
    (rule(lambda rows, f: rows.sort(0).values[f : len(rows) - f].mean(0)),
     "relaxed-makes-something-of-any-number-of-rows", "aggregate of 1 rows and f = 1 lies outside"),
    (rule(lambda rows, f: rows.sort(0).values[2]), "survives-that-hardly-a-row-is-finite",
     "raised IndexError"),
    (rule(lambda rows, f: rows[0].clone()), "does-not-depend-on-the-order-of-the-rows",
     "in another order"),
    (rule(lambda rows, f: rows.sum(0) / (len(rows) + 1)), "agrees-where-all-rows-agree",
     "where all rows are equal"),
    (rule(lambda rows, f: rows.clamp(-1, 1).mean(0)),
     "follows-the-scale-and-the-place-of-the-rows", "as large and moved by"),
    (rule(lambda rows, f: rows.mean(0)), "is-not-moved-far-by-f-rows-of-garbage",
     r"3 of 15 rows of garbage \(1e6, torch.float32\) move it"),
    (rule(squares), "loses-no-precision-to-outliers", "off by .* in float32 where 3 rows are"),
]  # fmt: skip


@pytest.mark.parametrize("plugin, name, reason", RULES, ids=range(len(RULES)))
def test_what_an_aggregator_does_wrong_is_found(plugin: Any, name: str, reason: str) -> None:
    found = violation(plugin, name).reason
    assert re.search(reason, found), found


def test_an_aggregator_that_keeps_the_contract_does() -> None:
    assert [(o.name, o.reason) for o in judge(checks(Rule)) if o.status != "passed"] == []


def test_of_a_rule_that_promises_nothing_less_is_asked() -> None:
    plain = rule(lambda rows, f: rows.mean(0), requires=lambda self, n, f: None)
    outcomes = judge(checks(plain))
    assert [o.name for o in outcomes if o.status == "failed"] == []
    assert sum(o.status == "not asked" for o in outcomes) == 2


# --- the checks themselves ------------------------------------------------------------------------


ELSEWHERE = {
    "attack": set(),
    "defense": {
        "has-parameters-with-defaults-and-descriptions",  # the same function for all kinds
        "refuses-a-misspelt-parameter",
        "cannot-reach-the-ground-truth",  # only the harness can fail it: test_ground_truth.py
        "cannot-reach-the-ground-truth-through-autograd",
    },
    "aggregator": {"has-parameters-with-defaults-and-descriptions"},
}


def test_every_check_fails_for_some_plugin_here() -> None:
    for cases, good in ((ATTACKS, attack()), (DEFENSES, Watch), (RULES, Rule)):
        every = checks(good)
        tested = {name for _, name, _ in cases}
        assert {check.name for check in every} - tested == ELSEWHERE[every[0].registry.kind]


def test_nothing_more_is_tried_with_a_plugin_that_cannot_be_made() -> None:
    first, *others = judge(checks(attack(__init__=fail)))
    assert (first.name, first.status) == ("can-be-made", "failed")
    assert {(o.status, o.reason) for o in others} == {("not asked", "it cannot be made")}


def test_a_class_keeps_its_name_and_others_get_one_of_their_module() -> None:
    assert checks(registry.attacks.get("delay"))[0].plugin == "delay"
    plugin = attack()
    assert {c.plugin for c in checks(plugin)} == {c.plugin for c in checks(plugin)}
    with pytest.raises(ConfigError, match="is there already"):
        checks(attack())  # another class of the same name


@pytest.mark.parametrize("thing", [NoParams, "delay", None, Frozen])
def test_what_is_no_plugin_has_no_checks(thing: Any) -> None:
    with pytest.raises(ConfigError, match="extends neither Attack nor Defense nor Aggregator"):
        checks(thing)


def test_a_plugin_that_leaves_python_is_only_in_the_wrong() -> None:
    def leave(x: Any, ctx: Any) -> Any:
        raise SystemExit(0)

    reason = violation(of(leave), "changes-something").reason
    assert reason.startswith("it raised SystemExit at test_violations.py:")
