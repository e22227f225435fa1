"""Attacks on weight gradients, and `label-flip`: by hand, and what their formulas promise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sentinel_bench.api import Knowledge, UpdateContext
from sentinel_bench.attacks.byzantine import largest_gamma, perturbation
from sentinel_bench.config import Component
from sentinel_bench.errors import ConfigError, KnowledgeError
from sentinel_bench.registry import attacks

AMONG_HONEST = [
    "update-ipm",
    "update-alie",
    *(f"update-{name}:d={d}" for name in ("min-max", "min-sum") for d in ("mean", "sign", "std")),
    "update-mimic",
]
NAMES = ["update-sign-flip", *AMONG_HONEST]
every_name = pytest.mark.parametrize("name", NAMES)
every_among_honest = pytest.mark.parametrize("name", AMONG_HONEST)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (drawn * 2 + 0.5).to(dtype)


def make(honest: Tensor | None = None, **changes: object) -> UpdateContext:
    known = {} if honest is None else {Knowledge.HONEST: lambda: honest}
    return UpdateContext(
        step=0,
        stage=1,
        replica=0,
        direction="update",
        received=None,
        history=(),
        generator=torch.Generator().manual_seed(5),
        granted=known,
        **changes,
    )


@pytest.fixture
def send(create):
    """Contribute for `grad`, by an attack that sees `honest`."""
    return lambda name, grad, honest=None: create(name).update(grad, make(honest))


# --- by hand --------------------------------------------------------------------------------------


def test_update_sign_flip_contributes_minus_gain_times_its_gradient(send):
    grad = torch.tensor([1.0, -2.0, 0.5])
    assert send("update-sign-flip", grad).tolist() == [-1.0, 2.0, -0.5]
    assert send("update-sign-flip:gain=4", grad).tolist() == [-4.0, 8.0, -2.0]


def test_update_ipm_contributes_minus_eps_times_the_mean(send):
    honest = torch.tensor([[3.0, 1.0], [1.0, 3.0]])  # mean (2, 2)
    assert send("update-ipm", torch.tensor([7.0, 9.0]), honest).tolist() == [-1.0, -1.0]


def test_update_alie_contributes_the_mean_less_z_population_standard_deviations(send):
    honest = torch.tensor([[1.0, 5.0], [3.0, -1.0]])  # mean (2, 2), std (1, 3)
    assert send("update-alie", torch.tensor([7.0, 9.0]), honest).tolist() == [0.5, -2.5]


# Honest at 0, 2 and 10 on a line: mean 4, and mean and sign lead down it.
LINE = torch.tensor([[0.0, 0.0], [2.0, 0.0], [10.0, 0.0]])


@pytest.mark.parametrize("d", ["mean", "sign", "std"])
def test_update_min_max_goes_from_the_mean_as_far_as_two_honest_are_apart(send, d):
    # two are 10 apart; from 4 - t the furthest is 10, at 6 + t: t = 4
    sent = send(f"update-min-max:d={d}", torch.tensor([7.0, 9.0]), LINE)
    torch.testing.assert_close(sent, torch.tensor([0.0, 0.0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("d", ["mean", "sign", "std"])
def test_update_min_sum_goes_from_the_mean_as_far_as_one_honest_is_from_the_others(send, d):
    # sums of squares: 4 + 100, 4 + 64, 100 + 64 = 164, the bound;
    # from 4 - t: (4 - t)^2 + (2 - t)^2 + (6 + t)^2 = 56 + 3 t^2, so t = 6
    sent = send(f"update-min-sum:d={d}", torch.tensor([7.0, 9.0]), LINE)
    torch.testing.assert_close(sent, torch.tensor([-2.0, 0.0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["update-min-max", "update-min-sum"])
def test_they_take_the_std_by_default(send, name):
    grad, honest = random(1, 40), random(2, 5, 40)
    assert torch.equal(send(name, grad, honest), send(f"{name}:d=std", grad, honest))


@pytest.mark.parametrize(("of", "expected"), [(0, 0), (2, 2), (4, 1)])
def test_update_mimic_contributes_what_one_replica_does_and_no_alias_of_it(send, of, expected):
    honest = random(2, 3, 40)
    sent = send(f"update-mimic:of={of}", random(1, 40), honest)
    assert torch.equal(sent, honest[expected])
    sent.fill_(0)
    assert honest.all()


# --- properties -----------------------------------------------------------------------------------


@pytest.mark.parametrize("d", ["mean", "sign", "std"])
@pytest.mark.parametrize("name", ["update-min-max", "update-min-sum"])
def test_what_is_contributed_meets_the_bound_of_the_honest_alone(send, name, d):
    honest = random(2, 6, 300)
    sent = send(f"{name}:d={d}", random(1, 300), honest)
    distances = (honest[:, None] - honest).square().sum(2)
    reached = (honest - sent).square().sum(1)
    if name == "update-min-max":
        assert float(reached.max()) == pytest.approx(float(distances.max()), rel=1e-4)
    else:
        assert float(reached.sum()) == pytest.approx(float(distances.sum(1).max()), rel=1e-4)


@pytest.mark.parametrize("summed", [False, True])
def test_for_the_min_max_bound_it_does_not_matter_whether_the_mean_is_counted(summed):
    honest = random(2, 6, 300)
    mean, direction = honest.mean(0), perturbation(honest, "std")
    alone, counted = (
        float(largest_gamma(mean, honest, direction, summed=summed, counted=c))
        for c in (False, True)
    )
    # the mean is nearer to each than some other is; but it adds to the sum of each
    assert (alone == counted) is not summed
    assert alone <= counted


def test_update_ipm_has_a_negative_inner_product_with_the_honest_mean(send):
    honest = random(2, 5, 300)
    assert float(send("update-ipm", random(1, 300), honest) @ honest.mean(0)) < 0


@every_among_honest
def test_all_attackers_of_a_stage_contribute_the_same(send, name):
    honest = random(2, 5, 300)
    one, other = (send(name, random(seed, 300), honest) for seed in (3, 4))
    assert torch.equal(one, other)


@every_name
@every_dtype
@pytest.mark.parametrize("size", [1, 300])
def test_random_gradients_are_changed_and_keep_shape_and_dtype(send, name, dtype, size):
    grad, honest = random(1, size, dtype=dtype), random(2, 5, size, dtype=dtype)
    sent = send(name, grad, honest)
    assert (sent.shape, sent.dtype) == (grad.shape, dtype)
    assert sent.isfinite().all()
    assert not torch.equal(sent, grad)


@every_name
def test_neither_the_gradient_nor_those_of_the_others_are_changed(send, name):
    grad, honest = random(1, 300), random(2, 5, 300)
    given = [(t, t.clone(), t._version) for t in (grad, honest)]
    send(name, grad, honest).fill_(9)
    for tensor, value, version in given:
        assert torch.equal(tensor, value)
        assert tensor._version == version


# --- edges ----------------------------------------------------------------------------------------


@every_among_honest
def test_without_an_honest_replica_the_attack_is_honest(send, name):
    grad = random(1, 300)
    assert send(name, grad, random(2, 0, 300)) is grad


@pytest.mark.parametrize("name", ["update-alie", "update-min-max", "update-min-sum"])
def test_of_one_honest_replica_alone_there_is_only_the_mean(send, name):
    honest = random(2, 1, 300)
    assert torch.equal(send(name, random(1, 300), honest), honest[0])


@every_name
@every_dtype
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("value", [0.0, 1.0, -1e4, 1e-8])
def test_constant_gradients_stay_finite(send, name, dtype, n, value):
    grad = torch.full((300,), value, dtype=dtype)
    assert send(name, grad, grad.expand(n, 300).clone()).isfinite().all()


@every_name
@pytest.mark.parametrize("n", [3, 5, 6, 7])
def test_honest_gradients_that_are_all_the_same_stay_finite(send, name, n):
    # their mean is a rounding apart from each, and so further than they are from one another
    honest = random(2, 300).expand(n, 300).clone()
    assert not torch.equal(honest.mean(0), honest[0])
    assert send(name, random(1, 300), honest).isfinite().all()


@every_name
def test_honest_gradients_that_cancel_stay_finite(send, name):
    half = random(2, 3, 300)
    assert send(name, random(1, 300), torch.cat([half, -half])).isfinite().all()


@every_dtype
@pytest.mark.parametrize("name", [*AMONG_HONEST, "update-sign-flip:gain=10"])
def test_the_largest_numbers_do_not_overflow(send, name, dtype):
    largest = 0.99 * torch.finfo(dtype).max
    grad = random(1, 300).sign().to(dtype) * largest
    honest = random(2, 5, 300).sign().to(dtype) * largest
    sent = send(name, grad, honest)
    assert sent.isfinite().all()
    assert sent.dtype is dtype


# --- knowledge and parameters ---------------------------------------------------------------------


@every_among_honest
def test_what_the_others_contribute_is_all_that_it_asks_to_know(name, send):
    attack = attacks.create(Component.parse(name))
    assert attack.needs() == {Knowledge.OWN, Knowledge.HONEST}
    with pytest.raises(KnowledgeError):
        send(name, random(1, 300))


@pytest.mark.parametrize("name", ["update-sign-flip", "label-flip"])
def test_some_know_no_more_than_their_own(name):
    assert attacks.create(Component.parse(name)).needs() == {Knowledge.OWN}


@pytest.mark.parametrize("name", [*NAMES, "label-flip"])
def test_they_act_on_weights_and_leave_signals_alone(name):
    attack, x = attacks.create(Component.parse(name)), random(1, 2, 4, 8)
    assert attack.axis == "weights"
    assert attack.signal(x, make()) is x


@pytest.mark.parametrize(
    "text",
    [
        "update-sign-flip:gain=0",
        "update-ipm:eps=0",
        "update-alie:z=0",
        "update-min-max:d=median",
        "update-mimic:of=-1",
        "label-flip:shift=0",
    ],
)
def test_an_impossible_parameter_is_an_error(text):
    component = Component.parse(text)
    (key,) = component.params
    with pytest.raises(ConfigError, match=f"attack {component.name}: {key}: "):
        attacks.create(component)


# --- label-flip -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("label-flip", [[1, 5, 0], [4, 3, 6]]), ("label-flip:shift=3", [[3, 0, 2], [6, 5, 1]])],
)
def test_label_flip_contributes_its_gradients_for_labels_shifted_around(create, name, wrong):
    targets = torch.tensor([[0, 4, 6], [3, 2, 5]])  # of a vocabulary of 7
    asked, grad, flipped = [], random(1, 300), random(2, 300)

    def relabel(labels: Tensor) -> Tensor:
        asked.append(labels)
        return flipped

    ctx = make(targets=targets, vocabulary=7, relabel=relabel)
    assert torch.equal(create(name).update(grad, ctx), flipped)
    assert [labels.tolist() for labels in asked] == [wrong]
    assert targets.tolist() == [[0, 4, 6], [3, 2, 5]]
