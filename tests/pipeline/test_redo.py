"""Work done again is what an honest worker sends, whatever happened around it, and leaves no trace.

All replicas' work is done again at every boundary, and compared with what was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, ClassVar

import pytest
import torch
from scripted import Lab, Mark, Script, equal, weights
from torch import Tensor

from sentinel_bench.api import Again, Signals
from sentinel_bench.config import Component
from sentinel_bench.pipeline import exchange, train
from sentinel_bench.pipeline.tamper import History, Tamperer
from sentinel_bench.pipeline.train import Trainer
from sentinel_bench.threat import Attacker

SHORT = {"train__steps": 7}
OPEN = {"threat__honest_first": 1, "threat__honest_last": 1, "threat__mode": "both"}
FIRST = 4
"""The step after the warm-up."""


@dataclass
class Compared:
    """One boundary: what was sent, and the same work done again for some replicas."""

    step: int
    stage: int
    direction: str
    of: list[int]
    apart: list[float]
    active: list[bool]


SEEN: list[Compared] = []
KEPT: list[Again] = []


def relative(a: Tensor, b: Tensor) -> list[float]:
    """|a - b| / |b| of each row, 0 where both are zero."""
    apart, size = (a - b).flatten(1).norm(dim=1), b.flatten(1).norm(dim=1)
    return (apart / size.clamp_min(1e-30)).tolist()


class Redoer(Script):
    """A script that also has the work of all subsets of the replicas done again."""

    name: ClassVar[str] = "redoer"
    needs_again = True
    learns = False

    def check(self, signals: Signals) -> Any:
        again = signals.again
        assert again is not None
        KEPT.append(again)
        n = len(signals.sent)
        subsets = chain.from_iterable(combinations(range(n), size) for size in (1, n - 1, n))
        for of in [*map(list, subsets), [n - 1, 0, 0]]:
            apart = relative(again.recompute(of), signals.sent[of])
            SEEN.append(
                Compared(
                    *(signals.step, signals.stage, signals.direction),
                    *(of, apart, signals.active.tolist()),
                )
            )
        return super().check(signals)


class Learner(Redoer):
    """Watches the warm-up, too."""

    name: ClassVar[str] = "learner"
    learns = True


class Mistaken(Script):
    """Compares replicas with one another."""

    name: ClassVar[str] = "mistaken"
    needs_again = True
    apart: ClassVar[list[float]] = []

    def check(self, signals: Signals) -> Any:
        assert signals.again is not None
        self.apart.extend(relative(signals.again.recompute([1, 2]), signals.sent[[2, 1]]))
        return super().check(signals)


class Plain(Script):
    """Does not ask for it."""

    name: ClassVar[str] = "plain"
    given: ClassVar[list[Again | None]] = []

    def check(self, signals: Signals) -> Any:
        self.given.append(signals.again)
        return super().check(signals)


@pytest.fixture(autouse=True)
def _plugged(plug: Callable[..., None]) -> None:
    plug(Redoer, Learner, Mistaken, Plain)
    for kept in (SEEN, KEPT, Mistaken.apart, Plain.given):
        kept.clear()  # type: ignore[attr-defined]


def redoer(*flags: Mark, **params: Any) -> Component:
    return Component(name="redoer", params={"flags": [list(f) for f in flags], **params})


def assert_all_equal(stages: int = 4) -> None:
    """Every signal of every boundary was recomputed, and equals what was sent."""
    places = {(s, "activation") for s in range(stages - 1)}
    places |= {(s, "gradient") for s in range(1, stages)}
    assert {(c.stage, c.direction) for c in SEEN} == places
    assert max(max(c.apart) for c in SEEN) < 1e-5


# --- equal to what was sent -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "grid",
    [
        {},
        {"grid__stages": 3, "grid__replicas": 3, "model__layers": 5, "train__batch_size": 2},
    ],
)
def test_work_done_again_is_what_was_sent_at_every_stage_and_for_any_replicas(
    lab: Lab, grid: dict[str, Any]
) -> None:
    lab.run("none", "redoer", **SHORT, **grid)
    assert_all_equal(grid.get("grid__stages", 4))


def test_the_comparison_can_fail_for_replicas_send_different_signals(lab: Lab) -> None:
    lab.run("none", "mistaken", **SHORT)
    assert min(Mistaken.apart) > 1e-3


FLAGGED: dict[str, tuple[list[Mark], dict[str, Any]]] = {
    "excluded forward": ([(FIRST, 1, "activation", 1)], {"quarantine": True}),
    "excluded backward": ([(FIRST, 2, "gradient", 3)], {"quarantine": True}),
    "excluded at the loss": ([(FIRST, 3, "gradient", 0)], {"quarantine": True}),
    "both": (
        [(FIRST, 0, "activation", 1), (FIRST, 3, "gradient", 0), (FIRST, 2, "gradient", 2)],
        {"quarantine": True, "amnesty": False},
    ),
    "all excluded": (
        [(FIRST, 1, "activation", r) for r in range(4)],
        {"quarantine": True, "amnesty": False},
    ),
    "substituted": ([(FIRST, 1, "activation", 1), (FIRST, 3, "gradient", 0)], {}),
    "substituted by zeros": ([(FIRST, 3, "gradient", 0)], {"substitute": "zeros"}),
    "rerouted": ([(FIRST, 1, "activation", 2)], {"severe": True}),
    "dropped": ([(FIRST, 1, "activation", 2)], {"severe": True, "on_ban": "drop"}),
    "amnesty": ([(FIRST, 2, "gradient", r) for r in range(3)], {"quarantine": True}),
}


@pytest.mark.parametrize("case", FLAGGED)
def test_it_stays_so_under_taints_bans_and_amnesties(lab: Lab, case: str) -> None:
    flags, params = FLAGGED[case]
    events, _ = lab.run("none", redoer(*flags, **params), **SHORT)
    assert_all_equal()
    assert len(events.of("ban")) == params.get("severe", False)
    assert len(events.of("amnesty")) == (case == "amnesty")
    assert any(not all(c.active) for c in SEEN) == (case != "amnesty")


@pytest.mark.parametrize("poison", [False, True])
def test_only_what_was_tampered_with_differs_and_nobody_downstream_of_it(
    lab: Lab, poison: bool
) -> None:
    events, _ = lab.run("liar:what=noise", "redoer", threat__poison_self=poison, **OPEN, **SHORT)
    liars = {(a["stage"], a["replica"]) for a in events.of("act")}
    assert {stage for stage, _ in liars} == {1, 2}
    places = set()
    for c in SEEN:
        assert c.step >= FIRST
        for replica, apart in zip(c.of, c.apart, strict=True):
            if (c.stage, replica) in liars:
                assert apart > 1e-2, c
                places.add((c.stage, c.direction))
            else:
                assert apart < 1e-5, c
    assert places == {(s, d) for s in (1, 2) for d in ("activation", "gradient")}


def test_under_bf16_autocast_it_is_equal_to_the_precision_of_bf16(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Trainer, "_autocast", lambda self: torch.autocast("cpu", dtype=torch.bfloat16)
    )
    lab.run("none", "redoer", **SHORT)
    assert max(max(c.apart) for c in SEEN) < 5e-3


# --- no trace -------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ["none", "liar:what=noise"])
def test_weights_gradients_and_random_numbers_are_the_same_with_and_without_to_the_bit(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    seen: list[list[Tensor]] = []
    clip = train.clip_gradients

    def spy(parameters: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
        seen[-1] += [p.grad.clone() for p in parameters if p.grad is not None]
        return clip(parameters, *rest)

    monkeypatch.setattr(train, "clip_gradients", spy)
    marks = [[FIRST, 1, "activation", 1], [FIRST + 1, 2, "gradient", 0]]
    runs = []
    for name in ("script", "redoer"):
        torch.manual_seed(3)
        seen.append([])
        defense = Component(name=name, params={"flags": marks, "quarantine": True})
        events, session = lab.run(attack, defense, **OPEN, **SHORT)
        rows = [(r["loss"], r["grad_norm"], r["flagged"]) for r in events.of("step")]
        runs.append((weights(session), torch.get_rng_state(), rows, events.of("eval")))
    assert SEEN
    (one, state, *rows), (two, state_too, *rows_too) = runs
    assert equal(one, two)
    assert torch.equal(state, state_too)
    assert rows == rows_too
    assert len(seen[0]) == len(seen[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_a_defense_that_does_not_ask_for_it_gets_nothing(lab: Lab) -> None:
    lab.run("none", "plain", **SHORT)
    assert Plain.given and set(Plain.given) == {None}


def test_a_defense_that_learns_can_ask_in_the_warm_up_too(lab: Lab) -> None:
    lab.run("none", "learner", **SHORT)
    assert_all_equal()
    assert {c.step for c in SEEN} == set(range(7))
    SEEN.clear()
    lab.run("none", "redoer", **SHORT)
    assert {c.step for c in SEEN} == set(range(FIRST, 7))


# --- what a defense holds -------------------------------------------------------------------------


def test_the_means_are_gone_when_the_boundary_is_closed(lab: Lab) -> None:
    lab.run("none", "redoer", **SHORT)
    assert exchange._OPEN == {}
    with pytest.raises(RuntimeError, match="only while its signals are checked"):
        KEPT[0].recompute([0])
    with pytest.raises(RuntimeError, match="only while its signals are checked"):
        KEPT[-1].ask([0], [1])


def test_an_answer_does_not_show_in_any_other_way_whether_it_is_a_lie() -> None:
    x = torch.arange(4.0).view(4, 1, 1, 1)

    def redo(stage: int, direction: Any, of: Sequence[int], received: Tensor | None) -> Tensor:
        return x[list(of)]

    def answer(of: Sequence[int], by: Sequence[int], honest: Tensor) -> Tensor:
        out = honest.clone()
        out[0] = -1.0
        return out

    for answers in (None, lambda of, by, honest: honest, answer):
        with exchange.rerun(redo, 0, "activation", None, answers) as again:
            assert again is not None
            told = again.ask([1, 2], [0, 3])
            assert (told._version, told._base, told.grad_fn) == (0, None, None)


# --- what malicious verifiers answer --------------------------------------------------------------


def village(verifiers: Any) -> Tamperer:
    """Return replicas 1 and 3 of stage 1 as attackers that have sent `zeros` since step 2."""
    attackers = [
        Attacker(1, r, 2, Component(name="zeros"), "activation", seed=r, verifiers=verifiers)
        for r in (1, 3)
    ]
    return Tamperer(attackers, History(), "cpu", banned=lambda *_: False)


@pytest.mark.parametrize(
    "verifiers, expected",
    [
        # asked for the work of: an honest one by an honest one, and by an attacker; an attacker by
        # an honest one, by a colluder
        ("honest", [1.0, 1.0, 2.0, 2.0]),
        ("lie", [1.0, -1.0, 2.0, -2.0]),
        ("collude", [1.0, -1.0, 2.0, 0.0]),
    ],
)
def test_malicious_verifiers_answer_as_the_threat_says_once_they_have_acted(
    verifiers: str, expected: list[float]
) -> None:
    x = torch.tensor([1.0, 2.0, 1.0, 2.0]).view(4, 1, 1, 1)
    tamperer = village(verifiers)
    of, by = [0, 0, 1, 1], [2, 1, 2, 3]
    honest = x[of]

    def answers(step: int, sent: Tensor) -> list[float]:
        told = tamperer.answer(1, "activation", step, sent, of, by, honest)
        return told.flatten().tolist()

    assert answers(1, x) == [1.0, 1.0, 2.0, 2.0]  # before the attack
    assert answers(2, x) == [1.0, 1.0, 2.0, 2.0]  # nothing was corrupted yet
    sent = tamperer.send(1, "activation", 2, x, None).x
    assert sent.flatten().tolist() == [1.0, 0.0, 1.0, 0.0]
    assert answers(2, sent) == expected
    assert honest.flatten().tolist() == [1.0, 1.0, 2.0, 2.0]


def test_a_banned_worker_answers_for_nobody() -> None:
    """Its place is held by an honest replica."""
    x = torch.ones(4, 1, 1, 1)
    banned: list[int] = []
    attacker = Attacker(1, 1, 0, Component(name="zeros"), "activation", seed=0, verifiers="lie")
    tamperer = Tamperer([attacker], History(), "cpu", banned=lambda s, r: r in banned)
    sent = tamperer.send(1, "activation", 0, x, None).x
    for told in (-1.0, 1.0):
        answer = tamperer.answer(1, "activation", 0, sent, [0], [1], x[:1])
        assert answer.item() == told
        banned.append(1)
