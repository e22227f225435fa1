"""Surrogate: the fit against numpy, the statistics by loops, and the lies that it sees."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Setup, Signals, Verdict
from sentinel_bench.config import Component
from sentinel_bench.defenses.ridge import OnlineRidge
from sentinel_bench.defenses.surrogate import Surrogate
from sentinel_bench.defenses.tokens import LIMIT

SHAPE = (2, 16, 8)
STAGE = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) / 8
"""The linear part of what the stage does to a token of rms 1."""


def started(text: str = "surrogate", replicas: int = 8) -> Surrogate:
    defense = registry.defenses.create(Component.parse(text))
    assert isinstance(defense, Surrogate)
    defense.start(Setup(3, replicas, SHAPE))
    return defense


def signals(
    sent: Tensor,
    received: Tensor | None,
    step: int = 0,
    direction: Any = "activation",
    active: list[bool] | None = None,
) -> Signals:
    mask = torch.ones(len(sent), dtype=torch.bool) if active is None else torch.tensor(active)
    return Signals(1, direction, step, sent, received, mask)


def honest(
    seed: int, replicas: int = 8, stage: Tensor = STAGE, noise: float = 0.05
) -> tuple[Tensor, Tensor]:
    """What honest replicas received, and sent: a linear stage with a residual connection."""
    generator = torch.Generator().manual_seed(seed)
    received = torch.randn(replicas, *SHAPE, generator=generator)
    norm = received.norm(dim=-1, keepdim=True)
    change = received / norm * 8**0.5 @ stage
    change = change + noise * torch.randn(replicas, *SHAPE, generator=generator)
    return received, received + norm * change


def step(defense: Surrogate, given: Signals, clean: Tensor | None = None) -> Verdict:
    verdict = defense.check(given)
    defense.learn(given, given.active & ~verdict.flagged if clean is None else clean)
    defense.end_step(given.step)
    return verdict


def warmed(text: str = "surrogate", steps: int = 60, **stage: Any) -> Surrogate:
    defense = started(text)
    for now in range(steps):
        received, sent = honest(now, **stage)
        given = signals(sent, received, now)
        step(defense, given, given.active)
    return defense


# --- the fit --------------------------------------------------------------------------------------


def test_the_map_is_the_ridge_regression_with_forgetting() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 3, 6, 4)), rng.normal(size=(2, 3, 6, 4))  # two fits, three channels
    ridge = OnlineRidge(5, 4, forgetting=0.5, ridge=0.1, device="cpu")
    channels = [3, 0, 4]
    for i in range(2):
        ridge.fit(channels, torch.tensor(x[i]).float(), torch.tensor(y[i]).float())
    for place, channel in enumerate(channels):
        xx = 0.5 * x[0, place].T @ x[0, place] + x[1, place].T @ x[1, place]
        xy = 0.5 * x[0, place].T @ y[0, place] + x[1, place].T @ y[1, place]
        expected = np.linalg.solve(xx + 0.1 * np.trace(xx) / 4 * np.eye(4), xy)
        np.testing.assert_allclose(ridge.weights[channel].numpy(), expected, atol=1e-5)
    assert not ridge.weights[[1, 2]].any()


def test_a_fit_without_rows_forgets_nothing_and_an_empty_map_is_zero() -> None:
    ridge, zeros = OnlineRidge(2, 4, 0.5, 0.1, "cpu"), torch.zeros(2, 6, 4)
    ridge.fit([0, 1], zeros, zeros)
    assert ridge.weights.tolist() == torch.zeros(2, 4, 4).tolist()
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    ridge.fit([0, 1], x, 2 * x)
    before = copy.deepcopy(ridge)
    for _ in range(2000):
        ridge.fit([0, 1], zeros, zeros)
    assert torch.equal(ridge.weights, before.weights)


def test_the_map_finds_what_the_stage_does() -> None:
    defense = warmed("surrogate:ridge=1e-6,forgetting=1", noise=0.0)
    torch.testing.assert_close(defense._ridge.weights[2], STAGE, atol=1e-4, rtol=1e-3)


def test_the_map_follows_a_stage_that_changes() -> None:
    defense, other = warmed(), STAGE.flip(0)
    for now in range(60, 400):
        received, sent = honest(now, stage=other)
        given = signals(sent, received, now)
        step(defense, given, given.active)
    received, sent = honest(999, stage=other)
    verdict = defense.check(signals(sent, received, 400))
    assert not verdict.flagged.any()
    assert verdict.statistics["cosine"][0].min() > 0.8


def test_only_clean_tokens_are_fitted() -> None:
    one, other = started(), started()
    clean = torch.arange(8) != 3
    for now in range(12):
        received, sent = honest(now)
        step(one, signals(sent, received, now), clean)
        bad = sent.clone()
        bad[3] = 1e30 if now % 2 else -received[3]
        step(other, signals(bad, received, now), clean)
    assert one._ridge.weights.any()
    assert torch.equal(one._ridge.weights, other._ridge.weights)


def test_tokens_that_cannot_be_fitted_are_left_out() -> None:
    one, other = started(replicas=3), started(replicas=2)
    for now in range(12):
        received, sent = honest(now, replicas=3)
        other_given = signals(sent[:2].clone(), received[:2].clone(), now)
        if now % 3 == 0:
            received[2] = 0.0  # nothing came in
        elif now % 3 == 1:
            sent[2] = 3e38  # overflows
        else:
            sent[2] = 1e6 * received[2]  # a change beyond measure
        given = signals(sent, received, now)
        step(one, given, given.active)
        step(other, other_given, other_given.active)
    assert one._ridge.weights.isfinite().all()
    torch.testing.assert_close(one._ridge.weights, other._ridge.weights)


def test_the_stage_is_fitted_every_so_many_steps() -> None:
    defense = started("surrogate:every=4")
    maps = []
    for now in range(9):
        received, sent = honest(now)
        step(defense, signals(sent, received, now))
        maps.append(defense._ridge.weights.clone())
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(maps)]
    assert changed == [False, False, False, True, False, False, False, True]


def test_a_seed_draws_the_same_tokens_and_another_seed_others() -> None:
    def places(text: str, now: int) -> list[int]:
        defense = started(text)
        return defense._sample._draw(now, torch.zeros(8, 32, 8)).tolist()

    assert places("surrogate", 3) == places("surrogate:seed=0", 3)
    assert places("surrogate", 3) != places("surrogate:seed=1", 3)
    assert places("surrogate", 3) != places("surrogate", 4)
    assert sorted(places("surrogate", 3)) == list(range(32))


# --- the statistics -------------------------------------------------------------------------------


def literal(defense: Surrogate, sent: Tensor, received: Tensor) -> list[list[float]]:
    """The two statistics of the specification, token by token."""
    cosines, ratios = [], []
    for x, r in zip(sent.double().flatten(1, 2), received.double().flatten(1, 2), strict=True):
        cosine, ratio = 0.0, 0.0
        for token, came in zip(x, r, strict=True):
            unit = came / came.norm()
            change = (token - came) / came.norm()
            predicted = (came / came.square().mean().sqrt()) @ defense._ridge.weights[2].double()
            u, v = (t - (t @ unit) * unit for t in (change, predicted))
            cosine += float(u @ v / u.norm() / v.norm())
            ratio += math.log(u.norm() / v.norm())
        cosines.append(cosine / len(x))
        ratios.append(ratio / len(x))
    return [cosines, ratios]


def test_the_statistics_are_those_of_the_definition() -> None:
    defense = warmed()
    received, sent = honest(99, noise=0.3)
    values = defense.measure(signals(sent, received, 99))
    assert values is not None
    expected = literal(defense, sent, received)
    for found, literally in zip(values.tolist(), expected, strict=True):
        assert found == pytest.approx(literally, abs=1e-4)


def test_the_size_of_the_signals_does_not_matter() -> None:
    defense = warmed()
    received, sent = honest(99)
    plain = defense.measure(signals(sent, received, 99))
    assert plain is not None
    for scale in (1e-9, 1e9):
        scaled = defense.measure(signals(sent * scale, received * scale, 99))
        torch.testing.assert_close(scaled, plain, atol=1e-4, rtol=1e-4)


def test_a_sample_of_the_tokens_is_compared() -> None:
    defense = warmed("surrogate:tokens=4")
    received, sent = honest(99)
    given = signals(sent, received, 99)
    values = defense.measure(given)
    at = defense._sample._draw(99, sent.flatten(1, 2))[:4]
    few = [x.flatten(1, 2)[:, at].unsqueeze(1) for x in (sent, received)]
    for found, literally in zip(values.tolist(), literal(defense, *few), strict=True):  # type: ignore[union-attr]
        assert found == pytest.approx(literally, abs=1e-4)


def test_what_cannot_be_told_from_nothing_has_no_angle() -> None:
    defense = warmed()
    received, _ = honest(99)
    sent = 0.9 * received  # only rounding is orthogonal to what came in
    sent[3] = 0.0
    values = defense.measure(signals(sent, received, 99))
    assert values is not None
    assert values[0].tolist() == [0.0] * 8
    assert values[1].isfinite().all()
    assert float(values[1, 3]) == pytest.approx(-LIMIT)
    assert values[1, :3].max() < -4  # a thousandth of the signal at most


# --- what it sees ---------------------------------------------------------------------------------


def along(sent: Tensor, received: Tensor) -> Tensor:
    return (
        (sent * received).sum(-1, keepdim=True) / received.square().sum(-1, keepdim=True) * received
    )


LIES = {
    "mirrored": lambda x, r: 2 * along(x, r) - x,
    "its change undone": lambda x, r: 2 * r - x,
    "half of its change": lambda x, r: r + (x - r) / 2,
    "its own input": lambda x, r: r,
    "another sample": lambda x, r: x.flip(0),
    "zeros": lambda x, r: 0 * x,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_change_that_the_stage_would_not_make_is_flagged(lie: str) -> None:
    received, sent = honest(999)
    sent[5] = LIES[lie](sent[5], received[5])
    verdict = warmed().check(signals(sent, received, 61))
    assert verdict.flagged.tolist() == [r == 5 for r in range(8)]


def test_the_angle_sees_a_mirror_and_the_size_sees_a_halved_change() -> None:
    defense = warmed()
    received, sent = honest(999)
    plain = defense.measure(signals(sent, received, 61))
    mirrored = defense.measure(signals(2 * along(sent, received) - sent, received, 61))
    halved = defense.measure(signals(received + (sent - received) / 2, received, 61))
    assert plain is not None
    assert mirrored is not None
    assert halved is not None
    torch.testing.assert_close(mirrored, plain * torch.tensor([[-1.0], [1.0]]), atol=1e-4, rtol=0)
    shift = torch.tensor([[0.0], [math.log(0.5)]])
    torch.testing.assert_close(halved, plain + shift, atol=1e-4, rtol=0)


def test_honest_signals_are_not_flagged() -> None:
    defense = warmed()
    for now in range(60, 120):
        received, sent = honest(now)
        assert not step(defense, signals(sent, received, now)).flagged.any()


def test_nothing_is_said_before_the_first_fit_or_without_a_received_signal() -> None:
    defense = started()
    received, sent = honest(0)
    for given in (signals(sent, received), signals(sent, None)):
        verdict = defense.check(given)
        assert not verdict.flagged.any()
        assert not verdict.statistics
    assert defense.measure(signals(sent, received)) is None
    step(defense, signals(sent, received))
    assert defense.measure(signals(sent, received, 1)) is not None
    assert defense.measure(signals(sent, received, 1, "gradient")) is None  # a fit of its own


def test_a_preview_says_what_a_check_would_and_changes_nothing() -> None:
    defense, witness = warmed(), warmed()
    received, sent = honest(999)
    sent[5] = received[5]
    given = signals(sent, received, 61)
    preview = defense.preview(given)
    assert preview is not None
    verdict = witness.check(given)
    assert preview.flagged.tolist() == verdict.flagged.tolist()
    for name, (values, low, high) in verdict.statistics.items():
        assert torch.equal(preview.statistics[name][0], values)
        assert preview.statistics[name][1:] == (low, high)
    received, sent = honest(60)
    for d in (defense, witness):
        step(d, signals(sent, received, 60))
    assert torch.equal(defense._fences._values.nan_to_num(9), witness._fences._values.nan_to_num(9))
    assert torch.equal(defense._ridge.weights, witness._ridge.weights)


def test_the_memory_is_the_windows_and_three_matrices_per_stage_and_direction() -> None:
    small, large = (started(f"surrogate:window={w}") for w in (50, 60))
    assert large.state_bytes() - small.state_bytes() == 10 * 12 * 8 * 4
    assert small.state_bytes() - small._fences.state_bytes() == 3 * 6 * 8 * 8 * 4
