"""`ipm`, `alie`, `min-max`, `min-sum`, `mimic`: by hand, and what their formulas promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sentinel_bench.api import Knowledge
from sentinel_bench.attacks.byzantine import largest_gamma, perturbation
from sentinel_bench.config import Component
from sentinel_bench.errors import ConfigError
from sentinel_bench.registry import attacks

NAMES = [
    "ipm",
    "alie",
    *(f"{name}:d={d}" for name in ("min-max", "min-sum") for d in ("mean", "sign", "std")),
    "mimic",
]
DIRECTIONS = ("activation", "gradient")
every_name = pytest.mark.parametrize("name", NAMES)
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)


def signal(*values: float) -> Tensor:
    """One sequence of one token."""
    return torch.tensor([[list(values)]])


def others(*rows: list[float]) -> Tensor:
    """What some honest replicas send: one sequence of one token each."""
    return torch.stack([signal(*row) for row in rows])


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (drawn * 2 + 0.5).to(dtype)


@pytest.fixture
def send(create, context):
    """Send `x` by an attack that sees `honest`."""

    def run(name: str, x: Tensor, honest: Tensor, direction: str = "activation") -> Tensor:
        known = {Knowledge.HONEST: lambda: honest}
        return create(name).send(x, context(direction=direction, granted=known))

    return run


# --- by hand --------------------------------------------------------------------------------------


def test_ipm_turns_around_what_an_activation_shares_with_the_mean_of_the_others(send):
    # mean (2, 2); x.m / m.m = 6 / 8, so the projection is (1.5, 1.5), taken away 1.5 times
    sent = send("ipm", signal(1.0, 2.0), others([3.0, 1.0], [1.0, 3.0]))
    torch.testing.assert_close(sent, signal(-1.25, -0.25))


def test_ipm_projects_the_whole_flattened_activation(send):
    # two tokens of one unit are the same vector (1, 2) as above
    x, honest = signal(1.0, 2.0).mT, others([3.0, 1.0], [1.0, 3.0]).mT
    torch.testing.assert_close(send("ipm", x, honest), signal(-1.25, -0.25).mT)


def test_ipm_sends_minus_eps_times_the_mean_of_the_others_gradients(send):
    sent = send("ipm:eps=0.25", signal(7.0, 9.0), others([3.0, 1.0], [1.0, 3.0]), "gradient")
    torch.testing.assert_close(sent, signal(-0.5, -0.5))  # -1/4 (2, 2)


@every_direction
def test_alie_goes_down_by_z_population_standard_deviations_of_each_element(send, direction):
    # means (2, 2), deviations 1 and 3 from them: std (1, 3); (10, 10) - 1.5 (1, 3)
    sent = send("alie", signal(10.0, 10.0), others([1.0, 5.0], [3.0, -1.0]), direction)
    torch.testing.assert_close(sent, signal(8.5, 5.5))


@every_direction
@pytest.mark.parametrize("d", ["mean", "sign", "std"])
def test_min_max_goes_as_far_from_the_furthest_as_any_two_are_apart(send, d, direction):
    # squared distances: 16 between the honest, 18 and 10 to x: 18 is the bound.
    # Each d is along (-1, 0). At (t, -3): t^2 + 9 <= 18 and (t - 4)^2 + 9 <= 18, so t = 1.
    honest = others([0.0, 0.0], [4.0, 0.0])
    sent = send(f"min-max:d={d}", signal(3.0, -3.0), honest, direction)
    torch.testing.assert_close(sent, signal(1.0, -3.0))


@every_direction
@pytest.mark.parametrize("d", ["mean", "sign", "std"])
def test_min_sum_goes_as_far_from_all_together_as_any_one_is_from_the_others(send, d, direction):
    # sums: 16 + 18 = 34 and 16 + 10 = 26 for the honest, 18 + 10 = 28 for x: 34 is the bound.
    # At (t, -3): t^2 + 9 + (t - 4)^2 + 9 = 34, so (t - 2)^2 = 4 and t = 0.
    honest = others([0.0, 0.0], [4.0, 0.0])
    sent = send(f"min-sum:d={d}", signal(3.0, -3.0), honest, direction)
    torch.testing.assert_close(sent, signal(0.0, -3.0), atol=1e-6, rtol=0)


@pytest.mark.parametrize("n", [2, 3, 7, 33])
@pytest.mark.parametrize("name", ["min-max", "min-sum"])
def test_who_is_the_furthest_out_already_and_would_go_further_stays_bit_for_bit(send, name, n):
    honest = random(2, n, 2, 4, 8)
    x = honest.mean(0) - 9 * honest.std(0)  # -std leads away from all
    assert torch.equal(send(name, x, honest), x)


@pytest.mark.parametrize("name", ["min-max", "min-sum"])
def test_min_max_and_min_sum_take_the_std_by_default(send, name):
    x, honest = random(1, 2, 3, 4), random(2, 5, 2, 3, 4)
    assert torch.equal(send(name, x, honest), send(f"{name}:d=std", x, honest))


def test_the_directions_are_against_the_mean_its_signs_and_the_population_std():
    honest = torch.tensor([[1.0, -4.0, 0.0], [5.0, -4.0, 0.0]])  # mean (3, -4, 0), of length 5
    torch.testing.assert_close(perturbation(honest, "mean"), torch.tensor([-0.6, 0.8, 0.0]))
    torch.testing.assert_close(perturbation(honest, "sign"), torch.tensor([-1.0, 1.0, 0.0]))
    torch.testing.assert_close(perturbation(honest, "std"), torch.tensor([-2.0, 0.0, 0.0]))


@every_direction
@pytest.mark.parametrize(("of", "expected"), [(0, 0), (2, 2), (3, 0), (7, 1)])
def test_mimic_sends_what_one_replica_sends_by_its_number_modulo_theirs(
    send, of, expected, direction
):
    honest = random(2, 3, 2, 4, 8)
    sent = send(f"mimic:of={of}", random(1, 2, 4, 8), honest, direction)
    assert torch.equal(sent, honest[expected])
    sent.fill_(0)
    assert honest.all()  # a copy


# --- properties -----------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(2, 7),
    size=st.integers(1, 40),
    d=st.sampled_from(["mean", "sign", "std"]),
    summed=st.booleans(),
    counted=st.booleans(),
)
def test_gamma_meets_its_bound_and_nothing_beyond_it_does(seed, n, size, d, summed, counted):
    honest = random(seed, n, size).double()
    x = random(seed + 1, size).double() if counted else honest.mean(0)
    direction = perturbation(honest, d)
    gamma = float(largest_gamma(x, honest, direction, summed=summed, counted=counted))

    crowd = [*honest.numpy(), x.numpy()] if counted else [*honest.numpy()]
    total = np.sum if summed else np.max
    bound = max(total([((p - q) ** 2).sum() for q in crowd]) for p in crowd)

    def distance(gamma: float) -> float:
        sent = (x + gamma * direction).numpy()
        return float(total([((sent - h) ** 2).sum() for h in honest.numpy()]))

    beyond = [1.01 * gamma, 2 * gamma, 10 * gamma] if gamma else [0.01, 1.0, 100.0]
    assert gamma >= 0
    assert distance(gamma) == pytest.approx(bound, rel=1e-9)
    assert all(distance(g) > bound for g in beyond)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("d", ["mean", "sign", "std"])
@pytest.mark.parametrize("name", ["min-max", "min-sum"])
def test_what_is_sent_in_float32_meets_the_bound_even_far_from_zero(send, name, d, offset):
    x, honest = random(1, 2, 8, 16) + offset, random(2, 6, 2, 8, 16) + offset
    sent = send(f"{name}:d={d}", x, honest).double()
    crowd = torch.cat([honest, x[None]]).double().flatten(1)
    distances = (crowd[:, None] - crowd).square().sum(2)
    reached = (honest.double() - sent).square().flatten(1).sum(1)
    if name == "min-max":
        assert float(reached.max()) == pytest.approx(float(distances.max()), rel=1e-4)
    else:
        assert float(reached.sum()) == pytest.approx(float(distances.sum(1).max()), rel=1e-4)


@pytest.mark.parametrize("eps", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_ipm_leaves_minus_eps_times_the_component_along_the_mean_and_the_rest_alone(
    send, eps, seed
):
    x, honest = random(seed, 2, 4, 8), random(seed + 10, 5, 2, 4, 8)
    sent = send(f"ipm:eps={eps}", x, honest)
    m = honest.mean(0)
    before, after = float((x * m).sum()), float((sent * m).sum())
    assert after == pytest.approx(-eps * before, rel=1e-4)
    size = m.square().sum()
    torch.testing.assert_close(sent - after / size * m, x - before / size * m, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_ipm_gradients_have_a_negative_inner_product_with_the_honest_mean(send, seed):
    honest = random(seed, 5, 2, 4, 8)
    sent = send("ipm", random(seed + 10, 2, 4, 8), honest, "gradient")
    assert float((sent * honest.mean(0)).sum()) < 0


@every_name
@every_direction
def test_two_attackers_with_one_signal_send_the_same(send, name, direction):
    x, honest = random(1, 2, 4, 8), random(2, 5, 2, 4, 8)
    one, other = (send(name, x.clone(), honest.clone(), direction) for _ in range(2))
    assert torch.equal(one, other)


@every_name
@every_direction
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 4, 8), (1, 4, 8), (3, 1, 8), (1, 1, 8)], ids=str)
def test_random_signals_are_changed_and_keep_shape_and_dtype(send, name, direction, dtype, shape):
    changed = False
    for seed in range(5):
        x, honest = random(seed, *shape, dtype=dtype), random(seed + 10, 6, *shape, dtype=dtype)
        sent = send(name, x, honest, direction)
        assert (sent.shape, sent.dtype) == (shape, dtype)
        assert sent.isfinite().all()
        changed |= not torch.equal(sent, x)
    assert changed


@every_name
@every_direction
def test_neither_the_signal_nor_those_of_the_others_are_changed(send, name, direction):
    x, honest = random(1, 2, 4, 8), random(2, 5, 2, 4, 8)
    given = [(t, t.clone(), t._version) for t in (x, honest)]
    sent = send(name, x, honest, direction)
    sent.fill_(9)
    for tensor, value, version in given:
        assert torch.equal(tensor, value)
        assert tensor._version == version


# --- edges ----------------------------------------------------------------------------------------


@every_name
@every_direction
def test_without_an_honest_replica_the_attack_is_honest(send, name, direction):
    x = random(1, 2, 4, 8)
    assert send(name, x, random(2, 0, 2, 4, 8), direction) is x


@pytest.mark.parametrize("name", ["alie", "min-max:d=std", "min-sum:d=std"])
def test_one_honest_replica_alone_has_no_spread_to_hide_in(send, name):
    x = random(1, 2, 4, 8)
    assert torch.equal(send(name, x, random(2, 1, 2, 4, 8)), x)


@every_name
@every_direction
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [0.0, 1.0, -1e4, 1e-8])
def test_constant_signals_stay_finite(send, name, direction, n, dtype, value):
    x = torch.full((2, 4, 8), value, dtype=dtype)
    honest = x.expand(n, 2, 4, 8).clone()
    assert send(name, x, honest, direction).isfinite().all()
    if name.startswith(("alie", "min")):  # no spread: nowhere to go
        assert torch.equal(send(name, x, honest, direction), x)


@every_name
@every_direction
def test_honest_signals_that_cancel_stay_finite(send, name, direction):
    x, half = random(1, 2, 4, 8), random(2, 3, 2, 4, 8)
    assert send(name, x, torch.cat([half, -half]), direction).isfinite().all()


@every_name
@every_direction
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_largest_numbers_do_not_overflow(send, name, direction, dtype):
    def huge(seed: int, *shape: int) -> Tensor:
        """Nearly the largest numbers that there are, of both signs."""
        return random(seed, *shape).sign().to(dtype) * (0.99 * torch.finfo(dtype).max)

    sent = send(name, huge(1, 2, 4, 8), huge(2, 5, 2, 4, 8), direction)
    assert sent.isfinite().all()
    assert sent.dtype is dtype


@every_name
@every_direction
@pytest.mark.parametrize("exponent", [-90, 90])
def test_signals_of_another_size_meet_the_same_fate_at_that_size(send, name, direction, exponent):
    x, honest, size = random(1, 2, 4, 8), random(2, 5, 2, 4, 8), 2.0**exponent
    sent = send(name, x * size, honest * size, direction)
    assert torch.equal(sent, send(name, x, honest, direction) * size)


@every_name
@pytest.mark.parametrize("offset", [0.0, 8.0])
def test_a_bfloat16_signal_is_worked_on_in_float32(send, name, offset):
    x = random(1, 2, 4, 8, dtype=torch.bfloat16) + offset
    honest = random(2, 5, 2, 4, 8, dtype=torch.bfloat16) + offset
    expected = send(name, x.float(), honest.float()).bfloat16()
    assert torch.equal(send(name, x, honest), expected)


@every_name
def test_what_the_others_send_is_all_that_it_asks_to_know(name):
    assert attacks.create(Component.parse(name)).needs() == {Knowledge.OWN, Knowledge.HONEST}


@pytest.mark.parametrize(
    "text", ["ipm:eps=0", "alie:z=0", "min-max:d=median", "min-sum:d=max", "mimic:of=-1"]
)
def test_an_impossible_parameter_is_an_error(text):
    component = Component.parse(text)
    (key,) = component.params
    with pytest.raises(ConfigError, match=f"attack {component.name}: {key}: "):
        attacks.create(component)
