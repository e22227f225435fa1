"""`threat.poison_self`: whether an attacker's lie about a gradient reaches its own weights too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripted import (
    FROZEN,
    SEEN,
    Grads,
    Lab,
    Plain,
    Seen,
    assert_close,
    attackers,
    equal,
    only,
    script,
    spy_gradients,
    weights,
)

from sentinel_bench.errors import PluginError
from sentinel_bench.pipeline.tamper import Tamperer

GRADIENT = {**FROZEN, "threat__mode": "gradient", "grid__stages": 5, "threat__honest_last": 1}
SELF = {**GRADIENT, "threat__poison_self": True}
SPLITS: list[dict[str, Any]] = [
    {"threat__honest_first": 2, "threat__honest_last": 2},
    {"grid__replicas": 5, "threat__fraction": 0.4, "train__batch_size": 2, "model__layers": 7},
    {"grid__stages": 3, "grid__replicas": 3, "threat__fraction": 0.34},
]


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[Grads]:
    return spy_gradients(monkeypatch)


def flipped(lab: Lab, *, own: bool, **grid: Any) -> Grads:
    """Return the gradients if every attacker negates what goes upstream, its own part with it."""
    bad = [(a.stage, a.replica) for a in attackers(lab, "scaling", **grid)]

    def factor(stage: int, replica: int) -> float:
        lies = sum(r == replica and (stage < s or (own and stage == s)) for s, r in bad)
        return float((-1) ** lies)

    plain = Plain(lab.scenario(**grid), lab.tokens)
    return plain.mean(range(lab.scenario(**grid).grid.replicas), factor)


def gradient_of(stage: int, step: int = 0) -> Seen:
    """Return what a defense saw of the gradients that a stage sent."""
    (seen,) = [s for s in SEEN if (s.step, s.stage, s.direction) == (step, stage, "gradient")]
    return seen


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("defense", ["none", "script"])
def test_the_lie_reaches_its_own_weights_if_it_poisons_itself_and_those_upstream_always(
    lab: Lab, gradients: list[Grads], split: dict[str, Any], own: bool, defense: str
) -> None:
    grid = {**GRADIENT, **split, "threat__poison_self": own, "train__steps": 1}
    events, _ = lab.run("scaling:alpha=-1", defense, **grid)
    assert_close(gradients[0], flipped(lab, own=own, **grid))
    plan = {(a.stage, a.replica) for a in attackers(lab, "scaling", **grid)}
    assert {(t["stage"], t["replica"]) for t in events.of("tamper")} == plan
    assert {t["signals"] for t in events.of("tamper")} == {1}
    assert [t["size"] for t in events.of("tamper")] == [pytest.approx(2 / 3)] * len(plan)
    assert events.of("step")[0]["tampered"] == len(plan)
    assert {(a["stage"], a["replica"], a["direction"]) for a in events.of("act")} == {
        (*worker, "gradient") for worker in plan
    }


def test_by_default_its_own_update_is_honest_in_the_first_attacked_step(
    lab: Lab, gradients: list[Grads]
) -> None:
    grid = {**GRADIENT, **only(2, 5), "train__steps": 1}
    lab.run("none", "none", **grid)
    lab.run("liar:what=noise", "none", **grid)
    lab.run("liar:what=noise", "none", **grid, threat__poison_self=True)
    stages = Plain(lab.scenario(**grid), lab.tokens).stages
    honest, default, poisoned = gradients
    for stage, clean, lie, own in zip(stages, honest, default, poisoned, strict=True):
        assert torch.equal(clean, lie) == (stage >= 2)
        assert torch.equal(clean, own) == (stage > 2)


def test_what_it_sends_follows_from_the_corrupted_gradient(lab: Lab) -> None:
    """Of a gradient of zeros a stage computes zeros; of one twice as large, twice as much."""
    (bad,) = attackers(lab, "scaling", **{**SELF, **only(2, 5)})
    sent = {}
    for attack in ("none", "scaling:alpha=2", "liar:what=zeros"):
        SEEN.clear()
        lab.run(attack, "script", **{**SELF, **only(2, 5)})
        sent[attack] = gradient_of(2).sent
        others = [r for r in range(4) if r != bad.replica]
        assert torch.equal(sent[attack][others], sent["none"][others])
    honest = sent["none"][bad.replica]
    torch.testing.assert_close(sent["scaling:alpha=2"][bad.replica], 2 * honest)
    assert honest.any()
    assert not sent["liar:what=zeros"][bad.replica].any()


def test_an_attacker_that_poisons_itself_by_nothing_changes_nothing_to_the_bit(lab: Lab) -> None:
    grid = {"threat__mode": "both", "threat__poison_self": True, "train__steps": 7}
    bare, one = lab.run("none", "sentinel", **grid)
    quiet, two = lab.run("liar:what=copy", "sentinel", **grid)
    assert quiet.timeless() == bare.timeless()
    assert equal(weights(one), weights(two))


def test_in_activations_it_lies_as_without(lab: Lab) -> None:
    grid = {"threat__mode": "activation", "train__steps": 7}
    one, a = lab.run("liar:what=noise", "sentinel", **grid)
    two, b = lab.run("liar:what=noise", "sentinel", **grid, threat__poison_self=True)
    assert one.timeless() == two.timeless()
    assert equal(weights(a), weights(b))


def test_a_banned_worker_poisons_itself_no_more(lab: Lab, gradients: list[Grads]) -> None:
    grid = {**SELF, **only(2, 5)}
    (bad,) = attackers(lab, "scaling", **grid)
    defense = script((0, 2, "gradient", bad.replica), severe=True)
    events, _ = lab.run("scaling:alpha=-1", defense, **grid)
    assert [b["replica"] for b in events.of("ban")] == [bad.replica]
    assert_close(gradients[1], Plain(lab.scenario(**grid), lab.tokens).mean(range(4), step=1))
    assert [t["signals"] for t in events.of("tamper")] == [1]


@pytest.mark.parametrize("lie", ["short", "double", "sparse"])
def test_no_stage_can_compute_with_a_gradient_of_another_form(lab: Lab, lie: str) -> None:
    with pytest.raises(PluginError, match=r"poison_self.* must have the shape and dtype") as error:
        lab.run(f"liar:what={lie}", "none", **SELF)
    assert error.value.party == "attack"


@pytest.mark.parametrize("own", [False, True])
def test_quarantine_takes_out_its_own_update_when_its_own_lie_is_flagged(
    lab: Lab, gradients: list[Grads], own: bool
) -> None:
    grid = {**GRADIENT, **only(2, 5), "threat__poison_self": own}
    (bad,) = attackers(lab, "scaling", **grid)
    mark = (0, 2, "gradient", bad.replica)
    for lie in ("ones", "liar:what=nan"):
        gradients.clear()
        lab.run(lie, script(mark, quarantine=True, amnesty=False), **grid)
        keep = [r for r in range(4) if r != bad.replica]
        assert_close(gradients[0], Plain(lab.scenario(**grid), lab.tokens).mean(keep))


@pytest.mark.parametrize("place", [(0, "activation"), (4, "gradient")])
def test_in_quarantine_for_another_stages_sake_it_poisons_nothing(
    lab: Lab, gradients: list[Grads], place: tuple[int, str]
) -> None:
    grid = {**SELF, **only(2, 5)}
    (bad,) = attackers(lab, "ones", **grid)
    mark = (0, *place, bad.replica)
    events, _ = lab.run("ones", script(mark, quarantine=True, amnesty=False), **grid)
    assert events.of("step")[0]["excluded"] == 1
    keep = [r for r in range(4) if r != bad.replica]
    assert_close(gradients[0], Plain(lab.scenario(**grid), lab.tokens).mean(keep))


def test_a_defense_is_shown_what_was_delivered_to_an_attacker_not_what_it_made_of_it(
    lab: Lab,
) -> None:
    lab.run("ones", "script", **{**SELF, **only(2, 5)})
    assert gradient_of(2).received is not None
    assert torch.equal(gradient_of(2).received, gradient_of(3).sent)


def test_at_the_last_stage_it_lies_about_what_it_sends(lab: Lab) -> None:
    events, _ = lab.run("ones", "none", **{**SELF, **only(4, 5)})
    assert [a["direction"] for a in events.of("act")] == ["gradient"]


@pytest.mark.parametrize("attack", ["delay:steps=1", "mean-replay"])
def test_attacks_that_replay_the_past_replay_what_they_received(lab: Lab, attack: str) -> None:
    grid = {**SELF, **only(2, 5), "train__warmup_steps": 2, "train__steps": 5}
    events, _ = lab.run(attack, "none", **grid)
    assert events.of("act")
    assert [t["signals"] for t in events.of("tamper")] == [3]


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="its past is looked for a stage further down"
)
def test_at_the_last_stage_it_replays_what_it_sent(lab: Lab) -> None:
    grid = {**SELF, **only(4, 5), "train__warmup_steps": 2, "train__steps": 5}
    events, _ = lab.run("delay:steps=1", "none", **grid)
    assert [t["signals"] for t in events.of("tamper")] == [3]


def test_what_is_replayed_is_what_was_received_some_steps_ago(lab: Lab) -> None:
    """Stage 2 poisons itself with what stage 3 sent it in the step before."""
    grid = {**SELF, **only(2, 5), "train__warmup_steps": 2, "train__steps": 4}
    (bad,) = attackers(lab, "delay", **grid)
    passed: dict[int, Any] = {}
    poison = Tamperer.poison

    def spy(self: Tamperer, stage: int, step: int, *rest: Any) -> Any:
        out = poison(self, stage, step, *rest)
        if stage == bad.stage:
            passed[step] = out.clone()
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tamperer, "poison", spy)
        lab.run("delay:steps=1", "script", **grid)
    for step in (2, 3):
        before, now = gradient_of(3, step - 1).sent, gradient_of(3, step).sent
        assert torch.equal(passed[step][bad.replica], before[bad.replica])
        others = [r for r in range(4) if r != bad.replica]
        assert torch.equal(passed[step][others], now[others])
