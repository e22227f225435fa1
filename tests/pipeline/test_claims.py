"""Claims about linear layers: the true ones pass, a wrong one is seen, and it costs little.

Some tests look at a stage alone, the others at all boundaries of a training run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from scripted import Lab, Script, equal, weights
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Again, LinearCheck, Signals
from sentinel_bench.config import Scenario
from sentinel_bench.models.build import build_model
from sentinel_bench.models.presets import layers_per_stage
from sentinel_bench.pipeline import cost, exchange
from sentinel_bench.pipeline.claims import (
    NOT_FINITE,
    Work,
    check_linears,
    claims_of,
    cover,
    projected_error,
    verify,
)
from sentinel_bench.pipeline.loss import rank_loss
from sentinel_bench.pipeline.stages import split
from sentinel_bench.pipeline.train import Trainer

REPLICAS, BATCH, TOKENS, HIDDEN, VOCABULARY = 3, 2, 8, 16, 40
PLACES = [(0, "activation"), (1, "activation"), (1, "gradient"), (2, "gradient")]
"""First, middle and last stage; the last one ends in the loss."""
LAYERS = 7
"""Linear layers of a transformer layer: q, k, v, o, gate, up, down."""
every_place = pytest.mark.parametrize("stage, direction", PLACES)


def bf16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def fp32() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)


@pytest.fixture
def work(make_scenario: Callable[..., Scenario]) -> Callable[..., Work]:
    """Return a function that makes the work of three replicas of a stage."""

    def make(stage: int, direction: str, autocast: Any = fp32, **changes: Any) -> Work:
        scenario = make_scenario(grid__stages=3, grid__replicas=REPLICAS, **changes)
        stages = split(build_model(scenario, VOCABULARY), layers_per_stage(scenario))
        draw = torch.Generator().manual_seed(stage)
        rows, hidden = REPLICAS * BATCH, stages[1].layers[0].hidden_size
        signal = (rows, scenario.train.seq_len, hidden)
        ids = torch.randint(VOCABULARY, signal[:2], generator=draw)
        fed = ids if stage == 0 else torch.randn(signal, generator=draw)
        given = torch.randn(signal, generator=draw)

        def seed(out: Tensor) -> tuple[Tensor, Tensor | None]:
            if stage == 1:
                return out, given
            return rank_loss(out, ids, [False] * REPLICAS) * REPLICAS, None

        backward = direction == "gradient"
        return Work(
            stages[stage],
            fed.requires_grad_(backward),
            REPLICAS,
            autocast,
            seed if backward else None,
        )

    return make


def relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|."""
    return float((a - b).norm() / b.norm())


# --- one claim ------------------------------------------------------------------------------------

X = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
W = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
R = torch.tensor([[1.0], [2.0]])
"""x w = [1, 2], [3, 4]"""


def error(y: list[list[float]], r: Tensor = R, bias: Tensor | None = None) -> float:
    return float(projected_error(torch.tensor([y]).float(), X, W, r, bias))


def test_the_error_of_a_claim_is_relative_to_its_token_or_to_the_mean_of_them():
    assert error([[1, 2], [3, 4]]) == 0
    # wrong by 1, seen with weight 2; the token is larger than the root mean square
    assert error([[1, 2], [3, 5]]) == pytest.approx(2 / math.sqrt(34))
    # the token is smaller than it
    assert error([[1, 3], [3, 4]]) == pytest.approx(2 / math.sqrt((10 + 25) / 2))
    # [2, -1] is orthogonal to the first vector, not to the second one
    assert error([[3, 1], [3, 4]]) == 0
    two = torch.tensor([[1.0, 1.0], [2.0, 0.0]])
    assert error([[3, 1], [3, 4]], two) == pytest.approx(2 / math.sqrt((10 + 25) / 2))


def test_a_bias_is_part_of_the_product():
    bias = torch.tensor([10.0, 20.0])
    assert error([[11, 22], [13, 24]], bias=bias) == 0
    assert error([[1, 2], [3, 4]], bias=bias) > 1


def test_replicas_are_apart():
    y = torch.stack([X[0] @ W, X[0] @ W * 2])
    found = projected_error(y, X.expand(2, -1, -1), W, R)
    assert found[0] == 0
    assert found[1] > 0.1


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_a_claim_that_is_not_finite_or_overflows_is_wrong(value):
    assert error([[1, value], [3, 4]]) == error([[1, 2], [value, value]]) == NOT_FINITE


@pytest.mark.parametrize("size", [1e-18, 1e18, 1e25])
def test_errors_of_any_size_are_seen(size):
    """Squares of these overflow, or vanish, in float32."""
    y = X @ W * size
    assert float(projected_error(y, X * size, W, R)) < 1e-6
    y[0, 1, 1] *= 1.25
    assert float(projected_error(y, X * size, W, R)) == pytest.approx(2 / math.sqrt(34), rel=1e-5)


def test_zeros_for_zeros_are_right_and_for_anything_else_wrong():
    zeros = torch.zeros(1, 2, 2)
    assert float(projected_error(zeros, zeros, W, R)) == 0
    assert float(projected_error(zeros, X, W, R)) > 1


@pytest.mark.parametrize("k", [1, 2])
def test_a_wrong_claim_passes_as_often_as_the_normal_distribution_says(k):
    tolerance, apart, trials, width = 0.1, 0.25, 4000, 8
    draw = torch.Generator().manual_seed(k)
    w = torch.eye(width)
    x = torch.ones(1, 1, width) / math.sqrt(width)
    y = x.clone()
    y[..., 0] += apart
    size = float(y.norm())
    r = torch.randn(trials, width, k, generator=draw)
    passed = sum(float(projected_error(y, x, w, v)) <= tolerance for v in r) / trials
    expected = math.erf(tolerance * size / apart / math.sqrt(2)) ** k
    assert 0.05 < expected < 0.5
    assert abs(passed - expected) < 4 * math.sqrt(expected * (1 - expected) / trials)


# --- the claims of a stage ------------------------------------------------------------------------


@every_place
def test_true_claims_lead_to_the_honest_signal_and_pass(work, stage, direction):
    job = work(stage, direction)
    claims, honest = claims_of(job)
    found = verify(job, claims, 4, seed=1)
    assert honest.shape == (REPLICAS, BATCH, TOKENS, HIDDEN)
    assert torch.equal(honest, job.run()[0])
    assert relative(found.result, honest) < 1e-6
    assert found.error.shape == (REPLICAS,)
    assert found.error.min() > 0
    assert found.error.max() < 1e-5


@every_place
def test_under_bf16_autocast_they_do_so_to_the_precision_of_bf16(work, stage, direction):
    job = work(stage, direction, bf16)
    claims, honest = claims_of(job)
    assert all(y.dtype == torch.bfloat16 for y in claims.outputs)
    found = verify(job, claims, 4, seed=1)
    assert relative(found.result, honest) < 1e-6
    assert 1e-4 < found.error.max() < 1.5e-2


def test_the_verifier_rounds_what_goes_into_a_product_as_the_worker_did(work):
    """In bf16 the result alone is rounded: without the inputs, errors are a third smaller."""
    job = work(1, "activation", bf16)
    claims, _ = claims_of(job)
    errors = torch.stack([verify(job, claims, 4, seed=s).error for s in range(20)])
    assert 4e-3 < errors.mean() < 6.5e-3


@every_place
def test_there_is_a_claim_for_each_layer_and_direction(work, stage, direction):
    claims, _ = claims_of(work(stage, direction))
    head = stage == 2
    assert len(claims.outputs) == LAYERS + head
    assert len(claims.gradients) == (LAYERS + head if direction == "gradient" else 0)
    assert claims.readers == [0, 1, 2]
    widths = [16, 8, 8, 16, 32, 32, 16, *[VOCABULARY] * head]
    assert [y.shape[-1] for y in claims.outputs] == widths
    reads = [16, 16, 16, 16, 16, 16, 32, 16]
    assert [g.shape[-1] for g in claims.gradients] == reads[: len(claims.gradients)]


def kinds(stage: int, direction: str) -> list[tuple[str, int]]:
    layers = range(LAYERS + (stage == 2))
    both = ["outputs", "gradients"] if direction == "gradient" else ["outputs"]
    return [(kind, i) for kind in both for i in layers]


@pytest.mark.parametrize("autocast, change", [(fp32, 1e-3), (bf16, 1e-1)])
@every_place
def test_a_change_in_any_single_claim_is_seen_at_its_replica_alone(
    work, stage, direction, autocast, change
):
    job = work(stage, direction, autocast)
    tolerance = 1e-4 if autocast is fp32 else 1.5e-2
    noise = torch.Generator().manual_seed(0)
    for kind, i in kinds(stage, direction):
        claims, _ = claims_of(job)
        claim = getattr(claims, kind)[i]
        row = claim[BATCH]  # of replica 1
        row += change * row.norm() / row.numel() ** 0.5 * torch.randn(row.shape, generator=noise)
        found = verify(job, claims, 4, seed=2).error
        assert found[1] > tolerance, (kind, i)
        assert found[[0, 2]].max() < tolerance, (kind, i)


def test_the_verifier_computes_what_lies_between_from_the_claims(work):
    """A wrong claim changes what comes after it: nothing of the honest work is used instead."""
    job = work(1, "activation")
    claims, honest = claims_of(job)
    claims.outputs[3] = claims.outputs[3] * 1.5
    found = verify(job, claims, 4, seed=3)
    assert relative(found.result, honest) > 1e-2
    expected = job.fed + claims.outputs[3] + claims.outputs[6]
    assert relative(found.result, expected.view_as(honest)) < 1e-6


def test_other_vectors_are_drawn_from_another_seed_and_the_same_from_the_same(work):
    job = work(1, "gradient")
    claims, _ = claims_of(job)
    one, two, other = (verify(job, claims, 4, seed=s).error for s in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@every_place
def test_neither_the_stage_nor_global_random_numbers_are_touched(work, stage, direction):
    job = work(stage, direction)
    before = [p.clone() for p in job.stage.parameters()]
    state = torch.get_rng_state()
    names = [set(vars(m)) for m in job.stage.modules()]
    check_linears(job, [0, 1, 2], {1: torch.zeros(BATCH, TOKENS, HIDDEN)}, 2, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert [set(vars(m)) for m in job.stage.modules()] == names
    for parameter, value in zip(job.stage.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is None


# --- the story of a liar --------------------------------------------------------------------------


def lied(honest: Tensor, size: float, replica: int = 1) -> Tensor:
    """Return signals of which one is wrong by `size`, relative to its norm."""
    noise = torch.randn(honest.shape[1:], generator=torch.Generator().manual_seed(9))
    sent = honest.clone()
    sent[replica] += size * noise / noise.norm() * honest[replica].norm()
    return sent


def along(x: Tensor, y: Tensor) -> Tensor:
    """Return of `y` what is along `x`, token by token."""
    return x * (x * y).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True)


@every_place
@pytest.mark.parametrize("size", [1e-2, 1.0, 100.0])
def test_the_story_of_a_liar_ends_in_what_it_sent_and_the_others_stay_honest(
    work, stage, direction, size
):
    job = work(stage, direction)
    claims, honest = claims_of(job)
    sent = lied(honest, size)
    if direction == "gradient":  # the norm lets nothing else through
        x = job.fed.detach().view_as(honest)
        sent = sent - along(x, sent - honest)
    cover(job, claims, sent, honest)
    found = verify(job, claims, 4, seed=4)
    for replica in range(REPLICAS):
        assert relative(found.result[replica], sent[replica]) < 1e-5
    assert found.error[1] > size / 10 if size < 1 else found.error[1] > 0.5
    assert found.error[[0, 2]].max() < 1e-5


def test_what_a_norm_does_not_let_through_stays_without_a_story(work):
    job = work(1, "gradient")
    claims, honest = claims_of(job)
    sent = lied(honest, 1.0)
    cover(job, claims, sent, honest)
    left = verify(job, claims, 4, seed=5).result[1] - sent[1]
    x = job.fed.detach().view_as(honest)[1]
    lie = (sent - honest)[1]
    assert relative(left, -along(x, lie)) < 1e-4
    assert 0.5 / HIDDEN < float(left.norm() / lie.norm()) ** 2 < 2 / HIDDEN


def test_a_liar_changes_the_last_layer_alone(work):
    for direction, kind, changed in (
        ("activation", "outputs", {LAYERS - 1}),
        ("gradient", "gradients", {0, 1, 2}),
    ):
        job = work(1, direction)
        claims, honest = claims_of(job)
        truth, _ = claims_of(job)
        cover(job, claims, lied(honest, 1.0), honest)
        for name in ("outputs", "gradients"):
            pairs = zip(getattr(claims, name), getattr(truth, name), strict=True)
            differ = {i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)}
            assert differ == (changed if name == kind else set())


def test_a_lie_is_spread_in_proportion_to_what_the_layers_say(work):
    job = work(1, "gradient")
    claims, honest = claims_of(job)
    truth, _ = claims_of(job)
    cover(job, claims, lied(honest, 1.0), honest)
    added = [relative(claims.gradients[i], truth.gradients[i]) for i in range(3)]
    assert added == pytest.approx([added[0]] * 3, rel=1e-4)


def test_gradients_that_are_all_zeros_can_be_lied_about(work):
    job = work(1, "gradient")
    zero = Work(job.stage, job.fed, REPLICAS, fp32, lambda out: (out, torch.zeros_like(out)))
    lie = {1: torch.ones(BATCH, TOKENS, HIDDEN)}
    honest = check_linears(zero, [0, 1, 2], {}, 4, seed=0)
    assert honest.error.max() < 1e-5
    assert honest.result.abs().max() == 0
    found = check_linears(zero, [0, 1, 2], lie, 4, seed=0)
    assert found.error[1] > 0.5
    assert found.error[[0, 2]].max() < 1e-5


def test_honest_claims_stay_beside_a_lie_of_any_kind_to_the_bit(work):
    for direction in ("activation", "gradient"):
        job = work(1, direction)
        job.stage.layers[0].input_layernorm.weight.data[3] = 0  # lets nothing through
        truth, honest = claims_of(job)
        claims, _ = claims_of(job)
        sent = honest.clone()
        sent[1] = torch.inf
        cover(job, claims, sent, honest)
        others = [0, 1, 4, 5]  # rows of replicas 0 and 2
        told = zip(claims.outputs + claims.gradients, truth.outputs + truth.gradients, strict=True)
        assert all(torch.equal(a[others], b[others]) for a, b in told)
        assert verify(job, claims, 4, seed=0).error[1] == NOT_FINITE


def test_lies_belong_to_replicas_in_whatever_order_these_are_asked(work):
    job = work(1, "activation")
    honest = job.run()[0]
    lies = {7: honest[2] * 2, 4: honest[0] * 2}
    found = check_linears(job, [2, 5, 7], lies, 4, seed=0)
    assert (found.error > 1e-2).tolist() == [False, False, True]
    assert relative(found.result[2], honest[2] * 2) < 1e-5


# --- what it costs --------------------------------------------------------------------------------

WIDE = {
    "model__hidden_size": 128,
    "model__intermediate_size": 512,
    "train__seq_len": 64,
}


def flops(function: Callable[[], Any]) -> int:
    with cost.FlopCounter() as counter:
        function()
    return counter.flops


@every_place
def test_a_check_takes_far_fewer_operations_than_the_work_where_layers_are_wide(
    work, stage, direction
):
    job = work(stage, direction, **WIDE)
    claims, _ = claims_of(job)
    assert 5 * flops(lambda: verify(job, claims, 2, seed=0)) < flops(job.run)


def test_a_claim_costs_what_the_formula_says():
    n, tokens, wide, out, k = 1, 256, 128, 160, 4
    x, w, r = torch.randn(n, tokens, wide), torch.randn(wide, out), torch.randn(out, k)
    y = x @ w
    products = 2 * k * (wide * out + tokens * (wide + out))
    counted = flops(lambda: projected_error(y, x, w, r))
    assert products < counted < products + 2 * y.numel() + 20 * tokens * k
    assert counted < 2 * tokens * wide * out / 10


def test_claims_travel_and_only_the_verifier_is_counted(work):
    job = work(1, "gradient")
    claims, _ = claims_of(job)
    numbers = REPLICAS * BATCH * TOKENS * (16 * 3 + 8 * 2 + 32 * 2 + 16 * 6 + 32)
    assert claims.nbytes == 4 * numbers
    low, _ = claims_of(work(1, "gradient", bf16))
    assert low.nbytes == 2 * numbers
    with cost.Meter([1, 1, 1]) as meter:
        check_linears(job, [0, 1, 2], {}, 2, seed=0)
    assert meter.bytes == 4 * numbers
    assert meter.flops == flops(lambda: verify(job, claims, 2, seed=0))


# --- in a pipeline --------------------------------------------------------------------------------

FOUND: list[tuple[int, str, float, float, float]] = []
"""stage, direction, size of a lie, error of the claims, difference of what follows from them"""
KEPT: list[Again] = []
ALL = {"threat__mode": "both", "threat__honest_first": 1, "threat__honest_last": 0}
SIGNALS = [
    n
    for n in registry.attacks.names()
    if registry.attacks.get(n).axis == "signals" and not registry.attacks.get(n).fault
]
EARLY = {"delay": "delay:steps=1"}
"""Those that would send nothing wrong in a run of so few steps."""


def row_distances(a: Tensor, b: Tensor) -> list[float]:
    size = a.flatten(1).norm(dim=1).maximum(b.flatten(1).norm(dim=1)).clamp_min(1e-30)
    return ((a - b).flatten(1).norm(dim=1) / size).tolist()


class Examiner(Script):
    """A script that also tests all claims at every boundary."""

    name: ClassVar[str] = "examiner"
    needs_again = True
    learns = False

    def check(self, signals: Signals) -> Any:
        again = signals.again
        assert again is not None
        KEPT.append(again)
        everybody = list(range(len(signals.sent)))
        found: LinearCheck = again.check_linears(everybody, 4, 100 * signals.step + signals.stage)
        for tensor in (found.result, found.error):
            assert tensor.grad_fn is None
        for row in zip(
            row_distances(signals.sent, again.recompute(everybody)),
            found.error.tolist(),
            row_distances(signals.sent, found.result),
            signals.active.tolist(),
            strict=True,
        ):
            if row[3]:
                FOUND.append((signals.stage, signals.direction, *row[:3]))
        return super().check(signals)


@pytest.fixture(autouse=True)
def _plugged(plug: Callable[..., None]) -> None:
    plug(Examiner)
    FOUND.clear()
    KEPT.clear()


@pytest.fixture(params=["fp32", "bf16"])
def tolerance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the tolerance of a precision, which is in force."""
    if request.param == "fp32":
        return 1e-4
    monkeypatch.setattr(Trainer, "_autocast", lambda self: bf16())
    return 2e-2


SCHEDULES = {
    "random": {"train__steps": 4, "train__warmup_steps": 0},
    "trained": {"train__steps": 60, "train__warmup_steps": 56, "train__lr": 1e-2},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_claims_of_honest_workers_are_true_to_rounding(
    lab: Lab, tolerance: float, schedule: str
) -> None:
    events, _ = lab.run("none", "examiner", **SCHEDULES[schedule])
    losses = [row["loss"] for row in events.of("step")]
    assert (losses[-1] < losses[0] - 1) == (schedule == "trained")
    assert {(s, d) for s, d, *_ in FOUND} == {
        *((s, "activation") for s in range(3)),
        *((s, "gradient") for s in (1, 2, 3)),
    }
    assert max(error for *_, error, _ in FOUND) < tolerance / 1.5
    assert max(apart for *_, apart in FOUND) < tolerance / 10


@pytest.mark.parametrize("attack", SIGNALS)
def test_every_lie_beyond_the_tolerance_shows_and_nothing_else(
    lab: Lab, tolerance: float, attack: str
) -> None:
    if not registry.attacks.get(attack).finite:
        pytest.skip("it is not shown to a defense")
    lab.run(EARLY.get(attack, attack), "examiner", **ALL)
    shows = [(size, error > tolerance or apart > tolerance) for *_, size, error, apart in FOUND]
    assert all(seen for size, seen in shows if size > tolerance)
    assert not any(seen for size, seen in shows if size < 1e-6)
    assert any(size > 1e-6 for size, _ in shows) == (attack != "none")


def test_a_worker_that_poisons_itself_tells_a_story_too(lab: Lab) -> None:
    lab.run("liar:what=noise", "examiner", threat__poison_self=True, **ALL)
    lies = [row for row in FOUND if row[2] > 1e-2]
    assert {direction for _, direction, *_ in lies} == {"activation", "gradient"}
    assert all(error > 1e-2 for *_, error, _ in lies)
    for _, direction, size, _, apart in lies:
        assert apart < (1e-6 if direction == "activation" else size)


def test_a_run_with_and_without_is_the_same_to_the_bit(lab: Lab) -> None:
    runs = []
    for name in ("script", "examiner"):
        torch.manual_seed(3)
        events, session = lab.run("liar:what=noise", name, **ALL)
        rows = [(r["loss"], r["grad_norm"]) for r in events.of("step")]
        runs.append((weights(session), torch.get_rng_state(), rows))
    (one, state, rows), (two, state_too, rows_too) = runs
    assert FOUND
    assert equal(one, two)
    assert torch.equal(state, state_too)
    assert rows == rows_too


def test_the_means_are_gone_when_the_boundary_is_closed(lab: Lab) -> None:
    lab.run("none", "examiner", train__steps=5)
    with pytest.raises(RuntimeError, match="only while its signals are checked"):
        KEPT[-1].check_linears([0], 1, 0)


def test_where_nobody_knows_the_layers_the_work_is_done_again() -> None:
    x = torch.arange(4.0).view(4, 1, 1, 1)
    with exchange.rerun(lambda s, d, of, received: x[list(of)], 0, "activation", None) as again:
        assert again is not None
        found = again.check_linears([2, 1], 4, 0)
    assert found.result.flatten().tolist() == [2, 1]
    assert found.error.tolist() == [0, 0]
    assert found.error.dtype == torch.float64


@pytest.mark.parametrize("attack", SIGNALS)
def test_freivalds_at_q_1_bans_every_attacker_at_its_first_lie_and_nobody_else(
    lab: Lab, attack: str
) -> None:
    events, _ = lab.run(EARLY.get(attack, attack), "freivalds:q=1", **ALL)
    acts = {(a["step"], a["stage"], a["replica"]) for a in events.of("act")}
    bans = {(b["step"], b["stage"], b["replica"]) for b in events.of("ban")}
    assert bans == acts
    assert bool(acts) == (attack != "none")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_freivalds_flags_no_honest_worker(lab: Lab, tolerance: float, schedule: str) -> None:
    events, _ = lab.run("none", f"freivalds:q=1,rtol={tolerance}", **SCHEDULES[schedule])
    assert events.of("flag") == []
