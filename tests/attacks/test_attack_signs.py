"""`scaling`, `sign-flip` and `random-sign` against values worked out by hand."""

import pytest
import torch


def test_scaling_turns_the_signal_around_by_default(create, context, x):
    sent = create("scaling").signal(x, context())
    assert sent.tolist() == [[[-1.0, 2.0, -3.0], [0.0, -4.0, 4.0]]]


def test_scaling_multiplies_by_alpha(create, context, x):
    sent = create("scaling:alpha=0.5").signal(x, context())
    assert sent.tolist() == [[[0.5, -1.0, 1.5], [0.0, 2.0, -2.0]]]


def test_sign_flip_negates_every_signal_by_default(create, context, x):
    attack, ctx = create("sign-flip"), context()
    for _ in range(50):
        assert attack.signal(x, ctx).tolist() == [[[-1.0, 2.0, -3.0], [0.0, -4.0, 4.0]]]


def test_sign_flip_acts_when_the_draw_of_the_step_is_below_the_rate(create, context, x):
    attack, ctx = create("sign-flip:rate=0.7"), context()
    again = torch.Generator().manual_seed(5)
    for step in range(40):
        ctx.step = step
        flips = float(torch.rand((), generator=again)) < 0.7  # one uniform draw a step
        for _ in ("activation", "gradient"):
            sent = attack.signal(x, ctx)
            assert torch.equal(sent, -x if flips else x)
            assert flips or sent is x  # the argument itself is honesty


@pytest.mark.parametrize("rate", [0.2, 0.7])
def test_sign_flip_acts_in_the_share_of_the_steps_that_rate_says(create, context, x, rate):
    attack, ctx = create(f"sign-flip:rate={rate}"), context()
    flipped = 0
    for step in range(2000):
        ctx.step = step
        flipped += attack.signal(x, ctx) is not x
    assert flipped / 2000 == pytest.approx(rate, abs=0.04)  # 4 sigma = 4 sqrt(.25 / 2000) = .045


def test_random_sign_negates_where_the_uniform_draw_is_below_p(create, context, x):
    draws = torch.empty(1, 2, 3).uniform_(generator=torch.Generator().manual_seed(5))
    expected = [
        [
            [-v if u < 0.5 else v for v, u in zip(*rows, strict=True)]
            for rows in zip(*t, strict=True)
        ]
        for t in zip(x.tolist(), draws.tolist(), strict=True)
    ]
    assert 0 < int((draws < 0.5).sum()) < 6  # the seed shows both cases
    assert create("random-sign:p=0.5").signal(x, context()).tolist() == expected


def test_random_sign_of_one_negates_everything(create, context, x):
    assert torch.equal(create("random-sign:p=1").signal(x, context()), -x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.001, 0.01, 0.1, 0.3])
def test_random_sign_negates_a_share_p_and_keeps_every_size(create, context, p, dtype):
    x = torch.ones(4, 250, 400, dtype=dtype) * 3
    sent = create(f"random-sign:p={p}").signal(x, context())
    assert torch.equal(sent.abs(), x)
    share = float((sent < 0).float().mean())
    assert share == pytest.approx(p, abs=5 * (p * (1 - p) / x.numel()) ** 0.5)


def test_random_sign_draws_anew_in_every_step(create, context):
    attack, ctx, x = create("random-sign:p=0.3"), context(), torch.ones(2, 8, 8)
    assert not torch.equal(attack.signal(x, ctx), attack.signal(x, ctx))
