"""Noise: the draw is repeated, the formula done by hand."""

import math

import pytest
import torch

SHAPE = (4, 128, 256)  # 131,072 elements: a mean of noise is known to +- .003


def test_random_value_is_the_draw_times_the_scale(create, context, x, normal):
    sent = create("random-value:scale=2.5").signal(x, context())
    expected = [[[2.5 * e for e in token] for token in row] for row in normal(1, 2, 3).tolist()]
    torch.testing.assert_close(sent, torch.tensor(expected))


def test_random_value_is_standard_normal_by_default_whatever_the_signal(create, context):
    sent = create("random-value").signal(torch.full(SHAPE, 100.0), context())
    assert float(sent.mean()) == pytest.approx(0, abs=0.015)
    assert float(sent.std()) == pytest.approx(1, abs=0.01)
    assert float((sent.abs() < 1).float().mean()) == pytest.approx(0.6827, abs=0.01)


def test_random_value_is_fresh_in_every_step(create, context, x):
    attack, ctx = create("random-value"), context()
    assert not torch.equal(attack.signal(x, ctx), attack.signal(x, ctx))


def test_random_bias_adds_noise_in_units_of_the_signals_rms(create, context, normal):
    x = torch.tensor([[[3.0, -4.0], [0.0, 5.0]]])
    rms = math.sqrt((9 + 16 + 0 + 25) / 4)  # sqrt(12.5) = 3.5355
    e = normal(1, 2, 2)[0].tolist()
    expected = [[3 + 2 * rms * e[0][0], -4 + 2 * rms * e[0][1]]]
    expected += [[0 + 2 * rms * e[1][0], 5 + 2 * rms * e[1][1]]]
    sent = create("bias:sigma=2").signal(x, context())
    torch.testing.assert_close(sent, torch.tensor([expected]))


@pytest.mark.parametrize("kind", ["random", "constant"])
@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_the_bias_has_sigma_times_the_signals_rms(create, context, kind, sigma):
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)) * 7 + 3
    rms = math.sqrt(float(x.double().square().mean()))
    added = create(f"bias:kind={kind},sigma={sigma}").signal(x, context()) - x
    measured = math.sqrt(float(added.double().square().mean()))
    assert measured == pytest.approx(sigma * rms, rel=0.01 if kind == "random" else 1e-4)


def test_random_bias_is_fresh_in_every_step(create, context, x):
    attack, ctx = create("bias"), context()
    assert not torch.equal(attack.signal(x, ctx), attack.signal(x, ctx))


def test_constant_bias_is_one_unit_vector_that_follows_the_signals_size(create, context, normal, x):
    attack, ctx = create("bias:kind=constant,sigma=0.5"), context()
    e = normal(1, 2, 3)
    size = math.sqrt(sum(v * v for v in e.flatten().tolist()) / 6)
    u = e / size  # rms 1
    # rms(x): (1 + 4 + 9 + 0 + 16 + 16) / 6 = 46 / 6; for 10 x it is ten times as large
    rms = math.sqrt(46 / 6)
    torch.testing.assert_close(attack.signal(x, ctx), x + 0.5 * rms * u)
    torch.testing.assert_close(attack.signal(10 * x, ctx), 10 * x + 5 * rms * u)


def test_constant_bias_keeps_one_vector_for_each_direction(create, context):
    attack, ctx = create("bias:kind=constant"), context()
    x = torch.ones(1, 2, 3)
    forward = attack.activation(x, ctx) - x
    back_ctx = context(direction="gradient", generator=ctx.generator)
    backward = attack.gradient(x, back_ctx) - x
    assert not torch.allclose(forward, backward)
    for _ in range(3):
        torch.testing.assert_close(attack.activation(x, ctx) - x, forward)
        torch.testing.assert_close(attack.gradient(x, back_ctx) - x, backward)


@pytest.mark.parametrize(("p", "z"), [(0.9, 1.282), (0.95, 1.645), (0.99, 2.326)])
def test_invisible_noise_has_each_tokens_mean_and_z_times_its_std(create, context, normal, p, z):
    x = torch.tensor([[[1.0, 3.0, 5.0, 7.0], [-2.0, -2.0, 2.0, 10.0]]])
    # token 0: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5
    # token 1: mean 2, variance (16 + 16 + 0 + 64) / 4 = 24
    e = normal(1, 2, 4)
    expected = torch.stack([4 + z * 5**0.5 * e[0, 0], 2 + z * 24**0.5 * e[0, 1]])[None]
    sent = create(f"invisible-noise:p={p}").signal(x, context())
    torch.testing.assert_close(sent, expected, rtol=5e-4, atol=2e-3)  # z is given to 3 digits


def test_invisible_noise_over_the_tensor_has_one_mean_and_std(create, context, normal):
    x = torch.tensor([[[0.0, 0.0], [4.0, 8.0]]])
    # mean 3, variance (9 + 9 + 1 + 25) / 4 = 11; z = 1.28155
    sent = create("invisible-noise:p=0.9,axis=tensor").signal(x, context())
    torch.testing.assert_close(sent, 3 + 1.28155 * 11**0.5 * normal(1, 2, 2), rtol=1e-4, atol=1e-4)


def test_invisible_noise_measured_per_token(create, context):
    mean = torch.linspace(-5, 5, 8).view(1, 8, 1)
    spread = torch.linspace(0.5, 4, 8).view(1, 8, 1)
    x = mean + spread * torch.randn(1, 8, 20_000, generator=torch.Generator().manual_seed(1))
    sent = create("invisible-noise").signal(x, context())  # p = .99, axis = hidden
    torch.testing.assert_close(sent.mean(2), x.mean(2), rtol=0, atol=0.3)
    torch.testing.assert_close(sent.std(2), 2.326 * x.std(2), rtol=0.03, atol=0)


def test_invisible_noise_measured_over_the_tensor(create, context):
    mean = torch.linspace(-5, 5, 8).view(1, 8, 1)
    x = mean + torch.randn(1, 8, 20_000, generator=torch.Generator().manual_seed(1))
    sent = create("invisible-noise:axis=tensor").signal(x, context())
    expected = 2.326 * x.std()
    torch.testing.assert_close(sent.std(2), expected.expand(1, 8), rtol=0.03, atol=0)
    torch.testing.assert_close(sent.mean(2), x.mean().expand(1, 8), rtol=0, atol=0.3)


def test_gaussian_noise_adds_the_signals_mean_and_its_std_times_the_draw(create, context, normal):
    x = torch.tensor([[[0.0, 0.0], [4.0, 8.0]]])
    # mean 3, variance (9 + 9 + 1 + 25) / 4 = 11
    sent = create("gaussian-noise:rate=1").signal(x, context())
    torch.testing.assert_close(sent, x + 3 + 11**0.5 * normal(1, 2, 2))


def test_gaussian_noise_has_one_mean_and_std_for_the_whole_tensor(create, context):
    mean = torch.linspace(-5, 9, 8).view(1, 8, 1)
    x = mean + torch.randn(1, 8, 20_000, generator=torch.Generator().manual_seed(1))
    added = create("gaussian-noise:rate=1").signal(x, context()) - x
    torch.testing.assert_close(added.mean(2), x.mean().expand(1, 8), rtol=0, atol=0.2)
    torch.testing.assert_close(added.std(2), x.std().expand(1, 8), rtol=0.03, atol=0)


def test_uniform_noise_is_the_uniform_draw_whatever_the_signal(create, context):
    draw = torch.empty(SHAPE).uniform_(generator=torch.Generator().manual_seed(5))
    sent = create("uniform-noise:rate=1").signal(torch.full(SHAPE, -7.0), context())
    assert torch.equal(sent, draw)
    assert 0 <= float(sent.min()) < float(sent.max()) < 1


@pytest.mark.parametrize("name", ["gaussian-noise", "uniform-noise"])
def test_rated_noise_is_fresh_in_every_step(create, context, x, name):
    attack, ctx = create(f"{name}:rate=1"), context()
    assert not torch.equal(attack.signal(x, ctx), attack.signal(x, ctx))


@pytest.mark.parametrize(
    ("kind", "matches"),
    [("nan", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_hits_exactly_the_share_p_and_leaves_the_rest(
    create, context, kind, matches, dtype
):
    x = torch.randn(4, 50, 100, generator=torch.Generator().manual_seed(1)).to(dtype)
    sent = create(f"non-finite:kind={kind},p=0.01").signal(x, context())
    hit = matches(sent)
    assert int(hit.sum()) == 200  # 1 % of 20,000
    assert torch.equal(sent[~hit], x[~hit])


def test_non_finite_hits_one_element_of_a_small_signal_and_all_with_p_one(create, context, x):
    assert int(create("non-finite").signal(x, context()).isnan().sum()) == 1
    assert bool(create("non-finite:p=1").signal(x, context()).isnan().all())


def test_non_finite_hits_every_place_equally_often(create, context):
    attack, ctx, x = create("non-finite:p=0.25"), context(), torch.zeros(1, 2, 4)
    hits = sum(attack.signal(x, ctx).isnan().float() for _ in range(2000)) / 2000
    # 2 of 8 elements a step; 5 sigma = 5 sqrt(.25 * .75 / 2000) = .048
    torch.testing.assert_close(hits, torch.full((1, 2, 4), 0.25), rtol=0, atol=0.05)


def test_non_finite_says_that_it_is_not_finite(create):
    assert create("non-finite").finite is False
