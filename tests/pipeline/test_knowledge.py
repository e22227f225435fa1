"""What an attacker is told is what it declares to know, and nothing else; asking is harmless."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted import (
    SEEN,
    TOLD,
    Events,
    Forger,
    Implant,
    Insider,
    Lab,
    Quiet,
    Told,
    attackers,
    equal,
    script,
    weights,
)
from torch import Tensor

from sentinel_bench import registry, suite, tracks
from sentinel_bench.api import (
    OWN,
    AttackContext,
    Defense,
    Knowledge,
    ResponseParams,
    Signals,
    Verdict,
)
from sentinel_bench.attacks.wrap import WrapParams, Wrapper
from sentinel_bench.config import Component, merge
from sentinel_bench.defenses.sentinel import Averaging, Sentinel
from sentinel_bench.errors import KnowledgeError
from sentinel_bench.pipeline.tamper import History, Sent, Tamperer
from sentinel_bench.threat import Attacker

CROWD: dict[str, Any] = {
    "grid__replicas": 5,
    "threat__fraction": 0.4,
    "threat__mode": "both",
    "train__steps": 8,
}
"""Two attackers and three honest replicas in each of stages 1 and 2, four attacked steps."""
TIERS = [Knowledge.COLLUDERS, Knowledge.HONEST, Knowledge.DETECTOR, Knowledge.MODEL]
ALL = "[colluders,honest,detector]"
SMOKE = {"steps": 50, "warmup_steps": 30, "eval_sequences": 8}


class Hull(Wrapper[WrapParams]):
    """Knows everything, and sends what the attack inside sends."""

    name = "hull"
    goal = formula = source = "test"
    knowledge = frozenset(Knowledge)

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        assert ctx.honest is not None
        return self.inside(x, ctx)


class Nosy(Hull):
    """Asks what it does not declare, around an attack that does declare it."""

    name = "nosy"
    knowledge = OWN

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        return self.inside(x, ctx.narrow(self))


def declare(monkeypatch: pytest.MonkeyPatch, attack: type[Any], *tiers: Knowledge) -> None:
    monkeypatch.setattr(attack, "knowledge", frozenset(tiers))


def tamperer(*attacks: str | Component) -> Tamperer:
    """Attackers of stage 1: replica 0 does the first of the attacks, and so on."""
    parsed = [Component.parse(a) if isinstance(a, str) else a for a in attacks]
    crowd = [Attacker(1, r, 0, a, "activation", seed=r + 1) for r, a in enumerate(parsed)]
    return Tamperer(crowd, History(), "cpu", lambda stage, replica: False)


def send(side: Tamperer, x: Tensor) -> Sent:
    return side.send(1, "activation", 0, x, None)


X = torch.arange(24.0).view(4, 1, 2, 3)
"""Signals of four replicas."""


# --- undeclared -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_an_attack_is_not_told_what_it_does_not_declare(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tier: Knowledge
) -> None:
    declare(monkeypatch, Insider, *(set(TIERS) - {tier}))
    for name in ("spy", "insider"):
        with pytest.raises(KnowledgeError) as error:
            send(tamperer(f"{name}:ask=[{tier.value}]"), X)
        assert error.value.party == "attack"
        message = str(error.value)
        assert message.startswith(f"attack {name} asks for '{tier.value}', which it does not")
        assert f"Knowledge.{tier.name}" in message


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    "around",
    [
        "hull:attack={}",
        "fence-rider:attack={}",
        "on-off:attack={}",
        "nosy:attack={}",
        "on-off:attack='hull:attack={}'",
        "hull:attack='nosy:attack={}'",
        "mixed:pool=[{}]",
    ],
)
def test_inside_of_a_wrapper_it_is_told_no_more_even_if_the_wrapper_knows(
    lab: Lab, plug: Callable[..., None], around: str, tier: Knowledge
) -> None:
    plug(Hull, Nosy)
    attack = around.format(f'"spy:ask=[{tier.value}]"')
    own = Component.parse(attack)
    own, _ = registry.attacks.get(own.name).deal(own, "activation", np.random.default_rng(0))
    with pytest.raises(KnowledgeError, match=f"attack spy asks for '{tier.value}'"):
        send(tamperer(own), X)


def test_a_wrapper_knows_what_it_wraps_and_not_the_other_way_round(
    lab: Lab, plug: Callable[..., None]
) -> None:
    plug(Hull, Nosy)
    honest = torch.stack([X[2], X[3]])
    for text in (
        'nosy:attack="insider:ask=[honest]"',
        'on-off:attack="insider:ask=[honest]"',
        """on-off:attack='nosy:attack="insider:ask=[honest]"'""",
    ):
        TOLD.clear()
        send(tamperer(text, text), X)
        assert [torch.equal(t.what["honest"], honest) for t in TOLD] == [True, True]


@pytest.mark.parametrize("tier", [Knowledge.COLLUDERS, Knowledge.HONEST])
def test_what_is_not_declared_is_not_told_about_updates(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tier: Knowledge
) -> None:
    declare(monkeypatch, Forger, *(set(TIERS) - {tier}))
    with pytest.raises(KnowledgeError, match=f"attack forger asks for '{tier.value}'"):
        lab.run(f"forger:ask=[{tier.value}]", "none", train__steps=5)


def test_a_run_in_which_an_attack_asks_too_much_is_invalid_and_the_attacks_fault(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for kind in (Forger, Implant):
        declare(monkeypatch, kind)
    asked = {"spy": "detector", "forger": "honest", "implant": "model"}
    texts = [f"{name}:ask=[{tier}]" for name, tier in asked.items()]
    plan = suite.make_plan(
        [lab.scenario(train__steps=6)],
        [Component.parse(text) for text in (*texts, "liar:what=noise")],
        [Component.parse("script")],
        {},
    )
    done = {f.cell.label: f for f in suite.run(plan, tmp_path, Quiet(), threads=1)}
    for defense in ("none", "script"):
        for name, tier in asked.items():
            scores = done[f"{name}-vs-{defense}"].result["scores"]
            assert scores["outcome"] == "invalid"
            assert scores["reason"].startswith(f"attack: attack {name} asks for '{tier}'")
        assert done[f"liar-vs-{defense}"].valid
    assert done["none-vs-none"].valid


# --- declared -------------------------------------------------------------------------------------


def carried(told: Told) -> Tensor:
    """Return what the harness carried at the boundary at which an attacker was told something."""
    place = (told.step, told.stage, told.direction)
    (seen,) = [s for s in SEEN if (s.step, s.stage, s.direction) == place]
    return seen.sent


def test_the_honest_are_exactly_the_replicas_that_are_not_malicious(lab: Lab) -> None:
    lab.run(f"insider:what=noise,ask={ALL}", "script", **CROWD)
    bad = {
        s: [a.replica for a in attackers(lab, "insider", **CROWD) if a.stage == s] for s in (1, 2)
    }
    assert len(TOLD) == 4 * 2 * 2 * 2
    for told in TOLD:
        good = [r for r in range(5) if r not in bad[told.stage]]
        assert torch.equal(told.what["honest"], carried(told)[good])
        assert not torch.equal(told.own, carried(told)[told.replica])  # it lied


def test_a_colluder_sees_the_honest_signals_of_all_attackers_of_its_stage(lab: Lab) -> None:
    lab.run(f"insider:what=noise,ask={ALL}", "script", **CROWD)
    own = {(t.step, t.stage, t.direction, t.replica): t.own for t in TOLD}
    for told in TOLD:
        mates = sorted(r for *place, r in own if place == [told.step, told.stage, told.direction])
        assert len(mates) == 2
        ours = told.what["colluders"]
        assert mates[ours.index] == told.replica
        expected = [own[told.step, told.stage, told.direction, r] for r in mates]
        assert torch.equal(ours.signals, torch.stack(expected))


@pytest.mark.parametrize("attack", ["insider:what=noise", "forger:what=flip"])
def test_colluders_of_a_stage_draw_the_same_numbers_and_others_do_not(
    lab: Lab, attack: str
) -> None:
    ask = ALL if "insider" in attack else "[colluders]"
    grid = {**CROWD, "train__steps": 6}
    lab.run(f"{attack},ask={ask}", "none", **grid)
    drawn: dict[tuple[int, int, str], set[tuple[float, ...]]] = {}
    for t in TOLD:
        drawn.setdefault((t.step, t.stage, t.direction), set()).add(tuple(t.what["noise"].tolist()))
    assert len(drawn) == (8 if "insider" in attack else 4)
    assert all(len(numbers) == 1 for numbers in drawn.values())
    assert len(set().union(*drawn.values())) == len(drawn)
    first = [t.what["noise"].tolist() for t in TOLD]
    for seed, same in ((0, True), (1, False)):
        TOLD.clear()
        lab.run(f"{attack},ask={ask}", "sentinel", **grid, seeds__threat=seed)
        again = [t.what["noise"].tolist() for t in TOLD]
        assert (again == first) is same


def test_asking_colluders_twice_in_a_step_gives_the_same_numbers(lab: Lab) -> None:
    send(tamperer("insider:ask=[colluders]", "insider:ask=[colluders]"), X)
    one, other = (t.what["noise"] for t in TOLD)
    assert torch.equal(one, other)
    own = [torch.rand(4, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    assert not any(torch.equal(one, n) for n in own)  # apart from their own random numbers


def test_all_attackers_of_a_run_share_one_plan_and_no_other_run_does(lab: Lab) -> None:
    cells = [lab.cell("insider:ask=[colluders]", d, **CROWD) for d in ("none", "script")]
    session = lab.session(cells)
    plans = []
    for cell in cells:
        TOLD.clear()
        session.run(cell, Events())
        (plan,) = {id(t.what["colluders"].plan): t.what["colluders"].plan for t in TOLD}.values()
        assert plan["log"] == [(t.step, t.stage, t.replica) for t in TOLD]
        assert {stage for _, stage, _ in plan["log"]} == {1, 2}
        plans.append(plan)
    assert plans[0] == plans[1]
    assert plans[0] is not plans[1]


def test_banned_and_unborn_attackers_count_as_malicious_all_the_same(lab: Lab) -> None:
    grid = {**CROWD, "threat__schedule": "waves", "threat__waves": 2, "threat__gap": 2}
    crowd = attackers(lab, "insider", **grid)
    assert {a.start for a in crowd} == {4, 6}
    first = next(a for a in crowd if a.start == 4)
    mark = (4, first.stage, "activation", first.replica)
    lab.run(f"insider:ask={ALL}", script(mark, severe=True), **grid)
    assert TOLD
    for told in TOLD:
        bad = [a.replica for a in crowd if a.stage == told.stage]
        good = [r for r in range(5) if r not in bad]
        assert torch.equal(told.what["honest"], carried(told)[good])
        assert len(told.what["colluders"].signals) == 2
        assert bad[told.what["colluders"].index] == told.replica
    assert not any(
        (t.stage, t.replica) == (first.stage, first.replica) and t.step > 4 for t in TOLD
    )


# --- the detector ---------------------------------------------------------------------------------


def spy_checks(
    monkeypatch: pytest.MonkeyPatch, defense: type[Sentinel]
) -> dict[tuple[int, int, str], Verdict]:
    """Return a dictionary that fills with the verdicts of a run."""
    found: dict[tuple[int, int, str], Verdict] = {}
    check = defense.check

    def spy(self: Sentinel, signals: Signals) -> Verdict:
        verdict = check(self, signals)
        found[signals.step, signals.stage, signals.direction] = verdict
        return verdict

    monkeypatch.setattr(defense, "check", spy)
    return found


def smoke(**train: Any) -> dict[str, Any]:
    """Return what makes the tiny scenario one of the smoke track, but for the corpus."""
    given = merge(tracks.get("smoke").scenario, {"train": {**SMOKE, **train}})
    return {
        f"{group}__{key}": value
        for group, values in given.items()
        if group != "data"
        for key, value in values.items()
    } | {"threat__mode": "both"}


@pytest.mark.parametrize("attack", ["noise", "same", "zeros", "nan"])
def test_a_detector_says_beforehand_what_the_defense_then_says(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    verdicts = spy_checks(monkeypatch, Sentinel)
    grid = smoke(steps=36 if attack == "same" else 32)
    lab.run(f"insider:what={attack},ask=[detector]", "sentinel:violations=99,severity=1e9", **grid)
    assert len(TOLD) > 2
    flags = []
    for told in TOLD:
        judgement = told.what["judgement"]
        verdict = verdicts[told.step, told.stage, told.direction]
        if attack == "nan":  # no detector is needed to see it: it is not even shown the signal
            assert judgement.flagged
            continue
        flags.append(judgement.flagged)
        assert judgement.flagged == verdict.flagged[told.replica]
        assert list(judgement.statistics) == ["l1", "l2", "sfr", "swd"]
        for name, (value, low, high) in judgement.statistics.items():
            values, *fence = verdict.statistics[name]
            assert value == pytest.approx(float(values[told.replica]), rel=1e-6)
            assert [low, high] == fence
            assert low < high < float("inf")
    assert any(flags) == (attack != "nan")


class Counter(Defense[ResponseParams]):
    """Carries something from boundary to boundary within a step: how many it has learned from."""

    name = "counter"
    goal = formula = source = "test"

    def start(self, setup: Any) -> None:
        self.learned = 0

    def check(self, signals: Signals) -> Verdict:
        value = torch.full((len(signals.sent),), float(self.learned))
        nobody = torch.zeros_like(signals.active)
        JUDGED[signals.step, signals.stage, signals.direction] = float(value[0])
        return Verdict(nobody, nobody, None, {"learned": (value, -1.0, 1e9)})

    def preview(self, signals: Signals) -> Verdict:
        kept = dict(JUDGED)
        verdict = self.check(signals)
        JUDGED.clear()
        JUDGED.update(kept)
        return verdict

    def learn(self, signals: Signals, clean: Tensor) -> None:
        self.learned += 1


JUDGED: dict[tuple[int, int, str], float] = {}


def test_a_detector_knows_what_the_defense_has_learned_in_this_step(
    lab: Lab, plug: Callable[..., None]
) -> None:
    plug(Counter)
    lab.run("insider:what=noise,ask=[detector]", "counter", **CROWD)
    assert TOLD
    for told in TOLD:
        value, *_ = told.what["judgement"].statistics["learned"]
        assert value == JUDGED[told.step, told.stage, told.direction]


def test_a_detector_that_compares_replicas_is_shown_the_lies_that_were_sent_before(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two attackers, the second is told the truth; the first could not know the second."""
    verdicts = spy_checks(monkeypatch, Averaging)
    lab.run("insider:what=noise,ask=[detector]", "averaging", **CROWD, train__warmup_steps=4)
    last = {(t.step, t.stage, t.direction): t for t in TOLD}
    for place, told in last.items():
        values = verdicts[place].statistics["l1"][0]
        assert told.what["judgement"].statistics["l1"][0] == pytest.approx(
            float(values[told.replica]), rel=1e-6
        )


@pytest.mark.parametrize("defense", ["sentinel", "averaging"])
def test_who_asks_a_thousand_times_and_sends_the_honest_signal_changes_nothing_to_the_bit(
    lab: Lab, defense: str
) -> None:
    grid = {**CROWD, "train__warmup_steps": 12, "train__steps": 16}
    bare, one = lab.run("none", defense, **grid)
    quiet, two = lab.run("insider:probes=40,vandal=true,ask=[colluders,honest]", defense, **grid)
    assert 40 * len(TOLD) > 1000
    assert quiet.timeless() == bare.timeless()
    assert equal(weights(one), weights(two))


@pytest.mark.parametrize("defense", ["none", "script"])
def test_a_defense_that_offers_nothing_says_nothing(lab: Lab, defense: str) -> None:
    lab.run("insider:what=noise,ask=[detector]", defense, train__steps=6)
    assert TOLD
    assert all(t.what["judgement"] is None for t in TOLD)


def test_a_rider_is_hardly_ever_flagged_by_the_detector_that_it_asks(lab: Lab) -> None:
    grid = smoke(steps=40)
    events, _ = lab.run("fence-rider", "sentinel:quarantine=true", **grid)
    checked, flagged = (
        [sum(row[key][tampered] for row in events.of("step")) for tampered in (0, 1)]
        for key in ("checked", "flagged")
    )
    assert checked[1] > 20
    assert flagged[1] <= 0.01 * checked[1]
    assert {(t["stage"], t["replica"]) for t in events.of("tamper")} == {
        (a.stage, a.replica) for a in attackers(lab, "fence-rider", **grid)
    }
    plain, _ = lab.run("bias", "sentinel:quarantine=true", **grid)
    share = [sum(row[k][1] for row in plain.of("step")) for k in ("flagged", "checked")]
    assert share[0] > 0.5 * share[1]  # the direction itself is not hidden


def test_a_rider_without_a_detector_is_the_attack_inside(lab: Lab) -> None:
    for defense in ("none", "script"):
        plain, one = lab.run("zeros", defense, threat__mode="both", train__steps=7)
        ridden, two = lab.run(
            "fence-rider:attack=zeros", defense, threat__mode="both", train__steps=7
        )
        assert ridden.timeless() == plain.timeless()
        assert equal(weights(one), weights(two))


@pytest.mark.parametrize(
    "signal",
    [X[0][:, :-1], X[0].double(), X[0].to_sparse(), X[0] * torch.nan, X[0] / 0],
    ids=["short", "double", "sparse", "nan", "inf"],
)
def test_a_signal_that_could_not_be_read_is_flagged_by_any_detector(
    lab: Lab, plug: Callable[..., None], signal: Tensor
) -> None:
    asked: list[Tensor] = []

    def look(x: Tensor) -> Verdict | None:
        asked.append(x)
        return None

    side = tamperer("insider:ask=[detector]")
    context = side._context(side._villains[0], "activation", 0, X, None, look, X)
    assert context.detector.judge(signal).flagged
    assert not asked
    assert context.detector.judge(X[0] + 1) is None
    assert torch.equal(asked[0][0], X[0] + 1)
    assert torch.equal(asked[0][1:], X[1:])
    assert torch.equal(X, torch.arange(24.0).view(4, 1, 2, 3))


class Eavesdropper(Defense[ResponseParams]):
    """Remembers whose signals changed from question to question: these must be attackers."""

    name = "eavesdropper"
    goal = formula = source = "test"

    def __init__(self, params: ResponseParams) -> None:
        super().__init__(params)
        self.asked: list[Tensor] = []
        self.suspects: set[int] = set()

    def check(self, signals: Signals) -> Verdict:
        suspects = [r in self.suspects for r in range(len(signals.sent))]
        self.asked, self.suspects = [], set()
        flagged = torch.tensor(suspects) & signals.active
        return Verdict(flagged, flagged)

    def preview(self, signals: Signals) -> Verdict | None:
        for other in self.asked:
            changed = (other != signals.sent).flatten(1).any(1)
            self.suspects.update(changed.nonzero().flatten().tolist())
        self.asked.append(signals.sent)
        nobody = torch.zeros_like(signals.active)
        return Verdict(nobody, nobody)


def test_a_defense_does_not_learn_who_attacks_from_being_asked(
    lab: Lab, plug: Callable[..., None]
) -> None:
    plug(Eavesdropper)
    events, _ = lab.run("fence-rider", "eavesdropper", train__steps=6)
    assert not events.of("ban")
    assert sum(row["flagged"][1] for row in events.of("step")) == 0


@pytest.mark.parametrize(
    ("attack", "tier"), [(Insider, "model"), (Forger, "detector"), (Implant, "honest")]
)
def test_who_declares_a_tier_has_it_or_is_told_that_it_is_not_there(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, attack: type[Any], tier: str
) -> None:
    declare(monkeypatch, attack, *TIERS)
    try:
        lab.run(f"{attack.name}:ask=[{tier}]", "none", train__steps=5)
    except KnowledgeError as error:
        assert "which it does not declare" not in str(error)
    else:
        assert tier in TOLD[0].what


def test_a_defense_is_asked_about_plain_tensors(lab: Lab) -> None:
    asked: list[Tensor] = []

    def look(x: Tensor) -> Verdict | None:
        asked.append(x)
        return None

    side = tamperer("insider:ask=[detector]")
    context = side._context(side._villains[0], "activation", 0, X, None, look, X)
    with torch.enable_grad():
        context.detector.judge(X[0].clone().requires_grad_() * 2)
    assert asked[0].grad_fn is None
    assert not asked[0].requires_grad


def test_a_detector_sees_the_others_as_the_defense_will_see_them(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mate sends NaN: it is zeroed and not active when the defense looks."""
    verdicts = spy_checks(monkeypatch, Averaging)
    pool = '[non-finite,"insider:what=noise,ask=[detector]"]'
    attack, grid = f"mixed:pool={pool}", {**CROWD, "train__steps": 5}
    for seed in range(9):
        crowd = attackers(lab, attack, **grid, seeds__threat=seed)
        pairs = {one.stage: (one, two) for one, two in pairwise(crowd)}
        stages = [
            stage
            for stage, (one, two) in pairs.items()
            if (one.attack.name, two.attack.name) == ("non-finite", "insider")
            and one.stage == two.stage
            and one.start == two.start
        ]
        if stages:
            break
    assert stages
    lab.run(attack, "averaging", **grid, seeds__threat=seed)
    heard = [told for told in TOLD if told.stage in stages]
    assert heard
    for told in heard:
        values = verdicts[told.step, told.stage, told.direction].statistics["l1"][0]
        assert told.what["judgement"].statistics["l1"][0] == pytest.approx(
            float(values[told.replica]), rel=1e-6
        )
