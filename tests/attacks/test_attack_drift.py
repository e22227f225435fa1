"""`slow-drift` and `ema-drift` against values worked out by hand."""

import math

import pytest
import torch

SILENT = "beta.activation=0.1,sigma=0"  # d = 1: the average of the step before; no noise


def row(*values: float) -> torch.Tensor:
    """One sequence of one token."""
    return torch.tensor([[values]])


# --- slow-drift -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age", "share"), [(0, 0.25), (1, 0.5), (2, 0.75), (3, 1.0), (4, 1.0), (900, 1.0)]
)
def test_slow_drift_grows_to_sigma_times_the_rms_over_the_ramp(
    create, context, normal, x, age, share
):
    e = normal(1, 2, 3)
    u = e / math.sqrt(sum(v * v for v in e.flatten().tolist()) / 6)  # rms 1
    rms = math.sqrt(46 / 6)  # 1 + 4 + 9 + 0 + 16 + 16
    sent = create("slow-drift:ramp=4,sigma=2").signal(x, context(age=age))
    torch.testing.assert_close(sent, x + share * 2 * rms * u)


def test_slow_drift_adds_a_thousandth_of_the_rms_in_its_first_step(create, context):
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1)).double()
    added = create("slow-drift").signal(x, context()) - x
    size = added.square().mean().sqrt() / x.square().mean().sqrt()
    assert float(size) == pytest.approx(0.001, rel=1e-3)


def test_slow_drift_keeps_one_vector_for_each_direction(create, context, x):
    attack, generator = create("slow-drift:ramp=1"), context().generator
    added = {"activation": [], "gradient": []}
    for age in range(3):
        for direction, kept in added.items():
            ctx = context(direction=direction, generator=generator, age=age)
            kept.append(attack.send(x, ctx) - x)
    for kept in added.values():
        for later in kept[1:]:
            torch.testing.assert_close(later, kept[0])
    assert not torch.allclose(added["activation"][0], added["gradient"][0])


def test_slow_drift_in_bfloat16_is_the_rounded_one_of_float32(create, context):
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    sent = create("slow-drift:ramp=10").signal(x, context())
    exact = create("slow-drift:ramp=10").signal(x.float(), context())
    assert torch.equal(sent, exact.bfloat16())


# --- ema-drift ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beta", "d"), [(0.9, 22), (0.8, 11), (0.5, 4), (0.1, 1), (0.01, 1)])
def test_the_average_is_so_old_that_a_step_weighs_a_tenth(create, beta, d):
    attack = create(f"ema-drift:beta.activation={beta},beta.gradient=0.3")
    assert attack.delay("activation") == d
    assert attack.delay("gradient") == 2  # .3^2 = .09
    assert attack.memory() == 2 * max(d, 2)


def test_by_default_the_decays_are_those_of_the_paper(create):
    attack = create("ema-drift")
    assert (attack.delay("activation"), attack.delay("gradient")) == (22, 11)


def test_ema_drift_steps_from_the_average_to_the_negated_signal(create, context):
    attack = create(f"ema-drift:{SILENT}")
    sent = attack.signal(row(1.0, 2.0), context(step=7, history=[row(3.0, 4.0)]))
    # m' = (3, 4), norm 5; target (-1, -2); (target - m') / 5 = (-.8, -1.2)
    torch.testing.assert_close(sent, row(2.2, 2.8))
    # m' = .1 (3, 4) + .9 (2.2, 2.8) = (2.28, 2.92), norm sqrt(13.7248) = 3.70470
    # target (2, 0); (target - m') / norm = (-.0755796, -.7881879)
    sent = attack.signal(row(-2.0, 0.0), context(step=8, history=[row(3.0, 4.0), row(1.0, 2.0)]))
    torch.testing.assert_close(sent, row(2.28 - 0.0755796, 2.92 - 0.7881879))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("a=0", (3.0, 4.0)),
        ("a=2", (1.4, 1.6)),
        ("target=zeros", (2.4, 3.2)),  # m' (1 - 1 / 5)
        ("norm=rms", (3 - 0.8 * 2**0.5, 4 - 1.2 * 2**0.5)),  # rms(m') = 5 / sqrt(2)
    ],
)
def test_ema_drift_with_other_settings(create, context, setting, expected):
    attack = create(f"ema-drift:{SILENT},{setting}")
    sent = attack.signal(row(1.0, 2.0), context(history=[row(3.0, 4.0)]))
    torch.testing.assert_close(sent, row(*expected))


def test_ema_drift_to_a_random_target_keeps_one_vector_of_the_signals_rms(create, context, normal):
    attack, generator = create(f"ema-drift:{SILENT},target=random,a=5"), context().generator
    e = normal(1, 1, 2)
    u = e / e.square().mean().sqrt()
    # norm 5 and a = 5: the whole way to rms(x) u; rms (1, 7) = sqrt(50 / 2)
    sent = attack.signal(row(1.0, 7.0), context(history=[row(3.0, 4.0)], generator=generator))
    torch.testing.assert_close(sent, 5 * u)
    m = row(0.3, 0.4) + 4.5 * u  # .1 (3, 4) + .9 (5 u)
    sent = attack.signal(row(-14.0, 2.0), context(step=1, generator=generator))
    torch.testing.assert_close(sent, m + 5 * (10 * u - m) / m.norm())


def test_ema_drift_adds_noise_in_units_of_the_signals_rms(create, context, normal):
    attack = create("ema-drift:beta.activation=0.1,sigma=0.5,a=0")
    sent = attack.signal(row(1.0, 7.0), context(history=[row(3.0, 4.0)]))
    torch.testing.assert_close(sent, row(3.0, 4.0) + 0.5 * 5 * normal(1, 1, 2))


def test_ema_drift_is_honest_until_it_has_an_average_that_is_old_enough(create, context):
    attack = create("ema-drift:beta.activation=0.5,sigma=0,a=0")  # d = 4
    signals = [row(1.0, 0.0), row(3.0, 0.0), row(5.0, 1.0), row(7.0, 0.0)]
    for step, x in enumerate(signals):
        assert attack.signal(x, context(step=step, history=signals[:step])) is x
    sent = attack.signal(row(9.0, 9.0), context(step=4, history=signals))
    assert torch.equal(sent, signals[0])  # the average after step 0


def sent_by_definition(signals, asked, beta, d, a):
    """Return what the formula sends (negated, l2, no noise) in the steps `asked`, `x` elsewhere."""
    averages, out = [], []
    for step, x in enumerate(signals):
        sent = x
        if step in asked and step >= d:
            m = averages[step - d]
            sent = m + a * (-x - m) / m.norm()
        averages.append(sent if step == 0 else beta * averages[-1] + (1 - beta) * sent)
        out.append(sent)
    return out


def run(attack, context, signals, asked, direction="activation"):
    """Return what is sent in all steps, with the history that the harness would give."""
    out = []
    for step, x in enumerate(signals):
        past = signals[max(0, step - attack.memory()) : step]
        ctx = context(step=step, history=past, direction=direction)
        out.append(attack.send(x, ctx) if step in asked else x)
    return out


def some(steps, seed=1):
    """Signals that move."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, 3, generator=generator) + 0.1 * t for t in range(steps)]


@pytest.mark.parametrize(
    "asked",
    [
        range(60),  # always
        range(6, 60),  # from step 6 on, all before honest
        [t for t in range(60) if t % 7 < 4],  # bursts with honest steps between them
        [*range(3, 20, 2), *range(24, 60)],
    ],
    ids=["always", "later", "bursts", "odd"],
)
def test_the_average_is_of_what_was_sent_and_exactly_d_steps_old(create, context, asked):
    attack, signals = create("ema-drift:beta.activation=0.5,sigma=0"), some(60)  # d = 4
    # the definition begins at step 0; so does the history, which reaches back 22 steps or more
    sent = run(attack, context, signals, asked)
    expected = sent_by_definition(signals, asked, beta=0.5, d=4, a=1)
    for mine, theirs in zip(sent, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_each_direction_has_its_own_average_and_decay(create, context):
    text = "ema-drift:beta.activation=0.5,beta.gradient=0.3,sigma=0"
    attack, forward, backward = create(text), some(30), some(30, seed=2)
    both = [
        run(attack, context, forward, range(30)),
        run(attack, context, backward, range(30), "gradient"),
    ]
    for sent, signals, beta, d in zip(both, (forward, backward), (0.5, 0.3), (4, 2), strict=True):
        expected = sent_by_definition(signals, range(30), beta, d, a=1)
        for mine, theirs in zip(sent, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_after_a_gap_longer_than_its_memory_it_starts_from_its_honest_past(create, context):
    text, signals = "ema-drift:beta.activation=0.5,beta.gradient=0.5,sigma=0", some(60)
    attack = create(text)  # remembers 8 steps
    sent = run(attack, context, signals, [*range(20), *range(40, 60)])
    fresh = run(create(text), context, signals, range(40, 60))
    assert all(torch.equal(a, b) for a, b in zip(sent[40:], fresh[40:], strict=True))
    assert not torch.equal(sent[40], signals[40])


def test_an_average_of_zeros_gives_no_direction(create, context):
    attack = create(f"ema-drift:{SILENT}")
    sent = attack.signal(row(1.0, 2.0), context(history=[row(0.0, 0.0)]))
    assert torch.equal(sent, row(0.0, 0.0))


def test_what_becomes_of_a_sent_signal_does_not_reach_the_average(create, context):
    text, signals = "ema-drift:beta.activation=0.5,sigma=0", some(12)
    expected = [s.clone() for s in run(create(text), context, signals, range(12))]
    attack, past = create(text), []
    for step, x in enumerate(signals):
        sent = attack.signal(x.clone(), context(step=step, history=[p.clone() for p in past]))
        torch.testing.assert_close(sent, expected[step])
        sent.fill_(99)
        past.append(x)


def test_ema_drift_in_bfloat16_keeps_its_average_in_float32(create, context):
    # in bfloat16 numbers near 1 are .0078 apart: a tenth of such a step would be lost
    past = [torch.full((1, 1, 2), 1.0 + 0.002 * t).bfloat16() for t in range(44)]
    average = past[0].float()
    for x in past[1:23]:
        average = 0.9 * average + 0.1 * x.float()
    sent = create("ema-drift:a=0,sigma=0").signal(past[0], context(history=past))
    assert torch.equal(sent, average.bfloat16())
