"""Dispersion: sizes, angles and losses by hand; who is flagged, what is learnt, what is let be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Setup, Signals, Updates, Verdict
from sentinel_bench.config import Cell, Component, Scenario
from sentinel_bench.data.tokens import Tokens
from sentinel_bench.defenses.dispersion import Dispersion, compare, relative
from sentinel_bench.defenses.tokens import LIMIT
from sentinel_bench.pipeline.session import Session

STAGES, REPLICAS, PARAMETERS = 3, 8, 400
LAST = STAGES - 1


@dataclass
class Desk:
    """Hands in given vectors `[replicas, parameters]` and, at the last stage, losses."""

    vectors: Tensor
    loss: Tensor | None = None

    def sent(self, of: Sequence[int]) -> Tensor:
        return self.vectors[list(of)]

    def recompute(self, of: Sequence[int]) -> Tensor:
        raise AssertionError("nothing is computed again")

    def project(self, of: Sequence[int], onto: Tensor) -> Tensor:
        raise AssertionError("nothing is projected")

    def losses(self) -> Tensor | None:
        return self.loss


def honest(seed: int, replicas: int = REPLICAS) -> Tensor:
    """Gradients of norm about 20 with a cosine of about 1/2 between any two."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(PARAMETERS, generator=generator)
    own = torch.randn(replicas, PARAMETERS, generator=generator)
    return (shared + own) / math.sqrt(2)


def losses(seed: int, replicas: int = REPLICAS) -> Tensor:
    draw = torch.randn(replicas, generator=torch.Generator().manual_seed(1000 + seed))
    return 5.0 + 0.05 * draw


def started(text: str = "dispersion", replicas: int = REPLICAS) -> Dispersion:
    defense = registry.defenses.create(Component.parse(text))
    assert isinstance(defense, Dispersion)
    defense.start(Setup(STAGES, replicas, (1, 2, 4)))
    return defense


def updates(
    vectors: Tensor,
    loss: Tensor | None = None,
    active: Sequence[bool] | None = None,
    kind: Any = "gradient",
    stage: int = 1,
) -> Updates:
    mask = torch.ones(len(vectors), dtype=torch.bool) if active is None else torch.tensor(active)
    return Updates(stage, 0, kind, mask, Desk(vectors, loss))


def step(defense: Dispersion, *given: Updates) -> list[Verdict]:
    """Check updates, learn from the unflagged ones, and close the step."""
    verdicts = []
    for one in given:
        verdicts.append(defense.check_updates(one))
        defense.learn_updates(one, one.active & ~verdicts[-1].flagged)
    defense.end_step(0)
    return verdicts


def at_last(seed: int) -> Updates:
    return updates(honest(seed), losses(seed), stage=LAST)


def warmed(text: str = "dispersion") -> Dispersion:
    """Return it after 20 honest steps at the stages 1 and 2."""
    defense = started(text)
    for seed in range(20):
        step(defense, updates(honest(seed)), at_last(100 + seed))
    return defense


def flagged(verdict: Verdict) -> list[int]:
    return verdict.flagged.nonzero().flatten().tolist()


def severe(verdict: Verdict) -> list[int]:
    return verdict.severe.nonzero().flatten().tolist()


# --- the statistics -------------------------------------------------------------------------------


def test_norm_and_cosine_by_hand() -> None:
    vectors = torch.tensor([[3.0, 4.0], [10.0, 0.0], [0.0, 20.0]])
    norm, cosine = compare(vectors).tolist()
    assert norm == pytest.approx([math.log(0.5), 0.0, math.log(2)], abs=1e-6)
    assert cosine == pytest.approx([0.7 - 0.4, 0.3 - 0.4, 0.4 - 0.4], abs=1e-6)


def test_the_median_of_an_even_number_is_the_mean_of_the_two_in_the_middle() -> None:
    found = relative(torch.tensor([1.0, 2.0, 4.0, 100.0]))
    assert found.tolist() == pytest.approx([math.log(x / 3) for x in (1, 2, 4, 100)])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_vector_that_cannot_be_measured_counts_as_if_it_were_not_there(bad: float) -> None:
    """1e30 is a number, but its square is none in float32."""
    vectors = honest(0, 6)
    vectors[2, 7] = bad
    found, others = compare(vectors), [0, 1, 3, 4, 5]
    assert found[:, 2].isnan().all()
    torch.testing.assert_close(found[:, others], compare(vectors[others]))
    assert found[:, others].isfinite().all()


def test_vanished_gradients_give_finite_numbers() -> None:
    vectors = torch.tensor([[0.0, 0], [1, 0], [1, 0], [1, 0]])
    norm, cosine = compare(vectors).tolist()
    assert norm == pytest.approx([-LIMIT, 0, 0, 0])
    assert cosine == pytest.approx([-2 / 3, 0, 0, 0], abs=1e-6)
    assert compare(torch.zeros(4, 2)).tolist() == [[0.0] * 4, [0.0] * 4]


def test_gradients_of_any_usual_size_are_measured_alike() -> None:
    for scale in (1e-9, 1e9):
        torch.testing.assert_close(compare(honest(0) * scale), compare(honest(0)))


def test_bfloat16_is_measured_in_float32() -> None:
    low = honest(0).bfloat16()
    one, other = (started().check_updates(updates(x)).statistics for x in (low, low.float()))
    assert {*one} == {"norm", "cosine"}
    for name in one:
        assert torch.equal(one[name][0], other[name][0])


# --- who is flagged -------------------------------------------------------------------------------

LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "the wrong sign": lambda x: -x,
    "another direction": lambda x: x.flip(0),
    "too long": lambda x: 2 * x,
    "too short": lambda x: 0.5 * x,
    "nothing": lambda x: 0 * x,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_gradient_unlike_the_others_is_flagged_and_no_other_is(lie: str) -> None:
    vectors = honest(99)
    vectors[5] = LIES[lie](vectors[5])
    assert flagged(warmed().check_updates(updates(vectors))) == [5]


def test_a_gradient_too_close_to_the_others_is_flagged() -> None:
    vectors = honest(99)
    mean = vectors.mean(0)
    vectors[5] = mean / mean.norm() * vectors[5].norm()
    verdict = warmed().check_updates(updates(vectors))
    assert flagged(verdict) == [5]
    value, _, high = verdict.statistics["cosine"]
    assert value[5] > high


def test_liars_who_turn_everybodys_mean_cosine_make_nobody_else_odd() -> None:
    defense, vectors = warmed(), honest(99)
    before = compare(vectors)[1]
    vectors[[0, 4, 5]] *= -1
    assert flagged(defense.check_updates(updates(vectors))) == [0, 4, 5]
    others = [1, 2, 3, 6, 7]
    torch.testing.assert_close(compare(vectors)[1, others], before[others], rtol=0, atol=0.08)


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_a_loss_unlike_the_others_flags_the_worker_of_the_last_stage(factor: float) -> None:
    defense = warmed()
    given = at_last(99)
    assert flagged(defense.check_updates(given)) == []
    loss = losses(99)
    loss[3] *= factor
    verdict = defense.check_updates(updates(given.work.sent(range(REPLICAS)), loss, stage=LAST))
    assert flagged(verdict) == [3]
    value, low, high = verdict.statistics["loss"]
    assert not low < value[3] < high
    assert value[3] == pytest.approx(math.log(loss[3] / loss.quantile(0.5)), abs=1e-6)


def test_a_loss_that_is_no_number_is_flagged_and_never_learnt() -> None:
    defense, loss = warmed(), losses(99)
    loss[3] = math.inf
    given = updates(honest(99), loss, stage=LAST)
    for _ in range(60):
        verdict = defense.check_updates(given)
        defense.learn_updates(given, given.active)  # as after an amnesty
        defense.end_step(0)
        assert flagged(verdict) == severe(verdict) == [3]
    assert defense._fences.median.isfinite().all()


def test_a_far_outlier_bans_at_once_and_a_near_one_does_not() -> None:
    defense, near, far = warmed("dispersion:severity=5"), honest(99), honest(99)
    near[5] *= 2
    far[5] *= 1e4
    assert severe(defense.check_updates(updates(near))) == []
    assert severe(defense.check_updates(updates(far))) == [5]


def test_every_stage_has_fences_of_its_own() -> None:
    defense = started()
    for seed in range(20):
        wide = honest(seed) * torch.linspace(0.2, 5, REPLICAS)[:, None]
        step(defense, updates(honest(seed), stage=0), updates(wide), at_last(seed))
    vectors = honest(99)
    vectors[5] *= 2
    found = [flagged(defense.check_updates(updates(vectors, stage=stage))) for stage in (0, 1)]
    assert found == [[5], []]
    assert flagged(defense.check_updates(updates(vectors, losses(99), stage=LAST))) == [5]


# --- what is not finite, not active, or alone -----------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("warm", [False, True])
def test_what_is_not_finite_is_a_violation_from_the_first_step_on(bad: float, warm: bool) -> None:
    defense = warmed() if warm else started()
    vectors = honest(99)
    vectors[5, 3] = bad
    verdict = defense.check_updates(updates(vectors))
    assert flagged(verdict) == severe(verdict) == [5]


def test_what_is_not_finite_never_enters_a_fence() -> None:
    one, other = started(), started()
    for seed in range(30):
        vectors = honest(seed)
        vectors[5] = math.nan
        for defense, active in ((one, None), (other, [r != 5 for r in range(REPLICAS)])):
            given = updates(vectors, active=active)
            defense.check_updates(given)
            defense.learn_updates(given, given.active)  # as after an amnesty
            defense.end_step(0)
    assert torch.equal(one._fences.median, other._fences.median)
    assert torch.equal(one._fences.half_width, other._fences.half_width)
    assert one._fences.half_width[2:4].isfinite().all()


def test_who_is_not_active_is_not_asked_not_flagged_and_not_compared_with() -> None:
    defense, active = warmed(), [r != 5 for r in range(REPLICAS)]
    vectors = honest(99)
    vectors[5] *= -1e6
    verdict = defense.check_updates(updates(vectors, active=active))
    assert (flagged(verdict), severe(verdict)) == ([], [])
    kept = [r for r in range(REPLICAS) if r != 5]
    expected = compare(vectors[kept])
    for name, row in zip(("norm", "cosine"), expected, strict=True):
        assert torch.equal(verdict.statistics[name][0][kept], row)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_are_not_compared_but_what_is_not_finite_is_still_flagged(count: int) -> None:
    defense = warmed()
    vectors = honest(99)
    vectors[:4] *= 1e6
    active = [r < count for r in range(REPLICAS)]
    assert flagged(defense.check_updates(updates(vectors, active=active))) == []
    vectors[:1] = math.nan
    verdict = defense.check_updates(updates(vectors, active=active))
    assert flagged(verdict) == severe(verdict) == [0][:count]


def test_three_of_whom_one_is_not_finite_leave_nothing_to_compare() -> None:
    vectors = honest(99)
    vectors[0], vectors[1] = math.nan, 1e6 * vectors[1]
    verdict = warmed().check_updates(updates(vectors, active=[r < 3 for r in range(REPLICAS)]))
    assert flagged(verdict) == [0]


# --- what is learnt -------------------------------------------------------------------------------


def test_nothing_but_the_unreadable_is_flagged_before_there_are_enough_steps() -> None:
    defense = started("dispersion:min_steps=10")
    vectors = honest(99)
    vectors[5] *= -100
    for seed in range(10):
        assert flagged(defense.check_updates(updates(vectors))) == []
        step(defense, updates(honest(seed)))
    assert flagged(defense.check_updates(updates(vectors))) == [5]


def test_what_is_not_clean_does_not_enter_the_window() -> None:
    defense, vectors = warmed(), honest(99)
    vectors[5] *= 2
    given = updates(vectors)
    verdict = defense.check_updates(given)
    clean = ~verdict.flagged
    clean[0] = False
    defense.learn_updates(given, clean)
    missing = [r in (0, 5) for r in range(REPLICAS)]
    assert defense._values[2:4].isnan().tolist() == [missing] * 2
    assert torch.equal(defense._values[2:4, clean], compare(vectors)[:, clean])


def test_a_half_width_is_never_below_its_floor() -> None:
    defense = started("dispersion:floor.norm=0.6,floor.cosine=0.3,floor.loss=0.2")
    same = honest(0)[:1].expand(REPLICAS, -1)
    for _ in range(12):
        step(defense, updates(same, torch.full((REPLICAS,), 4.0), stage=LAST))
    assert defense._fences.half_width[2 * LAST :].tolist() == pytest.approx([0.6, 0.3, 0.2])


def test_honest_steps_are_hardly_ever_flagged() -> None:
    defense, false = warmed(), 0
    for seed in range(200, 300):
        verdicts = step(defense, updates(honest(seed)), at_last(1000 + seed))
        false += sum(len(flagged(verdict)) for verdict in verdicts)
    assert false == 0


# --- signals and weights --------------------------------------------------------------------------


def test_signals_and_weights_are_let_pass_and_change_nothing() -> None:
    defense = warmed()
    before = defense._fences.half_width.clone(), defense._values.clone()
    active = torch.ones(REPLICAS, dtype=torch.bool)
    wild = torch.randn(REPLICAS, 1, 2, 4) * torch.logspace(0, 9, REPLICAS).view(-1, 1, 1, 1)
    signals = Signals(1, "activation", 0, wild, None, active)
    verdict = defense.check(signals)
    defense.learn(signals, active)
    assert (flagged(verdict), severe(verdict)) == ([], [])
    weights = updates(honest(99) * torch.logspace(0, 9, REPLICAS)[:, None], kind="weights")
    defense.check_updates(updates(honest(99)))  # what it found does not belong to the weights
    verdict = defense.check_updates(weights)
    defense.learn_updates(weights, active)
    assert (flagged(verdict), severe(verdict)) == ([], [])
    after = defense._fences.half_width, defense._values
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_what_is_handed_in_stays_as_it_is() -> None:
    defense, vectors, loss = warmed(), honest(99), losses(99)
    kept = vectors.clone(), loss.clone()
    versions = vectors._version, loss._version
    step(defense, updates(vectors, loss, stage=LAST))
    assert torch.equal(vectors, kept[0]) and torch.equal(loss, kept[1])
    assert (vectors._version, loss._version) == versions


def test_the_statistics_of_a_verdict_stand_beside_their_fences() -> None:
    verdict = warmed().check_updates(at_last(99))
    assert [*verdict.statistics] == ["norm", "cosine", "loss"]
    for values, low, high in verdict.statistics.values():
        assert values.shape == (REPLICAS,)
        assert bool(((low < values) & (values < high)).all())


# --- in a pipeline --------------------------------------------------------------------------------


class Log:
    """Keeps rows by their kind."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}

    def append(self, kind: str, /, **fields: Any) -> None:
        self.rows.setdefault(kind, []).append(fields)


def test_attackers_on_weight_gradients_are_banned_and_nobody_else_is(
    make_scenario: Callable[..., Scenario], tokens: Tokens
) -> None:
    scenario = make_scenario(
        train__warmup_steps=25, train__steps=35, train__batch_size=8, grid__replicas=6
    )
    attack, defense = Component.parse("update-ipm"), Component.parse("dispersion")
    cell, log = Cell(scenario=scenario, attack=attack, defense=defense), Log()
    session = Session(scenario, [cell], tokens)
    session.warm_up()
    session.run(cell, log)
    attackers = {(row["stage"], row["replica"]) for row in log.rows["act"]}
    assert attackers
    assert {(row["stage"], row["replica"]) for row in log.rows["ban"]} == attackers
    assert {row["direction"] for row in log.rows["flag"]} == {"update"}
