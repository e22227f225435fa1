"""`none`, `zeros` and `ones` against values worked out by hand."""

import torch


def test_none_sends_the_honest_signal_in_both_directions(create, context, x):
    attack = create("none")
    assert attack.activation(x, context()) is x
    assert attack.gradient(x, context(direction="gradient")) is x


def test_zeros_sends_zeros_whatever_the_signal(create, context, x):
    sent = create("zeros").signal(x, context())
    assert sent.tolist() == [[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]]
    assert create("zeros").signal(x * torch.inf, context()).abs().sum() == 0


def test_ones_sends_one_everywhere(create, context, x):
    sent = create("ones").signal(x, context())
    assert sent.tolist() == [[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]]


def test_ones_sends_the_value_it_is_told(create, context, x):
    sent = create("ones:value=-2.5").signal(x, context())
    assert sent.tolist() == [[[-2.5, -2.5, -2.5], [-2.5, -2.5, -2.5]]]
