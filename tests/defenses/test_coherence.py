"""Coherence: angle and size against what came in, by hand; what it sees, and what it cannot see."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Setup, Signals, Verdict
from sentinel_bench.config import Component
from sentinel_bench.defenses.coherence import Coherence
from sentinel_bench.defenses.tokens import LIMIT

SHAPE = (4, 32, 8)


def started(
    text: str = "coherence", replicas: int = 8, shape: tuple[int, int, int] = SHAPE
) -> Coherence:
    defense = registry.defenses.create(Component.parse(text))
    assert isinstance(defense, Coherence)
    defense.start(Setup(3, replicas, shape))
    return defense


def signals(
    sent: Tensor, received: Tensor | None, direction: Any = "activation", active: Any = None
) -> Signals:
    mask = torch.ones(len(sent), dtype=torch.bool) if active is None else torch.tensor(active)
    return Signals(1, direction, 0, sent, received, mask)


def one_token(*replicas: tuple[float, float]) -> Tensor:
    """Signals of one token with two hidden units."""
    return torch.tensor(replicas, dtype=torch.float32).view(len(replicas), 1, 1, 2)


def measured(sent: Tensor, received: Tensor) -> tuple[list[float], list[float]]:
    """The two statistics of signals, without any fence."""
    values = started(replicas=len(sent)).measure(signals(sent, received))
    assert values is not None
    cosine, ratio = values.tolist()
    return cosine, ratio


def honest(seed: int, replicas: int = 8) -> tuple[Tensor, Tensor]:
    """What honest replicas received, and sent: the same and a bit more, each of its own data."""
    generator = torch.Generator().manual_seed(seed)
    received = torch.randn(replicas, *SHAPE, generator=generator)
    return received, received + 0.3 * torch.randn(replicas, *SHAPE, generator=generator)


def step(defense: Coherence, given: Signals, clean: Tensor | None = None) -> Verdict:
    verdict = defense.check(given)
    defense.learn(given, given.active & ~verdict.flagged if clean is None else clean)
    defense.end_step(0)
    return verdict


def warmed(text: str = "coherence", direction: Any = "activation") -> Coherence:
    defense = started(text)
    for seed in range(30):
        received, sent = honest(seed)
        given = signals(sent, received, direction)
        step(defense, given, given.active)
    return defense


# --- the statistics -------------------------------------------------------------------------------


def test_cosine_and_log_ratio_by_hand() -> None:
    sent = one_token((6, 8), (-3, -4), (4, -3), (0.7, 0.1))
    received = one_token((3, 4), (3, 4), (6, 8), (1, 1))
    cosine, ratio = measured(sent, received)
    assert cosine == pytest.approx([1, -1, 0, 0.8], abs=1e-6)
    assert ratio == pytest.approx([math.log(2), 0, math.log(0.5), math.log(0.5)], abs=1e-6)


def test_every_token_counts_the_same_however_long_it_is() -> None:
    received = torch.tensor([[[[1000.0, 0], [0, 1]]]])
    sent = torch.tensor([[[[1000.0, 0], [0, -2]]]])
    cosine, ratio = measured(sent, received)
    assert cosine == pytest.approx([0.0], abs=1e-6)  # (1 - 1) / 2
    assert ratio == pytest.approx([math.log(2) / 2], abs=1e-6)


def test_vanished_tokens_give_finite_numbers() -> None:
    zero, one = (0.0, 0.0), (1.0, 0.0)
    cosine, ratio = measured(one_token(zero, one, zero), one_token(one, zero, zero))
    assert cosine == [0.0, 0.0, 0.0]
    assert ratio == pytest.approx([-LIMIT, LIMIT, 0.0])


def test_signals_of_any_usual_size_are_measured_alike() -> None:
    received, sent = honest(0)
    plain = measured(sent, received)
    for scale in (1e-9, 1e9):
        for values, expected in zip(measured(sent * scale, received * scale), plain, strict=True):
            assert values == pytest.approx(expected, abs=1e-4)


def test_bfloat16_is_measured_in_float32() -> None:
    received, sent = honest(0)
    exact = measured(sent.bfloat16().float(), received.bfloat16().float())
    assert measured(sent.bfloat16(), received.bfloat16()) == exact


# --- what it sees ---------------------------------------------------------------------------------


def mirror(sent: Tensor, received: Tensor) -> Tensor:
    """The same part along what was received, and the opposite of the rest."""
    along = (sent * received).sum(-1, keepdim=True) / received.square().sum(-1, keepdim=True)
    return 2 * along * received - sent


LIES = {
    "zeros": lambda x, r: 0 * x,
    "ones": lambda x, r: torch.ones_like(x),
    "negated": lambda x, r: -x,
    "shrunk": lambda x, r: 0.7 * x,
    "noise": lambda x, r: torch.randn(x.shape, generator=torch.Generator().manual_seed(7)),
    "another sample": lambda x, r: x.flip(0),
    "another token": lambda x, r: x.roll(1, 1),
    "its own input": lambda x, r: r,
}


@pytest.mark.parametrize("direction", ["activation", "gradient"])
@pytest.mark.parametrize("lie", LIES)
def test_what_does_not_follow_from_the_input_is_flagged(lie: str, direction: str) -> None:
    received, sent = honest(99)
    sent[5] = LIES[lie](sent[5], received[5])
    verdict = warmed(direction=direction).check(signals(sent, received, direction))
    assert verdict.flagged.tolist() == [r == 5 for r in range(8)]


def test_honest_signals_are_not_flagged() -> None:
    defense = warmed()
    for seed in range(100, 150):
        received, sent = honest(seed)
        assert not step(defense, signals(sent, received)).flagged.any()


def test_a_mirrored_contribution_is_the_blind_spot() -> None:
    received, sent = honest(99)
    sent[5] = mirror(sent[5], received[5])
    assert not warmed().check(signals(sent, received)).flagged.any()


def test_a_distance_of_severity_half_widths_is_severe() -> None:
    received, sent = honest(99)
    sent[2], sent[5] = 0.7 * sent[2], 0.0
    verdict = warmed("coherence:severity=20").check(signals(sent, received))
    assert verdict.flagged.tolist() == [r in (2, 5) for r in range(8)]
    assert verdict.severe.tolist() == [r == 5 for r in range(8)]


def test_without_a_received_signal_nothing_is_said() -> None:
    defense = warmed()
    _, sent = honest(99)
    given = signals(0 * sent, None)
    verdict = step(defense, given)
    assert not verdict.flagged.any()
    assert not verdict.statistics
    received, sent = honest(98)
    assert not step(defense, signals(sent, received)).flagged.any()


def test_no_flag_before_the_fences_are_closed() -> None:
    defense = started("coherence:min_steps=3")
    for seed, expected in enumerate([False, False, False, True]):
        received, sent = honest(seed)
        given = signals(0 * sent if seed == 3 else sent, received)
        assert bool(step(defense, given).flagged.all()) == expected


def test_wider_floors_let_more_pass() -> None:
    received, sent = honest(99)
    sent[5] *= 0.9
    for floor, flagged in ((0.05, True), (0.2, False)):
        defense = warmed(f"coherence:floor.ratio={floor},mads=0.001,floor.cosine=1")
        assert bool(defense.check(signals(sent, received)).flagged[5]) == flagged


# --- the state ------------------------------------------------------------------------------------


def state(defense: Coherence) -> tuple[Any, ...]:
    fences = defense._fences
    return fences.median.tolist(), fences.half_width.tolist(), fences._values.nan_to_num(9).tolist()


def test_only_clean_values_enter_the_window() -> None:
    one, other = started(), started()
    for seed in range(15):
        received, sent = honest(seed)
        clean = torch.arange(8) != 3
        step(one, signals(sent, received), clean)
        sent[3] = 1e4
        step(other, signals(sent, received), clean)
    assert state(one) == state(other)


def test_unreadable_rows_leave_no_trace_in_the_window() -> None:
    one, other = started(), started()
    active = torch.arange(8) != 3
    for seed in range(15):
        received, sent = honest(seed)
        step(one, signals(sent, received), active)
        sent[3] = 0.0
        step(other, signals(sent, received, active=active.tolist()))
    assert state(one) == state(other)


def test_a_signal_too_large_to_measure_is_flagged_and_never_learnt() -> None:
    defense = warmed()
    received, sent = honest(99)
    sent[5] = 1e30
    received[6] = 1e30
    sent[6] = 1e30
    given = signals(sent, received)
    for _ in range(60):
        verdict = step(defense, given, given.active)  # as after an amnesty
        assert verdict.flagged.tolist() == [r in (5, 6) for r in range(8)]
    assert defense._fences.median.isfinite().all()
    received, sent = honest(98)
    assert not defense.check(signals(sent, received)).flagged.any()


def test_a_preview_says_what_a_check_would_and_changes_nothing() -> None:
    defense = warmed()
    received, sent = honest(99)
    sent[5] = 0.0
    given = signals(sent, received, "activation")
    defense.check(signals(*honest(98)[::-1]))  # its own values wait for learn
    before, last = state(defense), copy.deepcopy(defense._last)
    preview = defense.preview(given)
    assert state(defense) == before
    assert last is not None and defense._last is not None
    assert torch.equal(defense._last, last)
    verdict = defense.check(given)
    assert preview is not None
    assert preview.flagged.tolist() == verdict.flagged.tolist()
    for name in ("cosine", "ratio"):
        values, low, high = preview.statistics[name]
        assert torch.equal(values, verdict.statistics[name][0])
        assert (low, high) == verdict.statistics[name][1:]


# --- the reference --------------------------------------------------------------------------------


def test_a_tainted_gradient_is_replaced_by_the_mean_of_the_trusted() -> None:
    defense = warmed(direction="gradient")
    received, sent = honest(99)
    sent[5], sent[0] = 1e6, 1e6
    active = [r != 0 for r in range(8)]
    verdict = defense.check(signals(sent, received, "gradient", active))
    trusted = [r for r in range(8) if r not in (0, 5)]
    assert verdict.reference is not None
    torch.testing.assert_close(verdict.reference, sent[trusted].mean(0))


def test_where_nothing_was_received_the_active_replicas_stand_in() -> None:
    _, sent = honest(0, replicas=3)
    verdict = started(replicas=3).check(signals(sent, None, "gradient", [True, False, True]))
    assert verdict.reference is not None
    torch.testing.assert_close(verdict.reference, (sent[0] + sent[2]) / 2)


def test_there_is_no_reference_without_anybody_to_trust() -> None:
    _, sent = honest(0, replicas=2)
    assert started(replicas=2).check(signals(sent, None, "gradient", [False] * 2)).reference is None
