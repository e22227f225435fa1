"""Attacks that act in a share of the steps: one draw a step, for both directions."""

import pytest
import torch

RATED = {"sign-flip": 1.0, "gaussian-noise": 0.7, "uniform-noise": 0.5}
every_rated = pytest.mark.parametrize("name", RATED)


@every_rated
def test_the_share_of_the_steps_is_the_published_one_by_default(create, name):
    assert create(name).params.rate == RATED[name]


@every_rated
def test_it_acts_in_the_share_of_the_steps_that_rate_says(create, context, x, name):
    attack, ctx = create(f"{name}:rate=0.3"), context()
    acted = 0
    for step in range(2000):
        ctx.step = step
        acted += attack.signal(x, ctx) is not x
    assert acted / 2000 == pytest.approx(0.3, abs=0.05)  # 5 sigma = 5 sqrt(.21 / 2000) = .051


@every_rated
def test_it_acts_in_both_directions_of_a_step_or_in_none(create, context, x, name):
    attack, ctx = create(f"{name}:rate=0.5"), context()
    seen = set()
    for step in range(40):
        acts = set()
        for direction in ("activation", "gradient"):
            here = context(step=step, direction=direction, generator=ctx.generator)
            acts.add(attack.send(x, here) is not x)
        assert len(acts) == 1
        seen |= acts
    assert seen == {True, False}


@every_rated
def test_with_rate_one_it_always_acts_and_draws_nothing_for_it(create, context, x, name):
    attack, ctx = create(f"{name}:rate=1"), context()
    before = ctx.generator.get_state()
    assert attack.acts(ctx)
    assert torch.equal(ctx.generator.get_state(), before)
    for step in range(50):
        ctx.step = step
        assert attack.signal(x, ctx) is not x
