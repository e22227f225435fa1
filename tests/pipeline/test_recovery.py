"""A step with an alarm is done again, around the suspects or with all; copies stay in step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scripted import Events, Lab, Script, ScriptParams, equal, weights
from torch import Tensor, nn

from sentinel_bench.api import Attack, AttackContext, Recovery
from sentinel_bench.config import Cell, Component, Frozen, Scenario
from sentinel_bench.data.batches import Batches
from sentinel_bench.data.tokens import Tokens
from sentinel_bench.errors import PluginError
from sentinel_bench.models.build import build_model
from sentinel_bench.models.presets import layers_per_stage
from sentinel_bench.pipeline import train
from sentinel_bench.pipeline.copies import Copies
from sentinel_bench.pipeline.recovery import MAX_PASSES
from sentinel_bench.pipeline.session import Session

GRADIENTS: list[list[Tensor | None]] = []
"""Weight gradients of each step, as they reach the optimizer."""
WEIGHTS: list[list[Tensor]] = []
"""The weights at that time, which are those before the step."""


class MoleParams(Frozen):
    marks: list[tuple[int, int, int, str]] = []
    """step, attempt (-1: all), stage, direction"""


class Mole(Attack[MoleParams]):
    """Adds noise where it is told to."""

    name = "mole"
    goal = formula = source = "test"
    Params = MoleParams

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        marks = [(ctx.step, a, ctx.stage, ctx.direction) for a in (ctx.attempt, -1)]
        lies = any(mark in self.params.marks for mark in marks)
        return x + ctx.normal(x) * x.square().mean().sqrt() if lies else x


class RedoParams(ScriptParams):
    answer: str = ""


class Redo(Script):
    """Has its own idea of a recovery."""

    name = "redo"
    Params = RedoParams

    def recover(self, suspects: frozenset[int], passes: int, last: Recovery) -> Any:
        answers = {"nonsense": 3, "stage 9": Recovery(frozenset({9})), "endless": Recovery()}
        return answers[self.params.answer]  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _plugins(plug: Callable[..., None]) -> None:
    plug(Mole, Redo)


@pytest.fixture(autouse=True)
def _spy(monkeypatch: pytest.MonkeyPatch) -> None:
    GRADIENTS.clear()
    WEIGHTS.clear()
    clip = train.clip_gradients

    def spy(parameters: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
        WEIGHTS.append([p.detach().clone() for p in parameters])
        GRADIENTS.append([None if p.grad is None else p.grad.clone() for p in parameters])
        return clip(parameters, *rest)

    monkeypatch.setattr(train, "clip_gradients", spy)


@pytest.fixture
def drifts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How far any copy ever was from its original, each time they were compared."""
    seen: list[float] = []
    distance = Copies._distance

    def spy(self: Copies, stage: int) -> float:
        seen.append(distance(self, stage))
        return seen[-1]

    monkeypatch.setattr(Copies, "_distance", spy)
    return seen


def grid(stages: int, replicas: int = 1, **more: Any) -> dict[str, Any]:
    """A grid in which every worker is an attacker, and honest unless it is told to lie."""
    return {
        "grid__stages": stages,
        "grid__replicas": replicas,
        "train__warmup_steps": 0,
        "train__steps": 1,
        "train__grad_clip": 1e9,
        "threat__fraction": 1.0,
        "threat__allow_majority": True,
        "threat__schedule": "at-once",
        "threat__mode": "both",
        "threat__honest_first": 0,
        "threat__honest_last": 0,
        "threat__verifiers": "honest",
        **more,
    }


def mole(*marks: tuple[int, int, int, str]) -> str:
    return f"mole:marks={[list(m) for m in marks]}".replace("'", "")


def with_resync(defense: str) -> str:
    """Have copies compared after every step."""
    return f"{defense},resync=1" if ":" in defense else f"{defense}:resync=1"


def places(events: Events) -> list[tuple[int, int, str]]:
    """Step, stage and direction of all flags."""
    return [(row["step"], row["stage"], row["direction"]) for row in events.of("flag")]


def owners(scenario: Scenario, tokens: Tokens) -> list[int]:
    """Return the stage of each parameter of the model, in order."""
    counts = layers_per_stage(scenario)
    of_layer = [stage for stage, count in enumerate(counts) for _ in range(count)]
    found = []
    for name, _ in build_model(scenario, tokens.vocab_size).named_parameters():
        if ".layers." in name:
            found.append(of_layer[int(name.split(".layers.")[1].split(".")[0])])
        else:
            found.append(0 if "embed" in name else len(counts) - 1)
    return found


def plain(
    scenario: Scenario, tokens: Tokens, bypassed: Sequence[int]
) -> tuple[float, list[Tensor | None]]:
    """Loss and gradients of the first step of the Hugging Face model without some blocks."""
    train = scenario.train
    batches = Batches(
        tokens,
        batch_size=train.batch_size,
        seq_len=train.seq_len,
        replicas=scenario.grid.replicas,
        seed=scenario.seeds.data,
    )
    model = build_model(scenario, tokens.vocab_size)
    parameters = list(model.parameters())
    counts = layers_per_stage(scenario)
    of_layer = [stage for stage, count in enumerate(counts) for _ in range(count)]
    kept = [m for m, s in zip(model.model.layers, of_layer, strict=True) if s not in bypassed]
    model.model.layers = nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    inputs, targets = (torch.from_numpy(a) for a in batches.train(0))
    loss = F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.item(), [p.grad for p in parameters]


def assert_plain(lab: Lab, events: Events, changes: dict[str, Any], bypassed: set[int]) -> None:
    """The step was that of the model without some blocks; frozen stages have no gradient."""
    scenario = lab.scenario(**changes)
    (answer,) = events.of("recovery")[-1:]
    frozen = {*answer["bypass"], *answer["freeze"]}
    assert set(answer["bypass"]) == bypassed
    loss, expected = plain(scenario, lab.tokens, sorted(bypassed))
    assert events.of("step")[0]["loss"] == pytest.approx(loss, rel=1e-5)
    trained = 0
    for got, want, stage in zip(GRADIENTS[-1], expected, owners(scenario, lab.tokens), strict=True):
        if stage in frozen:
            assert got is None
            continue
        assert got is not None and want is not None and want.norm() > 0
        assert (got - want).norm() <= 1e-5 * want.norm()
        trained += 1
    assert (trained == 0) == (len(frozen) == scenario.grid.stages)


PAIRS = [(stages, liar) for stages in range(2, 7) for liar in range(stages)]


@pytest.mark.parametrize("stages, liar", [(s, k) for s, k in PAIRS if k < s - 1])
def test_around_a_liar_the_step_is_that_of_the_model_without_two_blocks(
    lab: Lab, stages: int, liar: int
) -> None:
    changes = grid(stages, model__layers=stages + stages // 2)
    events, _ = lab.run(mole((0, -1, liar, "activation")), "skip-layer", **changes)
    assert places(events) == [(0, liar, "activation")]
    assert_plain(lab, events, changes, {liar, liar + 1})
    assert events.of("recovery")[0]["freeze"] == ([liar - 1] if liar else [])


@pytest.mark.parametrize("stages, liar", [(s, k) for s, k in PAIRS if k > 0])
def test_the_same_holds_for_a_lie_about_a_gradient(lab: Lab, stages: int, liar: int) -> None:
    changes = grid(stages, 2, train__batch_size=2)
    events, _ = lab.run(mole((0, -1, liar, "gradient")), "skip-layer", **changes)
    assert set(places(events)) == {(0, liar, "gradient")}
    assert_plain(lab, events, changes, {liar, (liar + 1) % stages})


def test_frozen_stages_keep_their_weights_and_the_others_train(lab: Lab) -> None:
    changes = grid(6)
    _, session = lab.run(mole((0, -1, 2, "activation")), "skip-layer", **changes)
    for before, now, stage in zip(
        WEIGHTS[0],
        weights(session).values(),
        owners(lab.scenario(**changes), lab.tokens),
        strict=True,
    ):
        assert torch.equal(now, before) == (stage in (1, 2, 3))


@pytest.mark.parametrize(
    "defense, replicas, batch, warm",
    [
        ("redundant-block", 1, 1, 0),
        ("skip-layer", 1, 3, 6),
        ("skip-layer", 2, 1, 0),
        ("redundant-block", 2, 2, 6),
        ("skip-layer", 3, 2, 6),
    ],
)
def test_without_attack_there_is_no_alarm_and_training_is_what_it_is_without_a_defense(
    lab: Lab, drifts: list[float], defense: str, replicas: int, batch: int, warm: int
) -> None:
    changes = {
        "grid__replicas": replicas,
        "train__batch_size": batch,
        "train__warmup_steps": warm,
        "train__steps": warm + 6,
    }
    events, session = lab.run("none", f"{defense}:resync=1", **changes)
    _, bare = lab.run("none", "none", **changes)
    assert not events.of("flag") and not events.of("recovery") and not events.of("resync")
    assert sum(row["checked"][0] for row in events.of("step")) == 6 * 6 * replicas
    assert len(drifts) == 6 * 4 and max(drifts) <= 1e-6
    assert equal(weights(session), weights(bare))


@pytest.mark.parametrize("direction", ["activation", "gradient"])
@pytest.mark.parametrize("stage", range(4))
def test_every_lie_is_flagged_at_its_stage_and_nothing_else_is(
    lab: Lab, stage: int, direction: str
) -> None:
    if (stage, direction) in [(3, "activation"), (0, "gradient")]:
        return  # sends none
    marks = [(step, -1, stage, direction) for step in range(4, 8)]
    changes = grid(4, 2, train__warmup_steps=2, train__steps=10, threat__fraction=0.5)
    events, _ = lab.run(mole(*marks), "redundant-block:recovery=none", **changes)
    attacker = next(a["replica"] for a in events.of("act"))
    assert places(events) == [(step, stage, direction) for step in range(4, 8)]
    assert {row["replica"] for row in events.of("flag")} == {attacker}
    assert sum(row["flagged"][0] for row in events.of("step")) == 0
    assert not events.of("ban") and not events.of("recovery")


def test_a_worker_that_poisons_itself_is_flagged(lab: Lab) -> None:
    changes = grid(4, threat__poison_self=True)
    events, _ = lab.run(mole((0, -1, 2, "gradient")), "skip-layer", **changes)
    assert places(events) == [(0, 2, "gradient")]
    assert_plain(lab, events, changes, {2, 3})


@pytest.mark.parametrize(
    "defense",
    [
        "redundant-block:recovery=none",
        "redundant-block:recovery=none,amnesty=true",  # the corrupted gradient is let through
        "redundant-block:recovery=none,quarantine=true",
        "redundant-block:tries=1",
        "skip-layer",
        "skip-layer:bans=true",
    ],
)
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_after_a_corrupted_gradient_nobody_is_accused_and_the_copies_are_in_step(
    lab: Lab, drifts: list[float], defense: str, replicas: int
) -> None:
    changes = grid(4, replicas, train__steps=9, train__grad_clip=1.0)
    if replicas > 1:
        changes["threat__fraction"] = 0.5
    lies = [(2, -1, 2, "gradient"), (4, 0, 1, "activation"), (5, 0, 3, "gradient")]
    events, _ = lab.run(mole(*lies), with_resync(defense), **changes)
    assert set(places(events)) == {(step, stage, place) for step, _, stage, place in lies}
    assert not events.of("resync")
    assert len(drifts) == 9 * 4 and max(drifts) <= 1e-6


def test_a_second_attacker_in_the_new_pass_is_caught_and_bypassed_as_well(lab: Lab) -> None:
    changes = grid(6)
    lies = [(0, -1, 1, "activation"), (0, -1, 3, "activation"), (0, -1, 3, "gradient")]
    events, _ = lab.run(mole(*lies), "skip-layer", **changes)
    assert places(events) == [(0, 1, "activation"), (0, 3, "activation")]
    assert [row["suspects"] for row in events.of("recovery")] == [[1], [3]]
    assert [row["bypass"] for row in events.of("recovery")] == [[1, 2], [1, 2, 3, 4]]
    assert_plain(lab, events, changes, {1, 2, 3, 4})


@pytest.mark.parametrize(
    "second, bypassed",
    [
        ((0, 1, 1, "activation"), {1, 2, 3}),  # checked by the bypassed stage 2
        ((0, 1, 4, "activation"), {2, 3, 4, 5}),  # the first stage after the gap
        ((0, 1, 4, "gradient"), {2, 3, 4, 5}),  # whose gradient jumps the gap
        ((0, 1, 5, "gradient"), {0, 2, 3, 5}),
        ((0, 1, 0, "activation"), {0, 1, 2, 3}),
    ],
)
def test_whoever_lies_only_in_the_new_pass_is_caught_too(
    lab: Lab, second: tuple[int, int, int, str], bypassed: set[int]
) -> None:
    changes = grid(6)
    events, _ = lab.run(mole((0, 0, 2, "activation"), second), "skip-layer", **changes)
    assert places(events) == [(0, 2, "activation"), (0, *second[2:])]
    assert_plain(lab, events, changes, bypassed)


def test_whoever_poisons_itself_behind_a_gap_is_caught_too(lab: Lab) -> None:
    changes = grid(6, threat__poison_self=True)
    lies = [(0, 0, 3, "gradient"), (0, 1, 2, "gradient")]
    events, _ = lab.run(mole(*lies), "skip-layer", **changes)
    assert places(events) == [(0, 3, "gradient"), (0, 2, "gradient")]
    assert {row["stage"]: row["signals"] for row in events.of("tamper")} == {2: 1, 3: 1}
    assert_plain(lab, events, changes, {2, 3, 4})


def test_liars_of_several_ranks_are_found_in_one_pass(lab: Lab) -> None:
    changes = grid(6, 4, threat__fraction=0.5, threat__honest_first=1, threat__honest_last=1)
    lies = [(0, -1, stage, "activation") for stage in (1, 4)]
    events, _ = lab.run(mole(*lies), "skip-layer", **changes)
    assert events.of("recovery")[0]["suspects"] in ([1, 4], [1])
    assert_plain(lab, events, changes, {1, 2, 4, 5})


def test_a_restart_that_comes_out_clean_is_as_if_nothing_had_happened(lab: Lab) -> None:
    changes = grid(4, 2, train__steps=5)
    lies = [(1, 0, 2, "activation"), (1, 1, 3, "gradient"), (3, 0, 1, "gradient")]
    events, session = lab.run(mole(*lies), "redundant-block:tries=2", **changes)
    bare, honest = lab.run("none", "none", **changes)
    assert [row["loss"] for row in events.of("step")] == [r["loss"] for r in bare.of("step")]
    assert equal(weights(session), weights(honest))
    assert [row["step"] for row in events.of("recovery")] == [1, 1, 3]
    assert not any(row.get("skipped") for row in events.of("step"))


@pytest.mark.parametrize("defense", ["redundant-block", "skip-layer"])
def test_a_step_that_stays_bad_is_skipped_and_leaves_no_trace(lab: Lab, defense: str) -> None:
    lies = [(1, a, stage, "activation") for stage, a in ((2, 0), (4, 1), (1, 2))]
    changes = grid(6, train__steps=2)
    events, session = lab.run(mole(*lies), f"{defense}:tries=2", **changes)
    assert [row["skip"] for row in events.of("recovery")] == [False, False, True]
    assert [bool(row.get("skipped")) for row in events.of("step")] == [False, True]
    assert all(map(torch.equal, weights(session).values(), WEIGHTS[1]))
    assert not all(map(torch.equal, *WEIGHTS))


@pytest.mark.parametrize(
    "attack, schedule",
    [("sign-flip:rate=0.5", "at-once"), ("sign-flip", "rate")],
)
def test_an_attacker_with_a_rate_decides_anew_in_each_pass(
    lab: Lab, attack: str, schedule: str
) -> None:
    changes = grid(
        4, train__steps=8, threat__schedule=schedule, threat__rate=0.5, threat__honest_first=2,
        threat__honest_last=1,
    )  # fmt: skip
    events, session = lab.run(attack, "redundant-block:tries=50", **changes)
    _, honest = lab.run("none", "none", **changes)
    assert events.of("recovery")
    assert not any(row.get("skipped") for row in events.of("step"))
    assert equal(weights(session), weights(honest))


def test_a_lying_holder_of_a_copy_is_bypassed_with_the_victim_that_it_accuses(lab: Lab) -> None:
    changes = grid(6, train__steps=3, threat__verifiers="lie")
    events, _ = lab.run(mole((0, -1, 3, "activation")), "skip-layer", **changes)
    later = [row for row in events.of("flag") if row["step"] > 0]
    assert {(row["stage"], row["tampered"]) for row in later} == {(2, False)}
    assert all(set(row["bypass"]) >= {2, 3} for row in events.of("recovery") if row["step"])
    assert not any(row.get("skipped") for row in events.of("step"))


def test_two_neighbours_that_cover_for_each_other_are_a_blind_spot(lab: Lab) -> None:
    changes = grid(6, train__steps=2, threat__verifiers="collude")
    lies = [(0, -1, 3, "gradient"), (1, -1, 2, "activation")]
    events, _ = lab.run(mole(*lies), "redundant-block", **changes)
    assert (1, 2, "activation") not in places(events)


@pytest.mark.parametrize("bans", [False, True])
def test_nobody_is_banned_unless_asked_for(lab: Lab, bans: bool) -> None:
    changes = grid(4, 2, train__steps=8, threat__fraction=0.5)
    lies = [(step, -1, 1, "activation") for step in range(8)]
    events, _ = lab.run(mole(*lies), f"skip-layer:bans={str(bans).lower()}", **changes)
    assert [(b["step"], b["stage"]) for b in events.of("ban")] == ([(4, 1)] if bans else [])
    assert len(events.of("flag")) == (5 if bans else 8)


def test_copies_that_drift_because_of_an_attack_on_weights_are_replaced_and_logged(
    lab: Lab,
) -> None:
    changes = {
        "train__warmup_steps": 0, "train__steps": 6, "threat__honest_first": 2,
        "threat__honest_last": 1, "threat__verifiers": "honest",
    }  # fmt: skip
    defense = "redundant-block:recovery=none,resync=3"
    events, _ = lab.run("update-sign-flip", defense, **changes)
    assert [(row["step"], row["stage"]) for row in events.of("resync")] == [(2, 2), (5, 2)]
    assert all(row["distance"] > 1e-4 for row in events.of("resync"))
    assert {(row["step"], row["stage"]) for row in events.of("flag")} == {
        (step, 2) for step in (1, 2, 4, 5)
    }


def test_a_copy_that_was_replaced_is_in_step_from_then_on(
    lab: Lab, drifts: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, done = Copies.step, []

    def spoil(self: Copies, *args: Any) -> None:
        step(self, *args)
        done.append(True)
        if len(done) == 2:
            for parameter in self._copies[1].parameters():
                parameter.data.mul_(1.5)
                self._optimizer.state[parameter]["exp_avg"].mul_(-3)

    monkeypatch.setattr(Copies, "step", spoil)
    changes = {"train__warmup_steps": 0, "train__steps": 6}
    events, _ = lab.run("none", "redundant-block:resync=1", **changes)
    assert [(row["step"], row["stage"]) for row in events.of("resync")] == [(1, 1)]
    assert events.of("resync")[0]["distance"] == pytest.approx(0.5)
    assert len(drifts) == 6 * 4 and max(drifts[8:]) <= 1e-6
    assert not events.of("flag")


def test_copies_stay_in_step_under_a_robust_aggregator(lab: Lab, drifts: list[float]) -> None:
    cell = Cell(
        scenario=lab.scenario(train__warmup_steps=0, train__steps=4),
        attack=Component(name="none"),
        defense=Component.parse("redundant-block:resync=1"),
        aggregator=Component(name="median"),
    )
    events = Events()
    Session.run(lab.session([cell]), cell, events)
    assert not events.of("flag") and len(drifts) == 4 * 4 and max(drifts) <= 1e-6


@pytest.mark.parametrize(
    "answer, message",
    [
        ("nonsense", "recover returned 3"),
        ("stage 9", r"names stages \[9\] of 4"),
        ("endless", f"more than {MAX_PASSES} passes"),
    ],
)
def test_an_answer_that_cannot_be_followed_is_the_fault_of_the_defense(
    lab: Lab, answer: str, message: str
) -> None:
    params = {"flags": [[4, 1, "activation", 0]], "answer": answer}
    with pytest.raises(PluginError, match=message) as caught:
        lab.run("none", Component(name="redo", params=params))
    assert caught.value.party == "defense"


def test_the_memory_of_the_copies_is_counted(lab: Lab) -> None:
    cell = lab.cell("none", "redundant-block")
    session = lab.session([cell])
    model = sum(p.nbytes for p in session._trainer.model.parameters())
    assert session.state_bytes(cell) == 3 * model
