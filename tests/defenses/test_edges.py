"""Corners that once gave a wrong number."""

import pytest
import torch

from sentinel_bench import registry
from sentinel_bench.api import Setup, Signals
from sentinel_bench.config import Component
from sentinel_bench.defenses import statistics
from sentinel_bench.defenses.fence import Fences, FenceSettings
from sentinel_bench.errors import ConfigError


def fences(replicas: int = 4, window: int = 100, min_steps: int = 3, **over: float) -> Fences:
    values = {"k0": 1.5, "alpha": 0.05, "grow": 1.1, "shrink": 0.9, "slack": 0.1}
    values |= {"least": 0.1, "eps": 1e-3, **over}
    settings = FenceSettings(**{k: torch.tensor([v]) for k, v in values.items()})
    return Fences(settings, replicas, window, 10, min_steps)


def test_a_fence_without_deviations_stays_open() -> None:
    f = fences()
    for _ in range(5):
        f.push(torch.full((1, 4), torch.nan))
    outside, distance = f.outside(slice(0, 1), torch.tensor([[0.0, 1e9, -1e9, 5.0]]))
    assert not outside.any()
    assert (distance == 0).all()


def test_a_fence_closes_after_min_steps_whatever_the_number_of_replicas() -> None:
    for replicas in (1, 2, 8):
        f = fences(replicas=replicas, min_steps=3)
        closed = []
        for _ in range(4):
            f.push(torch.rand(1, replicas) + 1)
            closed.append(not bool(f.half_width.isinf()))
        assert closed == [False, False, True, True]


def test_a_share_of_exactly_alpha_does_not_widen_the_fence() -> None:
    # 40 values: 38 ones and two at 1 +- 0.5. Both outer ones lie outside of k * eps: 2 / 40 = alpha
    f = fences(replicas=4, min_steps=10, k0=2.0, eps=0.1, slack=1.0)
    for step in range(10):
        values = torch.ones(1, 4)
        if step < 2:
            values[0, 0] = 0.5 + step
        f.push(values)
    assert float(f.k) == pytest.approx(2.0)


def test_l2_of_a_constant_is_one_whatever_the_constant() -> None:
    m = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(0))
    for constant in (0.1, 0.3, 1.0, 100.1, 1e-3, 0.0):
        x = torch.full((2, 4, 64, 64), constant)
        assert statistics.l2(x, m).tolist() == [1.0, 1.0]


def test_l2_does_not_depend_on_the_scale_of_tiny_signals() -> None:
    m = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0)) * 1e-12
    assert float(statistics.l2(m[None], m)) == pytest.approx(0.0, abs=1e-5)


def test_no_flag_before_the_fences_are_closed_even_without_a_warm_up() -> None:
    defense = registry.defenses.create(Component(name="sentinel"))
    defense.start(Setup(2, 4, (2, 4, 8)))
    active = torch.ones(4, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    for step in range(9):
        x = torch.randn(4, 2, 4, 8, generator=generator)
        signals = Signals(0, "activation", step, x, None, active)
        verdict = defense.check(signals)
        assert not verdict.flagged.any()
        assert not verdict.severe.any()
        defense.learn(signals, active)
        defense.end_step(step)


@pytest.mark.parametrize(
    "bad", ["beta=1", "beta=1.5", "shrink=2", "grow=.5", "eps=0", "k0=0", "statistics=[l1,l1]"]
)
def test_impossible_settings_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError):
        registry.defenses.params(Component.parse(f"sentinel:{bad}"))


def test_averaging_keeps_no_average() -> None:
    sizes = {}
    for name in ("sentinel", "averaging"):
        defense = registry.defenses.create(Component(name=name))
        defense.start(Setup(2, 4, (2, 4, 8)))
        before = defense.state_bytes()
        x = torch.randn(4, 2, 4, 8)
        active = torch.ones(4, dtype=torch.bool)
        signals = Signals(0, "activation", 0, x, None, active)
        defense.check(signals)
        defense.learn(signals, active)
        sizes[name] = defense.state_bytes() - before
    assert sizes == {"sentinel": 2 * 4 * 8 * 4, "averaging": 0}
