"""Cross-replica: moments against the median of the replicas by hand, ties, too few replicas."""

from __future__ import annotations

import copy
import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Setup, Signals, Verdict
from sentinel_bench.config import Component
from sentinel_bench.defenses.replicas import CLOSE, GREATEST, SMALL, CrossReplica
from sentinel_bench.defenses.tokens import LIMIT

SHAPE = (2, 32, 8)
CENTER = torch.randn(8, generator=torch.Generator().manual_seed(2))
NAMES = ("mean", "std", "profile", "norm")


def started(text: str = "cross-replica", replicas: int = 8) -> CrossReplica:
    defense = registry.defenses.create(Component.parse(text))
    assert isinstance(defense, CrossReplica)
    defense.start(Setup(3, replicas, SHAPE))
    return defense


def signals(
    sent: Tensor, active: list[bool] | None = None, direction: Any = "activation"
) -> Signals:
    mask = torch.ones(len(sent), dtype=torch.bool) if active is None else torch.tensor(active)
    return Signals(1, direction, 0, sent, None, mask)


def honest(seed: int, replicas: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return CENTER + torch.randn(replicas, *SHAPE, generator=generator)


def measured(sent: Tensor, active: list[bool] | None = None) -> dict[str, list[float]]:
    values = started(replicas=len(sent)).measure(signals(sent, active))
    assert values is not None
    return dict(zip(NAMES, values.tolist(), strict=True))


def step(defense: CrossReplica, given: Signals, clean: Tensor | None = None) -> Verdict:
    verdict = defense.check(given)
    defense.learn(given, given.active & ~verdict.flagged if clean is None else clean)
    defense.end_step(0)
    return verdict


def warmed(text: str = "cross-replica") -> CrossReplica:
    defense = started(text)
    for seed in range(60):
        given = signals(honest(seed))
        step(defense, given, given.active)
    return defense


def literal(sent: Tensor) -> dict[str, list[float]]:
    """The definitions in plain Python."""
    tokens = sent.double().flatten(1, 2).tolist()
    by_channel = [[list(c) for c in zip(*replica, strict=True)] for replica in tokens]
    out: dict[str, list[float]] = {}
    moments = {
        "mean": [[statistics.fmean(c) for c in replica] for replica in by_channel],
        "std": [[statistics.pstdev(c) for c in replica] for replica in by_channel],
    }
    middle = {}
    for name, values in moments.items():
        columns = [list(c) for c in zip(*values, strict=True)]
        middle[name] = [statistics.median(c) for c in columns]
        sigma = [
            1.4826 * statistics.median(abs(v - m) for v in c)
            for c, m in zip(columns, middle[name], strict=True)
        ]
        out[name] = [
            math.log(
                statistics.fmean(
                    abs(v - m) / s for v, m, s in zip(row, middle[name], sigma, strict=True)
                )
            )
            for row in values
        ]
    profile = middle["mean"]
    out["profile"] = []
    for m in moments["mean"]:
        dot = sum(a * b for a, b in zip(m, profile, strict=True))
        out["profile"].append(math.log(1 - dot / math.hypot(*m) / math.hypot(*profile)))
    sizes = [math.hypot(*m, *s) for m, s in zip(moments["mean"], moments["std"], strict=True)]
    out["norm"] = [math.log(s / statistics.median(sizes)) for s in sizes]
    return out


@pytest.mark.parametrize("replicas", [3, 4, 8])
def test_the_statistics_are_those_of_the_definition(replicas: int) -> None:
    sent = honest(0, replicas)
    found, expected = measured(sent), literal(sent)
    for name in NAMES:
        # the replica in the middle of three has a distance of nearly 0 in some channels
        assert found[name] == pytest.approx(expected[name], abs=1e-3), name


def test_statistics_by_hand() -> None:
    # one channel, two tokens: means 1 2 3 4 9 (median 3, MAD 1), spreads 1 1 1 1 1
    sent = torch.tensor([[0, 2], [1, 3], [2, 4], [3, 5], [8, 10]], dtype=torch.float32)
    found = measured(sent.view(5, 1, 2, 1))
    z = [abs(m - 3) / 1.4826 for m in (1, 2, 3, 4, 9)]
    assert found["mean"] == pytest.approx([math.log(max(v, SMALL)) for v in z], abs=1e-5)
    assert found["std"] == pytest.approx([math.log(SMALL)] * 5)
    assert found["profile"] == pytest.approx([math.log(CLOSE)] * 5)
    sizes = [math.hypot(m, 1) for m in (1, 2, 3, 4, 9)]
    expected = [math.log(s / math.hypot(3, 1)) for s in sizes]
    assert found["norm"] == pytest.approx(expected, abs=1e-5)


def test_one_channel_counts_no_more_than_a_bound() -> None:
    sent = honest(0)
    sent[5, ..., 0] += 1e9
    most = math.log(GREATEST / 8 + 4)
    assert math.log(GREATEST / 8) < measured(sent)["mean"][5] < most


def test_inactive_replicas_are_no_part_of_the_medians() -> None:
    sent = honest(0, 5)
    alone = measured(sent)
    among = measured(torch.cat([sent, torch.full((2, *SHAPE), 1e20)]), [True] * 5 + [False] * 2)
    for name in NAMES:
        assert among[name][:5] == pytest.approx(alone[name], abs=1e-6)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_fewer_than_three_active_replicas_are_not_compared(n: int) -> None:
    defense = warmed()
    verdict = step(defense, signals(0 * honest(99), [r < n for r in range(8)]))
    assert not verdict.flagged.any()
    assert not verdict.statistics
    assert not step(defense, signals(honest(98))).flagged.any()


def test_replicas_that_are_equal_up_to_rounding_are_equal() -> None:
    one = honest(0, 1)
    sent = torch.cat([one * (1 + 1e-7 * r) for r in range(8)])
    found = measured(sent)
    assert found["mean"] == found["std"] == pytest.approx([math.log(SMALL)] * 8)
    assert found["profile"] == pytest.approx([math.log(CLOSE)] * 8)
    assert found["norm"] == pytest.approx([0.0] * 8, abs=1e-5)


def test_zeros_give_finite_numbers() -> None:
    for sent in (torch.zeros(4, *SHAPE), torch.cat([honest(0, 3), torch.zeros(1, *SHAPE)])):
        for name, values in measured(sent).items():
            assert torch.tensor(values).isfinite().all(), name
    assert measured(sent)["norm"][3] == pytest.approx(-LIMIT)


LIES = {
    "zeros": lambda x: 0 * x,
    "ones": lambda x: torch.ones_like(x),
    "negated": lambda x: -x,
    "twice": lambda x: 2 * x,
    "shifted": lambda x: x + 1,
    "noise": lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(7)),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_distributed_otherwise_is_flagged(lie: str) -> None:
    sent = honest(99)
    sent[5], sent[2] = LIES[lie](sent[5]), LIES[lie](sent[2])  # two of them together, too
    verdict = warmed().check(signals(sent))
    assert verdict.flagged.tolist() == [r in (2, 5) for r in range(8)]


def test_the_order_of_tokens_and_samples_is_the_blind_spot() -> None:
    sent = honest(99)
    sent[5] = sent[5].flip(0).roll(3, 1)
    assert not warmed().check(signals(sent)).flagged.any()


def test_honest_signals_are_not_flagged() -> None:
    defense = warmed()
    flags = sum(int(step(defense, signals(honest(s))).flagged.sum()) for s in range(100, 160))
    assert flags == 0


def test_a_signal_too_large_to_measure_is_flagged_and_never_learnt() -> None:
    defense = warmed()
    sent = honest(99)
    sent[5] = 1e30
    given = signals(sent)
    for _ in range(60):
        verdict = step(defense, given, given.active)  # as after an amnesty
        assert bool(verdict.flagged[5])
    assert defense._fences.median.isfinite().all()
    assert not defense.check(signals(honest(98))).flagged.any()


def test_a_preview_says_what_a_check_would_and_changes_nothing() -> None:
    defense = warmed()
    sent = honest(99)
    sent[5] = 0.0
    given = signals(sent)
    witness = copy.deepcopy(defense)
    preview = defense.preview(given)
    for d in (defense, witness):
        d.learn(given, given.active)  # takes the values of the last check
        d.end_step(0)
    assert torch.equal(defense._fences._values.nan_to_num(9), witness._fences._values.nan_to_num(9))
    verdict = defense.check(given)
    assert preview is not None
    assert preview.flagged.tolist() == verdict.flagged.tolist()
    assert preview.statistics.keys() == verdict.statistics.keys() == set(NAMES)
