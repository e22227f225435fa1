"""Quarantine and bans are exact: training goes on as if the ranks had not been there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scripted import Lab, Mark, script
from torch import Tensor

from sentinel_bench.data.batches import Batches
from sentinel_bench.models.build import build_model
from sentinel_bench.pipeline import train

FIRST = 0
"""There is no warm-up here: the first step starts from the first weights."""
GRID = {"train__warmup_steps": 0, "train__steps": 2, "train__grad_clip": 1e9}
Grads = list[Tensor]


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[Grads]:
    """The weight gradients of each step, as they reach the optimizer."""
    kept: list[Grads] = []
    clip = train.clip_gradients

    def spy(parameters: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
        kept.append([p.grad.clone() for p in parameters if p.grad is not None])
        return clip(parameters, *rest)

    monkeypatch.setattr(train, "clip_gradients", spy)
    return kept


def plain(lab: Lab, keep: Sequence[int], **grid: Any) -> tuple[Grads, float]:
    """Return the gradients and the loss of the plain model on the rows of the kept replicas."""
    scenario = lab.scenario(**grid)
    train, replicas = scenario.train, scenario.grid.replicas
    inputs, targets = (
        torch.from_numpy(a).unflatten(0, (replicas, -1))[list(keep)].flatten(0, 1)
        for a in Batches(
            lab.tokens,
            batch_size=train.batch_size,
            seq_len=train.seq_len,
            replicas=replicas,
            seed=0,
        ).train(FIRST)
    )
    model = build_model(scenario, lab.tokens.vocab_size)
    loss = F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return [p.grad for p in model.parameters()], loss.item()


def assert_equal(got: Grads, expected: Grads) -> None:
    """Equal to 1e-6 as a whole; a single small tensor has a little more rounding."""
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert b.norm() > 0
        assert (a - b).norm() <= 5e-6 * b.norm()
    one, two = (torch.cat([g.flatten() for g in grads]) for grads in (got, expected))
    assert (one - two).norm() <= 1e-6 * two.norm()


CASES: list[list[Mark]] = [
    [],
    [(FIRST, 0, "activation", 1)],
    [(FIRST, 2, "activation", 3)],
    [(FIRST, 3, "gradient", 0)],
    [(FIRST, 2, "gradient", 1)],
    [(FIRST, 1, "gradient", 2)],
    [(FIRST, 1, "activation", 0), (FIRST, 2, "gradient", 1)],
    [(FIRST, 3, "gradient", 0), (FIRST, 1, "gradient", 2)],
    [(FIRST, 0, "activation", 3), (FIRST, 3, "gradient", 1), (FIRST, 2, "gradient", 2)],
]


@pytest.mark.parametrize("flags", CASES)
@pytest.mark.parametrize(
    "grid", [GRID, {**GRID, "grid__stages": 4, "model__layers": 6, "train__batch_size": 2}]
)
def test_tainted_ranks_leave_no_trace_in_any_weight_gradient(
    lab: Lab, gradients: list[Grads], flags: list[Mark], grid: dict[str, Any]
) -> None:
    events, _ = lab.run("none", script(*flags, quarantine=True, amnesty=False), **grid)
    keep = sorted({0, 1, 2, 3} - {replica for *_, replica in flags})
    expected, loss = plain(lab, keep, **grid)
    assert_equal(gradients[0], expected)
    row = events.of("step")[0]
    assert row["excluded"] == 4 - len(keep)
    if all(direction == "activation" for _, _, direction, _ in flags):
        assert row["loss"] == pytest.approx(loss, rel=1e-6)


def test_without_quarantine_a_flag_does_leave_a_trace(lab: Lab, gradients: list[Grads]) -> None:
    lab.run("none", script((FIRST, 2, "gradient", 1)), **GRID)
    expected, _ = plain(lab, [0, 2, 3], **GRID)
    with pytest.raises(AssertionError):
        assert_equal(gradients[0], expected)


def test_the_lies_of_quarantined_ranks_leave_no_trace_either(
    lab: Lab, gradients: list[Grads]
) -> None:
    events, _ = lab.run("liar:what=zeros", "script", threat__honest_last=2, **GRID)
    bad = events.of("act")[0]["replica"]
    gradients.clear()
    defense = script((FIRST, 1, "activation", bad), quarantine=True)
    lab.run("liar:what=zeros", defense, threat__honest_last=2, **GRID)
    expected, _ = plain(lab, [r for r in range(4) if r != bad], **GRID)
    assert_equal(gradients[0], expected)


@pytest.mark.parametrize("place", [(1, "activation"), (2, "gradient")])
def test_a_step_whose_ranks_are_all_tainted_is_skipped(lab: Lab, place: tuple[int, str]) -> None:
    flags = [(FIRST, *place, r) for r in range(4)]
    once = {**GRID, "train__steps": 1}
    events, session = lab.run("none", script(*flags, quarantine=True, amnesty=False), **once)
    assert events.of("step")[0]["skipped"] is True
    untouched = build_model(lab.scenario(**once), lab.tokens.vocab_size)
    for trained, new in zip(
        session._trainer.model.parameters(), untouched.parameters(), strict=True
    ):
        assert torch.equal(trained, new)


def test_a_dropped_rank_is_left_out_from_the_step_after_its_ban(
    lab: Lab, gradients: list[Grads]
) -> None:
    # lr is so small that the second step starts, to rounding, from the weights of the first
    grid = {**GRID, "train__lr": 1e-30, "train__steps": 3}
    mark = (FIRST, 1, "activation", 2)
    events, _ = lab.run("none", script(mark, severe=True, on_ban="drop"), **grid)
    assert [(b["step"], b["stage"], b["replica"]) for b in events.of("ban")] == [(FIRST, 1, 2)]
    assert [row["excluded"] for row in events.of("step")] == [0, 1, 1]
    assert_equal(gradients[1], _second(lab, [0, 1, 3], **grid))
    gradients.clear()
    lab.run("none", script(mark, severe=True, on_ban="reroute"), **grid)
    assert_equal(gradients[1], _second(lab, [0, 1, 2, 3], **grid))


def _second(lab: Lab, keep: Sequence[int], **grid: Any) -> Grads:
    model = build_model(lab.scenario(**grid), lab.tokens.vocab_size)
    batch = Batches(lab.tokens, batch_size=1, seq_len=8, replicas=4, seed=0).train(1)
    inputs, targets = (torch.from_numpy(a)[list(keep)] for a in batch)
    loss = F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]
