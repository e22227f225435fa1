"""`swap` and `token-shift`: honest signals at the wrong place."""

from collections import Counter

import pytest
import torch


def numbered(batch: int) -> torch.Tensor:
    """Samples whose every element is their number."""
    return torch.arange(float(batch)).view(batch, 1, 1).expand(batch, 2, 3).contiguous()


def test_swap_of_two_samples_exchanges_them(create, context):
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
    sent = create("swap").signal(x, context())
    assert sent.tolist() == [[[5.0, 6.0], [7.0, 8.0]], [[1.0, 2.0], [3.0, 4.0]]]


@pytest.mark.parametrize("batch", [2, 3, 4, 7])
def test_swap_sends_each_sample_once_and_none_at_its_own_place(create, context, batch):
    attack, ctx, x = create("swap"), context(), numbered(batch)
    for _ in range(200):
        sent = attack.signal(x, ctx)
        assert torch.equal(sent, sent[:, :1, :1].expand_as(sent))  # whole samples
        order = sent[:, 0, 0].tolist()
        assert sorted(order) == list(range(batch))
        assert all(order[i] != i for i in range(batch))


def test_swap_draws_every_cycle_of_the_batch_equally_often(create, context):
    attack, ctx, x = create("swap"), context(), numbered(4)
    counts = Counter(tuple(attack.signal(x, ctx)[:, 0, 0].tolist()) for _ in range(3000))
    assert len(counts) == 6  # 3! cyclic orders of 4
    assert all(400 < n < 600 for n in counts.values())  # 500 +- 5 sqrt(3000 / 6 * 5 / 6) = 102


@pytest.mark.parametrize("name", ["swap", "token-shift"])
def test_with_nothing_to_exchange_it_sends_the_signal_of_the_step_before(create, context, name):
    attack, x = create(name), torch.ones(1, 1, 3)
    past = [torch.full((1, 1, 3), 5.0), torch.full((1, 1, 3), 6.0)]
    assert attack.memory() == 1
    assert torch.equal(attack.signal(x, context(history=past[-1:])), past[-1])
    assert torch.equal(attack.signal(x, context(history=past)), past[-1])
    assert attack.signal(x, context()) is x  # honest while there is none


def test_token_shift_moves_each_token_to_the_next_place_in_its_sample(create, context):
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [[7.0, 8.0], [9.0, 0.0], [-1.0, -2.0]]])
    sent = create("token-shift").signal(x, context())
    assert sent.tolist() == [
        [[5.0, 6.0], [1.0, 2.0], [3.0, 4.0]],
        [[-1.0, -2.0], [7.0, 8.0], [9.0, 0.0]],
    ]


@pytest.mark.parametrize(("by", "order"), [(1, [2, 0, 1]), (2, [1, 2, 0]), (4, [2, 0, 1])])
def test_token_shift_moves_by_so_many_tokens_around_the_end(create, context, by, order):
    x = torch.tensor([[[0.0], [1.0], [2.0]]])
    sent = create(f"token-shift:by={by}").signal(x, context())
    assert sent.flatten().tolist() == order


def test_token_shift_by_the_whole_length_sends_the_signal_of_the_step_before(create, context):
    x, past = torch.rand(2, 3, 4), torch.rand(2, 3, 4)
    for by in (3, 6):
        assert torch.equal(create(f"token-shift:by={by}").signal(x, context(history=[past])), past)
