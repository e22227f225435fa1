"""A step in microbatches, in one process: the sums are those of the whole batch, lies or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import meshlab
import pytest
import torch
from meshlab import Again, Planter, Scales
from scripted import (
    FROZEN,
    Events,
    Grads,
    Lab,
    Plain,
    Script,
    ScriptParams,
    assert_close,
    attackers,
    equal,
    only,
    script,
    spy_gradients,
    weights,
)
from torch import Tensor

from sentinel_bench.api import Signals, Verdict
from sentinel_bench.config import Component
from sentinel_bench.errors import RunError
from sentinel_bench.pipeline.boundary import Boundary
from sentinel_bench.pipeline.session import Session
from sentinel_bench.pipeline.team import join_rows, split_rows

ONE = {**FROZEN, "train__steps": 1, "train__batch_size": 4}
Part = tuple[int, str, int, int]
"""stage, direction, microbatch, replica"""
HEARD: dict[tuple[int, int, str, int], Tensor] = {}
"""Step, stage, direction and microbatch: what was sent."""


class PartsParams(ScriptParams):
    parts: list[Part] = []


class Parts(Script):
    """Flags a replica in one microbatch of the first step; keeps what it sees."""

    name: ClassVar[str] = "parts"
    Params = PartsParams

    def check(self, signals: Signals) -> Verdict:
        s = signals
        HEARD[s.step, s.stage, s.direction, s.microbatch] = s.sent.clone()
        place = s.stage, s.direction, s.microbatch
        marks = [s.step == 0 and (*place, r) in self.params.parts for r in range(len(s.sent))]
        flagged = torch.tensor(marks)
        return Verdict(flagged, flagged & self.params.severe)

    def learn(self, signals: Signals, clean: Tensor) -> None: ...


@pytest.fixture(autouse=True)
def _plugins(plug: Callable[..., None]) -> Iterator[None]:
    plug(Parts, Again, Planter, Scales)
    HEARD.clear()
    yield
    HEARD.clear()


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[Grads]:
    return spy_gradients(monkeypatch)


def parts(*flags: Part, **params: Any) -> Component:
    return Component(name="parts", params={"parts": [list(f) for f in flags], **params})


# --- honest ---------------------------------------------------------------------------------------


def test_rows_are_cut_by_replica_and_joined_again() -> None:
    x = torch.arange(2 * 6).view(12, 1)
    cut = split_rows(x, 2, 3)
    assert [c.flatten().tolist() for c in cut] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert join_rows(cut, 2).equal(x)
    assert split_rows(x, 2, 1)[0] is x
    assert join_rows([x], 2) is x


@pytest.mark.parametrize("defense, count", [("none", 2), ("script", 4)])
def test_microbatches_train_the_same_weights_as_the_whole_batch(
    lab: Lab, defense: str, count: int
) -> None:
    runs = {}
    grid = {"train__batch_size": 4, "train__steps": 6, "train__warmup_steps": 3, "train__lr": 0.1}
    for n in (1, count):
        with meshlab.plain_optimizer():
            events, session = lab.run("none", defense, train__microbatches=n, **grid)
        runs[n] = events, weights(session)
    (one, w), (many, v) = runs[1], runs[count]
    for a, b in zip(
        one.of("step") + one.of("eval"), many.of("step") + many.of("eval"), strict=True
    ):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
    assert meshlab.distance(v, w) < 1e-6
    start = lab.session([lab.cell("none", defense, train__steps=1, train__warmup_steps=0)])
    assert meshlab.distance(w, weights(start)) > 1e-3  # they have moved


def test_gradients_of_microbatches_are_those_of_the_plain_model(
    lab: Lab, gradients: list[Grads]
) -> None:
    grid = {**ONE, "train__microbatches": 4}
    lab.run("none", "script", **grid)
    assert_close(gradients[0], Plain(lab.scenario(**grid), lab.tokens).mean(range(4)))


# --- who is left out ------------------------------------------------------------------------------

LEFT_OUT: list[list[Part]] = [
    [(1, "activation", 0, 2)],
    [(1, "activation", 3, 2)],
    [(2, "gradient", 0, 1)],
    [(2, "gradient", 2, 1)],
    [(3, "gradient", 3, 0), (1, "gradient", 0, 2)],
    [(0, "activation", 1, 3), (2, "gradient", 2, 1), (1, "gradient", 1, 0)],
    [(2, "activation", m, 1) for m in range(4)],
]


@pytest.mark.parametrize("flags", LEFT_OUT)
def test_a_rank_that_is_tainted_in_any_microbatch_leaves_no_trace_in_any_weight(
    lab: Lab, gradients: list[Grads], flags: list[Part]
) -> None:
    grid = {**ONE, "train__microbatches": 4}
    events, _ = lab.run("none", parts(*flags, quarantine=True), **grid)
    keep = sorted({0, 1, 2, 3} - {replica for *_, replica in flags})
    assert_close(gradients[0], Plain(lab.scenario(**grid), lab.tokens).mean(keep))
    row = events.of("step")[0]
    assert row["excluded"] == 4 - len(keep)
    assert [f["microbatch"] for f in events.of("flag")] == [m for _, _, m, _ in _in_order(flags)]


def _in_order(flags: list[Part]) -> list[Part]:
    """Forward come the microbatches one after the other, then they go back."""
    forward = sorted((f for f in flags if f[1] == "activation"), key=lambda f: (f[2], f[0]))
    back = sorted((f for f in flags if f[1] == "gradient"), key=lambda f: (f[2], -f[0]))
    return forward + back


@pytest.mark.parametrize("mode", ["activation", "gradient"])
@pytest.mark.parametrize("caught", [0, 1, 3])
def test_whatever_a_quarantined_rank_has_sent_the_weights_are_the_same_bit_for_bit(
    lab: Lab, mode: str, caught: int
) -> None:
    grid = {**ONE, **only(1, 4), "train__microbatches": 4, "threat__mode": mode, "train__lr": 0.1}
    (bad,) = attackers(lab, "zeros", **grid)
    after = {}
    for lie in ("what=zeros", "what=noise", "what=oldest,depth=1"):
        defense = parts((1, mode, caught, bad.replica), quarantine=True, amnesty=False)
        _, session = lab.run(f"liar:{lie}", defense, **grid)
        after[lie] = weights(session)
    assert all(equal(after["what=zeros"], other) for other in after.values())
    _, honest = lab.run("none", "script", **grid)
    assert not equal(weights(honest), after["what=zeros"])


def test_without_quarantine_only_the_gradients_of_the_flagged_microbatch_are_replaced(
    lab: Lab, gradients: list[Grads]
) -> None:
    grid = {**ONE, "train__microbatches": 4, "grid__stages": 3}
    flag: Part = (1, "gradient", 2, 3)
    lab.run("none", parts(flag, substitute="zeros"), **grid)
    lab.run("none", parts(flag, substitute="zeros"), **{**grid, "train__microbatches": 1})
    lab.run("none", parts(*[(*flag[:2], m, 3) for m in range(4)], substitute="zeros"), **grid)
    plain = Plain(lab.scenario(**grid), lab.tokens)

    def upstream(share: float) -> Grads:
        """Stage 0 has only this share of replica 3; the others have all."""
        return plain.mean(range(4), lambda s, r: share if (s, r) == (0, 3) else 1.0)

    first = [i for i, stage in enumerate(plain.stages) if stage == 0]
    whole, none = upstream(1.0), upstream(0.0)
    for i in range(len(whole)):
        if i not in first:
            assert_close([gradients[0][i]], [whole[i]])
            assert_close([gradients[2][i]], [whole[i]])
    assert_close([gradients[2][i] for i in first], [none[i] for i in first])
    quarter = [gradients[0][i] for i in first]
    with pytest.raises(AssertionError):
        assert_close(quarter, [whole[i] for i in first])
    with pytest.raises(AssertionError):
        assert_close(quarter, [none[i] for i in first])


def test_the_loss_that_is_shown_counts_what_counted_in_each_microbatch(
    lab: Lab, gradients: list[Grads]
) -> None:
    grid = {**ONE, "train__microbatches": 2, "train__batch_size": 2}
    plain = Plain(lab.scenario(**grid), lab.tokens)
    inputs, targets = plain.batch()
    losses = torch.stack(
        [
            torch.stack(
                [
                    torch.nn.functional.cross_entropy(
                        plain.model(input_ids=inputs[r, m : m + 1]).logits.flatten(0, 1),
                        targets[r, m : m + 1].flatten(),
                    )
                    for m in range(2)
                ]
            )
            for r in range(4)
        ]
    )
    events, _ = lab.run("none", parts((1, "activation", 1, 2), quarantine=True), **grid)
    counted = torch.ones(4, 2)
    counted[2, 1] = 0
    expected = float((losses * counted).detach().sum() / counted.sum())
    assert events.of("step")[0]["loss"] == pytest.approx(expected, rel=1e-6)


def test_if_all_ranks_are_tainted_each_in_its_own_microbatch_the_step_is_skipped(lab: Lab) -> None:
    grid = {**ONE, "train__microbatches": 4}
    flags: list[Part] = [(2, "gradient", r, r) for r in range(4)]
    events, session = lab.run("none", parts(*flags, quarantine=True), **grid)
    row = events.of("step")[0]
    assert (row["excluded"], row["skipped"]) == (4, True)
    fresh = lab.session([lab.cell("none", "script", **grid)])
    assert equal(weights(session), weights(fresh))


# --- work done again, and the past ----------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
def test_work_done_again_is_what_was_sent_in_each_microbatch(lab: Lab, count: int) -> None:
    grid = {"train__batch_size": 4, "train__microbatches": count, "train__steps": 7}
    events, _ = lab.run("none", "again", **grid)
    assert len(events.of("step")) == 7


@pytest.mark.parametrize("depth", [1, 3])
def test_a_past_signal_is_that_of_the_same_microbatch(lab: Lab, depth: int) -> None:
    grid = {
        **only(1, 4),
        "threat__mode": "both",
        "train__batch_size": 4,
        "train__microbatches": 4,
        "train__steps": 10,
        "train__warmup_steps": 5,
    }
    (bad,) = attackers(lab, "delay", **grid)
    lab.run("none", "parts", **grid)
    honest = dict(HEARD)
    HEARD.clear()
    lab.run(f"delay:steps={depth}", "parts", **grid)
    for microbatch in range(4):
        for direction in ("activation", "gradient"):
            key = 5, 1, direction, microbatch  # the first attacked step
            old = honest[5 - depth, 1, direction, microbatch]
            if direction == "activation":
                assert HEARD[key][bad.replica].equal(old[bad.replica])
            assert not HEARD[key][bad.replica].equal(honest[key][bad.replica])
            # and so on: within the delay all comes from the warm-up
            for step in range(5, 5 + depth):
                sent = HEARD[step, 1, direction, microbatch][bad.replica]
                assert sent.equal(honest[step - depth, 1, direction, microbatch][bad.replica])


# --- boundaries that lose a message ---------------------------------------------------------------


@pytest.mark.parametrize("direction", ["activation", "gradient"])
@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("count", [1, 2])
def test_a_lost_or_doubled_message_ends_the_run(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, direction: str, change: int, count: int
) -> None:
    cross = Boundary.cross

    def strange(self: Boundary, h: Tensor, taint: Tensor, **where: Any) -> Any:
        out = cross(self, h, taint, **where)
        wrong = self.index == 1 and where["microbatch"] == 0
        if wrong and where["backward"] == (direction == "gradient"):
            if change > 0:
                cross(self, h, taint, **where)
            else:
                self.events[direction] -= 1  # as if it had not come
        return out

    monkeypatch.setattr(Boundary, "cross", strange)
    grid = {**ONE, "train__microbatches": count}
    seen = {d: count + change * (d == direction) for d in ("activation", "gradient")}
    with pytest.raises(RunError) as error:
        lab.run("none", "script", **grid)
    assert str(error.value) == (
        f"boundary 1 saw {seen} in one pass, not {count} of each: a message was lost or came twice"
    )


def test_a_wire_without_anybody_at_it_counts_nothing(lab: Lab) -> None:
    cell = lab.cell("none", "none", **ONE)
    session = Session(cell.scenario, [cell], lab.tokens)
    session.warm_up()
    session.run(cell, Events())
    assert all({*b.events.values()} == {0} for b in session._trainer._boundaries.values())


def test_the_scripted_flags_of_all_microbatches_are_those_of_a_rank(lab: Lab) -> None:
    grid = {**ONE, "train__microbatches": 2}
    events, _ = lab.run("none", script((0, 1, "activation", 2)), **grid)
    assert [(f["microbatch"], f["replica"]) for f in events.of("flag")] == [(0, 2), (1, 2)]
    assert events.of("step")[0]["flagged"] == [2, 0]
