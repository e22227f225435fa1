"""The mean of a stage's weight gradients, with contributions left out and put in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sentinel_bench.pipeline.exchange import Contributed
from sentinel_bench.pipeline.mean import correct_mean
from sentinel_bench.pipeline.weights import StageWork

HONEST = [0.5, -1.0, 2.0, 4.0]


def work(size_of_last: float = 1.0) -> tuple[nn.Linear, StageWork]:
    """Return a stage of one weight w, y = w x, whose replica r has the gradient `HONEST[r]`."""
    stage = nn.Linear(1, 1, bias=False)
    gradients = torch.tensor(HONEST)
    gradients[-1] *= size_of_last
    fed = torch.ones(4, 1, 1)
    passed = (gradients / 4).view(4, 1, 1)  # of the mean over the replicas
    stage.weight.grad = gradients.mean().view(1, 1)
    labels = torch.zeros(4, 1, dtype=torch.long)
    precision = torch.autocast("cpu", enabled=False)
    return stage, StageWork([stage], fed, passed, labels, 4, precision, 1)


def corrected(stage: nn.Linear, given: Contributed, excluded: list[bool], of: StageWork) -> float:
    correct_mean(stage, excluded, given, of)
    assert stage.weight.grad is not None
    return float(stage.weight.grad)


NOBODY = [False] * 4


def test_what_is_dropped_leaves_no_trace_however_large_it_is() -> None:
    stage, of = work(size_of_last=1e9)  # next to which the others are less than rounding
    given = Contributed({}, [False, False, False, True])
    assert corrected(stage, given, NOBODY, of) == 0.5  # (0.5 - 1 + 2) / 3


def test_what_an_attacker_contributes_takes_the_place_of_its_honest_gradient() -> None:
    stage, of = work()
    given = Contributed({1: torch.tensor([7.0])}, NOBODY)
    assert corrected(stage, given, NOBODY, of) == (0.5 + 7 + 2 + 4) / 4


def test_both_at_once_beside_a_rank_that_was_left_out_before() -> None:
    stage, of = work()
    excluded = [True, False, False, False]
    assert stage.weight.grad is not None
    stage.weight.grad.fill_((-1 + 2 + 4) / 4)  # the sum of the others over all
    sent: dict[int, Tensor] = {2: torch.tensor([8.0]), 3: torch.tensor([1e6])}
    given = Contributed(sent, [False, False, False, True])
    # the mean of -1 and 8, times 3 / 4: the trainer scales by 4 / 3 what misses one of four ranks
    assert corrected(stage, given, excluded, of) == 3.5 * 3 / 4


def test_if_nobody_is_left_there_is_no_gradient() -> None:
    stage, of = work()
    correct_mean(stage, NOBODY, Contributed({}, [True] * 4), of)
    assert stage.weight.grad is None
