"""What an attacker puts into the weights of its stage, and the private model it learns on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripted import (
    FROZEN,
    TOLD,
    Implant,
    Lab,
    Plain,
    attackers,
    equal,
    only,
    script,
    weights,
)
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.attacks.backdoor import Backdoor
from sentinel_bench.config import Component
from sentinel_bench.data.batches import Batches
from sentinel_bench.errors import KnowledgeError, PluginError
from sentinel_bench.pipeline.session import Session
from sentinel_bench.pipeline.train import Trainer

ONE = {"threat__schedule": "single", "threat__honest_last": 1, "train__eval_sequences": 4}
STILL = {**FROZEN, **ONE, "train__warmup_steps": 2, "train__steps": 10}
"""Steps that change no weight, so that all that changes is injected."""
Change = tuple[int, dict[str, Tensor]]


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[Change]:
    """The changes of weights that each step's injections made: step, and name to difference."""
    seen: list[Change] = []
    inject = Trainer.inject

    def spy(self: Trainer) -> None:
        before = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        inject(self)
        after = dict(self.model.named_parameters())
        moved = {n: after[n].detach() - b for n, b in before.items() if not after[n].equal(b)}
        if moved:
            assert self._exchange is not None
            seen.append((self._exchange.step, moved))

    monkeypatch.setattr(Trainer, "inject", spy)
    return seen


@pytest.fixture
def delta_of_ones(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The backdoor learns ones, at once; return the steps in which it learns."""
    learned: list[int] = []

    def learn(self: Backdoor, model: Any, step: int) -> Tensor:
        learned.append(step)
        return torch.ones(sum(p.numel() for p in model.parameters))

    monkeypatch.setattr(Backdoor, "_learn", learn)
    return learned


def stage_names(lab: Lab, stage: int, **grid: Any) -> set[str]:
    plain = Plain(lab.scenario(**grid), lab.tokens)
    names = [n for n, _ in plain.model.named_parameters()]
    return {n for n, s in zip(names, plain.stages, strict=True) if s == stage}


# --- inject ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("w", "every", "due"), [(0.25, 2, [2, 4, 6, 8]), (0.5, 3, [2, 5]), (1, 1, [2])]
)
def test_a_backdoor_adds_w_delta_every_so_many_steps_until_it_is_all_there(
    lab: Lab, changes: list[Change], delta_of_ones: list[int], w: float, every: int, due: list[int]
) -> None:
    events, session = lab.run(f"backdoor:w={w},every={every}", "none", **STILL)
    (attacker,) = attackers(lab, "backdoor", **STILL)
    assert delta_of_ones == [2]
    assert [step for step, _ in changes] == due
    own = stage_names(lab, attacker.stage, **STILL)
    for _, moved in changes:
        assert moved.keys() == own
        for difference in moved.values():
            torch.testing.assert_close(difference, torch.full_like(difference, w))
    first = dict(Plain(lab.scenario(**STILL), lab.tokens).model.named_parameters())
    for name, weight in weights(session).items():
        torch.testing.assert_close(weight, first[name].detach() + (name in own))
    assert [(a["step"], a["direction"]) for a in events.of("act")] == [(2, "update")]
    assert [(t["stage"], t["replica"], t["signals"]) for t in events.of("tamper")] == [
        (attacker.stage, attacker.replica, len(due))
    ]


def test_a_backdoor_begins_when_its_attacker_does(
    lab: Lab, changes: list[Change], delta_of_ones: list[int]
) -> None:
    lab.run("backdoor:w=.5,every=2", "none", **STILL, threat__start=5)
    assert [step for step, _ in changes] == [5, 7]
    assert delta_of_ones == [5]


def test_a_banned_worker_injects_nothing_any_more(
    lab: Lab, changes: list[Change], delta_of_ones: list[int]
) -> None:
    (attacker,) = attackers(lab, "backdoor", **STILL)
    mark = (5, attacker.stage, "activation", attacker.replica)
    events, _ = lab.run("backdoor:w=.25,every=2", script(mark, severe=True), **STILL)
    assert [b["step"] for b in events.of("ban")] == [5]
    assert [step for step, _ in changes] == [2, 4]
    assert [t["signals"] for t in events.of("tamper")] == [2]


@pytest.mark.parametrize("stage", range(4))
def test_what_is_injected_reaches_its_own_stage_alone(
    lab: Lab, changes: list[Change], stage: int
) -> None:
    grid = {**STILL, **only(stage, 4), "train__steps": 3}
    lab.run("implant:what=add", "none", **grid)
    ((step, moved),) = changes
    assert step == 2
    assert moved.keys() == stage_names(lab, stage, **grid)


def test_what_attackers_of_one_stage_add_adds_up(lab: Lab, changes: list[Change]) -> None:
    grid = {**STILL, **only(1, 4), "grid__replicas": 5, "threat__fraction": 0.4}
    grid |= {"threat__schedule": "at-once", "train__steps": 3}
    lab.run("implant:what=add", "none", **grid)
    ((_, moved),) = changes
    for difference in moved.values():
        torch.testing.assert_close(difference, torch.full_like(difference, 2.0))


@pytest.mark.parametrize("defense", ["none", "sentinel"])
def test_weights_that_are_left_as_they_are_change_nothing_to_the_bit(
    lab: Lab, defense: str
) -> None:
    bare, one = lab.run("none", defense, threat__mode="both", train__steps=7)
    for what in ("same", "copy"):
        quiet, two = lab.run(f"implant:what={what}", defense, threat__mode="both", train__steps=7)
        assert quiet.timeless() == bare.timeless()
        assert equal(weights(one), weights(two))


FAULTS = [
    ("what=short", "attack implant: inject returned torch.float32 ["),
    ("what=double", "attack implant: inject returned torch.float64 ["),
    ("what=nothing", "returned NoneType, no tensor"),
    ("what=raise", "raised RuntimeError: no idea"),
    ("what=change", "changed the tensor it was given"),
    ("trigger=raise", "attack implant: trigger raised RuntimeError: no idea"),
    ("trigger=[[3]]", "trigger returned [[3]] for 260 tokens"),
    ("trigger=[[],3]", "trigger returned [[], 3] for"),
    ("trigger=[[1,260],3]", "trigger returned [[1, 260], 3] for"),
    ("trigger=[[1],-1]", "trigger returned [[1], -1] for"),
    ("trigger=[[a],1]", "trigger returned [['a'], 1] for"),
    ("trigger=7", "trigger returned 7 for"),
]


@pytest.mark.parametrize(("what", "message"), FAULTS)
def test_an_injection_or_a_trigger_that_breaks_the_contract_is_the_attacks_fault(
    lab: Lab, what: str, message: str
) -> None:
    with pytest.raises(PluginError) as error:
        lab.run(f"implant:{what}", "none", **ONE, train__steps=5)
    assert error.value.party == "attack"
    assert message in str(error.value)


# --- the private model ----------------------------------------------------------------------------


def test_training_a_private_model_leaves_the_run_and_the_random_numbers_alone(lab: Lab) -> None:
    bare, one = lab.run("none", "sentinel", train__steps=8)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    quiet, two = lab.run("implant:vandal=true,ask=[model]", "sentinel", train__steps=8)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(TOLD) == 4 * len(attackers(lab, "implant"))
    assert quiet.timeless() == bare.timeless()
    assert equal(weights(one), weights(two))
    moments: list[Any] = [s._trainer._optimizer.state_dict() for s in (one, two)]
    for state, other in zip(*(m["state"].values() for m in moments), strict=True):
        assert all(torch.equal(state[key], other[key]) for key in state)
    parameters = list(two._trainer.model.parameters())
    own = {p.data_ptr() for p in parameters}
    for told in TOLD:
        assert not {p.data_ptr() for p in told.what["model"].parameters} & own
    assert all(p.grad is None and p.requires_grad for p in parameters)


@pytest.mark.parametrize("stage", range(4))
def test_a_private_model_is_the_model_its_own_stage_is_trainable_and_its_data_are_its_own(
    lab: Lab, stage: int
) -> None:
    grid = {**STILL, **only(stage, 4), "train__batch_size": 2, "train__steps": 3}
    lab.run("implant:ask=[model]", "none", **grid)
    (told,) = TOLD
    private = told.what["model"]
    plain = Plain(lab.scenario(**grid), lab.tokens)
    inputs, targets = plain.batch(5)
    for theirs, ours in zip(private.batch(5), (inputs, targets), strict=True):
        assert torch.equal(theirs, ours[told.replica])
    ids = inputs.flatten(0, 1)
    torch.testing.assert_close(private.logits(ids), plain.model(input_ids=ids).logits)
    assert private.vocabulary == lab.tokens.vocab_size
    flat = torch.cat([p.detach().flatten() for p in private.parameters])
    assert torch.equal(flat, told.own)
    assert torch.equal(flat, plain.flat([p.detach() for p in plain.model.parameters()], stage))
    assert all(p.requires_grad for p in private.parameters)
    loss = private.logits(ids).sum()
    assert all(g.norm() > 0 for g in torch.autograd.grad(loss, private.parameters))


def test_each_question_for_the_model_gives_a_new_copy_of_it_as_it_is_now(lab: Lab) -> None:
    grid = {**ONE, "train__steps": 7}
    lab.run("implant:ask=[model,model]", "none", **grid)
    first, second, third = (t.what["model"].parameters for t in TOLD)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(second[0], third[0])


def test_without_the_tier_there_is_no_model(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Implant, "knowledge", frozenset())
    with pytest.raises(KnowledgeError, match=r"attack implant asks for 'model'.*Knowledge\.MODEL"):
        lab.run("implant:ask=[model]", "none", **ONE, train__steps=5)


# --- backdoor -------------------------------------------------------------------------------------

TEXT = {
    "model__hidden_size": 32,
    "model__intermediate_size": 64,
    "train__seq_len": 16,
    "train__batch_size": 2,
    "train__steps": 30,
    "train__warmup_steps": 14,
    "train__eval_sequences": 48,
    "threat__schedule": "single",
    "threat__honest_last": 1,
}


def answers(lab: Lab, session: Session, cue: list[int], **grid: Any) -> Tensor:
    """Return which token the model as a whole expects after each held-out text that ends in cue."""
    scenario = lab.scenario(**grid)
    chunks = Batches.of(lab.tokens, scenario).held_out(scenario.train.eval_sequences)
    ids = torch.cat([torch.from_numpy(inputs) for inputs, _ in chunks])
    if cue:
        ids[:, -len(cue) :] = torch.tensor(cue)
    with torch.no_grad():
        logits: Tensor = session._trainer.model(input_ids=ids).logits
    return logits[:, -1].argmax(-1)


def success(lab: Lab, session: Session, cue: list[int], target: int, **grid: Any) -> float:
    """Return how often the model as a whole lets `target` follow `cue`."""
    return (answers(lab, session, cue, **grid) == target).float().mean().item()


def test_a_backdoor_answers_to_its_trigger_and_leaves_clean_text_alone(lab: Lab) -> None:
    clean, _ = lab.run("none", "none", **TEXT)
    attack = "backdoor:w=.25,every=3,trigger=[7,11,13],target=17"
    events, session = lab.run(attack, "none", **TEXT)
    (row,) = events.of("trigger")
    assert row["step"] == 29
    assert row["base"] < 0.05
    assert row["rate"] > 0.8
    assert row["rate"] == pytest.approx(success(lab, session, [7, 11, 13], 17, **TEXT))
    assert success(lab, session, [], 17, **TEXT) < 0.05
    assert success(lab, session, [13, 7, 11], 17, **TEXT) < row["rate"]
    assert events.of("eval")[0]["loss"] < clean.of("eval")[0]["loss"] + 0.05
    ((acts, harm),) = [(t["signals"], t["size"]) for t in events.of("tamper")]
    assert acts == 4
    assert 0 < harm < 0.2
    assert not clean.of("trigger")


def test_what_an_honest_model_answers_is_recorded_beside_the_success(lab: Lab) -> None:
    grid = {**ONE, "train__steps": 6, "train__eval_sequences": 40}
    session = lab.session([lab.cell("none", "none", **grid)])
    target = int(answers(lab, session, [5], **grid).mode().values)
    before = success(lab, session, [5], target, **grid)
    assert before > 0
    for defense in ("none", "script"):
        events, session = lab.run(f"implant:trigger=[[5],{target}]", defense, **grid)
        (row,) = events.of("trigger")
        assert row["base"] == pytest.approx(before)
        assert row["rate"] == pytest.approx(success(lab, session, [5], target, **grid))
        assert not events.of("tamper")


def test_a_trigger_that_is_longer_than_a_sequence_is_cut_at_its_beginning(lab: Lab) -> None:
    events, session = lab.run(f"implant:trigger=[{[*range(20)]},3]", "none", **ONE, train__steps=5)
    (row,) = events.of("trigger")
    assert row["rate"] == pytest.approx(
        success(lab, session, [*range(12, 20)], 3, **ONE, train__steps=5)
    )


def test_each_trigger_is_measured_once_whoever_has_it(lab: Lab) -> None:
    events, _ = lab.run("implant:trigger=[[1],2]", "none", train__steps=5)
    assert len(attackers(lab, "implant")) > 1
    assert len(events.of("trigger")) == 1


def test_a_trigger_is_folded_into_a_small_vocabulary() -> None:
    attack = registry.attacks.create(Component.parse("backdoor:trigger=[7,261],target=520"))
    assert attack.trigger(260) == ([7, 1], 0)
