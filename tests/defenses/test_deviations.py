"""The four deviations of Sentinel: by hand, against references, and where they degenerate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

from sentinel_bench.defenses.statistics import l1, l2, sfr, swd, unit_directions


def row(*values: float) -> torch.Tensor:
    """One replica, one sequence, one token."""
    return torch.tensor([[list(values)]])


def tokens(*rows: list[float]) -> torch.Tensor:
    """One sequence of several tokens."""
    return torch.tensor([rows])


def stack(*replicas: torch.Tensor) -> torch.Tensor:
    return torch.stack(replicas)


def random(seed: int, replicas: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(replicas, 3, 6, 8, generator=generator) * 2 + 0.5
    return x, torch.randn(3, 6, 8, generator=generator) - 0.25


def all_of(x: torch.Tensor, m: torch.Tensor) -> dict[str, torch.Tensor]:
    directions = unit_directions(x.shape[-1], 4, 0, "cpu")
    return {
        "l1": l1(x, m),
        "l2": l2(x, m),
        "l2 token": l2(x, m, "token"),
        "sfr": sfr(x, m),
        "swd": swd(x, m, directions),
    }


# --- l1 -------------------------------------------------------------------------------------------


def test_l1_is_the_mean_absolute_difference_of_each_replica():
    m = tokens([0.0, 2.0], [5.0, 4.0])
    x = stack(tokens([1.0, 2.0], [3.0, 4.0]), m)
    assert l1(x, m).tolist() == [0.75, 0.0]  # (1 + 0 + 2 + 0) / 4


@pytest.mark.parametrize("seed", range(3))
def test_l1_against_numpy(seed):
    x, m = random(seed)
    expected = [np.abs(r - m.numpy()).mean() for r in x.numpy()]
    np.testing.assert_allclose(l1(x, m).numpy(), expected, rtol=1e-5)


# --- l2 -------------------------------------------------------------------------------------------


def test_l2_compares_standardised_values():
    m = row(1.0, 2.0, 3.0, 4.0)  # mean 2.5, variance 1.25
    x = stack(
        row(10.0, 20.0, 30.0, 40.0),  # the same when standardised: 0
        row(4.0, 3.0, 2.0, 1.0),  # z(x) = -z(m): mean (2 z)^2 = 4 mean z^2 = 4
        row(1.0, -1.0, -1.0, 1.0),  # orthogonal to z(m): mean zx^2 + mean zm^2 = 2
        row(2.0, 1.0, 4.0, 3.0),  # r = (-1.5*-.5 + -.5*-1.5 + .5*1.5 + 1.5*.5) / 5 = .6: 2 - 1.2
    )
    torch.testing.assert_close(l2(x, m), torch.tensor([0.0, 4.0, 2.0, 0.8]), atol=1e-6, rtol=0)


def test_l2_over_tokens_standardises_each_token():
    m = tokens([1.0, 3.0], [10.0, 30.0])
    x = stack(tokens([1.0, 3.0], [30.0, 10.0]))
    # token by token: 0 and 4, mean 2
    assert l2(x, m, "token").item() == pytest.approx(2.0)
    # together: both have mean 11, squares 100 + 64 + 361 + 1 = 526;
    # products -10*-10 + -8*-8 + -1*19 + 19*-1 = 126: 2 - 2 * 126 / 526
    assert l2(x, m).item() == pytest.approx(2 - 252 / 526, rel=1e-5)


@pytest.mark.parametrize("axis", ["tensor", "token"])
@pytest.mark.parametrize("seed", range(3))
def test_l2_against_numpy(seed, axis):
    def standardise(a):
        over = (2,) if axis == "token" else None
        return (a - a.mean(over, keepdims=True)) / a.std(over, keepdims=True)

    x, m = random(seed)
    z = standardise(m.double().numpy())
    expected = [((standardise(r) - z) ** 2).mean() for r in x.double().numpy()]
    np.testing.assert_allclose(l2(x, m, axis).numpy(), expected, rtol=1e-4)


@pytest.mark.parametrize("axis", ["tensor", "token"])
def test_l2_of_a_constant_counts_as_zeros_when_standardised(axis):
    m = random(0)[1]
    constant = torch.full_like(m, 2.0)
    x = stack(constant, torch.zeros_like(m), m)
    # mean (0 - z)^2 = 1
    torch.testing.assert_close(l2(x, m, axis), torch.tensor([1.0, 1.0, 0.0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        l2(x, constant, axis), torch.tensor([0.0, 0.0, 1.0]), atol=1e-5, rtol=0
    )


# --- sfr ------------------------------------------------------------------------------------------


def test_sfr_is_the_share_of_other_signs_and_zero_has_a_sign_of_its_own():
    m = row(0.0, -1.0, -1.0, 0.0, 3.0)
    x = stack(
        row(0.0, 1.0, -9.0, 2.0, 0.1),  # same, other, same, other (2 against 0), same
        row(-1.0, 0.0, 1.0, 0.0, 0.0),  # other, other (0 against -1), other, same, other
    )
    assert sfr(x, m).tolist() == pytest.approx([2 / 5, 4 / 5])


def test_sfr_of_a_negated_signal_is_one_and_of_a_scaled_one_is_zero():
    m = random(1)[1]
    assert sfr(stack(-m, 100 * m), m).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("seed", range(3))
def test_sfr_against_numpy(seed):
    x, m = (t.round() for t in random(seed))  # rounding makes zeros
    assert (x == 0).any()
    assert (m == 0).any()
    expected = [(np.sign(r) != np.sign(m.numpy())).mean() for r in x.numpy()]
    np.testing.assert_allclose(sfr(x, m).numpy(), expected, rtol=1e-6)


# --- swd ------------------------------------------------------------------------------------------


def test_swd_on_a_line_is_the_distance_of_the_sorted_tokens():
    m = tokens([8.0], [5.0], [6.0])
    x = stack(
        tokens([3.0], [0.0], [1.0]),  # 0 1 3 against 5 6 8: 5
        tokens([5.0], [6.0], [8.0]),  # the same points in another order: 0
        tokens([5.0], [5.0], [12.0]),  # 5 5 12 against 5 6 8: (0 + 1 + 4) / 3
    )
    result = swd(x, m, torch.tensor([[1.0]]))
    torch.testing.assert_close(result, torch.tensor([5.0, 0.0, 5 / 3]))


def test_swd_is_the_mean_over_the_directions():
    m = tokens([0.0, 0.0], [0.0, 0.0])
    x = stack(tokens([3.0, 0.0], [-1.0, 0.0]))
    # along e1: -1 3 against 0 0: 2; along e2: 0; along (.6, .8): 2 * .6 = 1.2
    directions = torch.tensor([[1.0, 0.0, 0.6], [0.0, 1.0, 0.8]])
    assert swd(x, m, directions).item() == pytest.approx((2 + 0 + 1.2) / 3)


@pytest.mark.parametrize("seed", range(3))
def test_swd_against_scipy(seed):
    x, m = random(seed)
    directions = unit_directions(8, 7, seed, "cpu")
    projections = m.reshape(-1, 8).double().numpy() @ directions.double().numpy()
    expected = []
    for replica in x.reshape(len(x), -1, 8).double().numpy():
        ours = replica @ directions.double().numpy()
        each = [wasserstein_distance(ours[:, i], projections[:, i]) for i in range(7)]
        expected.append(np.mean(each))
    np.testing.assert_allclose(swd(x, m, directions).numpy(), expected, rtol=1e-4)


def test_swd_does_not_see_the_order_of_the_tokens():
    m = random(2)[1]
    directions = unit_directions(8, 16, 0, "cpu")
    assert swd(stack(m.flip(0, 1)), m, directions).item() == pytest.approx(0, abs=1e-6)


def test_directions_are_unit_vectors_fixed_by_the_seed():
    directions = unit_directions(8, 500, 3, "cpu")
    assert directions.shape == (8, 500)
    torch.testing.assert_close(directions.square().sum(0), torch.ones(500))
    assert torch.equal(directions, unit_directions(8, 500, 3, "cpu"))
    assert not torch.equal(directions, unit_directions(8, 500, 4, "cpu"))
    assert directions.mean(1).abs().max() < 0.08  # 5 sigma = 5 / sqrt(8 * 500) = .079
    torch.testing.assert_close(
        directions.square().mean(1), torch.full((8,), 1 / 8), rtol=0.3, atol=0
    )


# --- all ------------------------------------------------------------------------------------------


def test_each_statistic_is_zero_for_the_reference_itself_and_looks_at_each_replica_alone():
    x, m = random(3)
    alone = [all_of(x[i : i + 1], m) for i in range(len(x))]
    for name, together in all_of(x, m).items():
        torch.testing.assert_close(together, torch.cat([a[name] for a in alone]))
        assert all_of(m[None], m)[name].item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("x_value", [0.0, 1.0, -3.0])
@pytest.mark.parametrize("m_value", [0.0, 1.0, -3.0])
def test_constants_give_finite_deviations(x_value, m_value):
    x, m = torch.full((2, 1, 4, 8), x_value), torch.full((1, 4, 8), m_value)
    found = all_of(x, m)
    assert all(value.isfinite().all() for value in found.values())
    assert found["l1"].tolist() == [abs(x_value - m_value)] * 2
    assert found["l2"].tolist() == found["l2 token"].tolist() == [0.0, 0.0]
    assert found["sfr"].tolist() == [float(np.sign(x_value) != np.sign(m_value))] * 2


def test_the_statistics_leave_their_inputs_alone():
    x, m = random(4)
    before = x.clone(), m.clone()
    all_of(x, m)
    assert torch.equal(x, before[0])
    assert torch.equal(m, before[1])
    assert (x._version, m._version) == (0, 0)
