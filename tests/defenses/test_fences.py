"""The adaptive fence on small sequences worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from sentinel_bench.defenses.fence import Fences, FenceSettings

NAN = math.nan
TEN = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 20.0]
"""q1 2.25, q2 4.5, q3 6.75, IQR 4.5; distances to q2: 4.5 3.5 2.5 1.5 .5 .5 1.5 2.5 3.5 15.5."""


def fence(
    replicas: int, window: int = 50, max_changes: int = 10, min_steps: int = 1, **given: float
) -> Fences:
    """One channel; unless told otherwise `k` is 1 and stays, and nothing else widens the fence."""
    still = {"k0": 1, "alpha": 1, "grow": 2, "shrink": 0.5, "slack": 0, "least": 0, "eps": 1e-6}
    settings = {key: torch.tensor([float(v)]) for key, v in (still | given).items()}
    return Fences(FenceSettings(**settings), replicas, window, max_changes, min_steps)


def pushed(values: list[float], times: int = 1, **given: float) -> Fences:
    """The fence after one step with these deviations, or several."""
    one = fence(len(values), **given)
    for _ in range(times):
        one.push(torch.tensor([values]))
    return one


def outside(one: Fences, *values: float) -> list[bool]:
    return one.outside(slice(0, 1), torch.tensor([list(values)]))[0][0].tolist()


def distance(one: Fences, *values: float) -> list[float]:
    return one.outside(slice(0, 1), torch.tensor([list(values)]))[1][0].tolist()


def state(one: Fences) -> tuple[float, float]:
    return one.median.item(), one.half_width.item()


# --- the interval ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "median", "iqr"),
    [
        ([4.0, 0.0, 3.0, 1.0, 2.0], 2.0, 2.0),  # quartiles 1 2 3
        ([10.0, 0.0, 2.0, 1.0], 1.5, 3.25),  # .75, 1.5, 2 + .25 * 8 = 4
        (TEN, 4.5, 4.5),
        ([3.0, 7.0], 5.0, 2.0),  # 4, 5, 6
    ],
)
def test_the_fence_is_k_interquartile_ranges_around_the_median(values, median, iqr):
    assert state(pushed(values, k0=3)) == pytest.approx((median, 3 * iqr))


def test_the_quartiles_are_those_of_all_steps_in_the_window_together():
    one = fence(2)
    for step in ([4.0, 0.0], [3.0, 1.0], [2.0, 2.0]):
        one.push(torch.tensor([step]))
    # 0 1 2 2 3 4: positions 1.25, 2.5, 3.75 give 1.25, 2, 2.75
    assert state(one) == pytest.approx((2.0, 1.5))


def test_a_range_below_eps_counts_as_eps():
    assert state(pushed([7.0] * 4, k0=2, eps=0.5)) == (7.0, 1.0)
    assert state(pushed([0.0, 1.0, 2.0, 3.0, 4.0], eps=0.5)) == (2.0, 2.0)  # IQR 2 is above


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_fence_is_at_least_lambda_times_the_size_of_the_median(sign):
    assert state(pushed([sign * 100.0] * 4, eps=0.001, least=0.1)) == pytest.approx(
        (sign * 100, 10.0)
    )
    wide = pushed([sign * 96.0, sign * 98.0, sign * 100.0, sign * 102.0, sign * 104.0], least=0.03)
    assert state(wide)[1] == 4.0  # IQR 4 is more than 3 % of 100


def test_a_deviation_at_the_fence_is_outside_on_either_side():
    one = pushed([7.0] * 4, k0=2, eps=0.5)  # 6 to 8
    just = torch.finfo(torch.float32).eps * 8
    assert outside(one, 8.0, 6.0, 8 - just, 6 + just) == [True, True, False, False]
    assert distance(one, 8.0, 6.0, 7.0, 9.0) == [1.0, 1.0, 0.0, 2.0]


def test_nan_is_outside_when_tested():
    assert outside(pushed([7.0] * 4, eps=0.5), NAN, math.inf, 7.0, 7.0) == [
        True,
        True,
        False,
        False,
    ]


def test_each_channel_has_a_fence_of_its_own():
    settings = FenceSettings(
        k0=torch.tensor([1.0, 2.0]),
        alpha=torch.ones(2),
        grow=torch.ones(2),
        shrink=torch.ones(2),
        slack=torch.zeros(2),
        least=torch.tensor([0.0, 1.0]),
        eps=torch.tensor([0.5, 0.25]),
    )
    two = Fences(settings, 3, 10, 10, 1)
    two.push(torch.tensor([[7.0, 7.0, 7.0], [3.0, 3.0, 3.0]]))
    assert two.median.tolist() == [7.0, 3.0]
    assert two.half_width.tolist() == [0.5, 3.0]
    flags, far = two.outside(slice(1, 2), torch.tensor([[0.0, 3.0, 9.0]]))
    assert flags.tolist() == [[True, False, True]]
    assert far.tolist() == [[1.0, 0.0, 2.0]]


# --- the window -----------------------------------------------------------------------------------


def test_the_fence_is_open_until_min_steps():
    one = fence(1, min_steps=3, eps=0.5)
    for _ in range(2):
        assert outside(one, 1e9) == [False]
        assert distance(one, 1e9) == [0.0]
        assert outside(one, NAN) == [False]
        one.push(torch.tensor([[7.0]]))
    assert outside(one, 1e9) == [False]
    one.push(torch.tensor([[7.0]]))
    assert outside(one, 1e9) == [True]


def test_a_window_shorter_than_min_steps_is_enough():
    one = fence(1, window=2, min_steps=10, eps=0.5)
    for _ in range(2):
        assert outside(one, 9.0) == [False]
        one.push(torch.tensor([[7.0]]))
    assert outside(one, 9.0) == [True]


def test_half_of_the_replicas_are_enough_to_close_after_min_steps():
    one = fence(4, min_steps=3, eps=0.5)
    for _ in range(3):
        assert outside(one, *[1e9] * 4) == [False] * 4
        one.push(torch.tensor([[7.0, NAN, 7.0, NAN]]))
    assert outside(one, *[1e9] * 4) == [True] * 4


def test_k_does_not_move_while_the_fence_is_open():
    one = fence(1, min_steps=3, k0=8, alpha=0.5, slack=0.5)
    for value in (1.0, 2.0):
        one.push(torch.tensor([[value]]))
        assert one.k.item() == 8
    one.push(torch.tensor([[3.0]]))
    assert one.k.item() < 8


def test_only_the_last_window_steps_count():
    one = fence(2, window=3)
    for step in ([50.0, 90.0], [0.0, 0.0], [1.0, 1.0], [2.0, 2.0]):
        one.push(torch.tensor([step]))
    assert state(one) == (1.0, 1.5)  # 0 0 1 1 2 2: quartiles .25 1 1.75
    for _ in range(3):
        one.push(torch.tensor([[5.0, 7.0]]))
    assert state(one) == (6.0, 2.0)  # 5 5 5 7 7 7


def test_nan_in_the_window_does_not_count():
    one = fence(5)
    one.push(torch.tensor([[4.0, 0.0, NAN, NAN, NAN]]))
    one.push(torch.tensor([[NAN] * 5]))
    one.push(torch.tensor([[NAN, 3.0, 1.0, 2.0, NAN]]))
    assert state(one) == (2.0, 2.0)


def test_values_of_a_step_without_any_deviation_leave_the_window_in_their_turn():
    one = fence(1, window=2)
    one.push(torch.tensor([[100.0]]))
    one.push(torch.tensor([[3.0]]))
    one.push(torch.tensor([[NAN]]))  # pushes the 100 out
    assert one.median.item() == 3.0


def test_the_tensor_that_is_pushed_is_not_kept():
    one, values = fence(1, eps=0.5), torch.tensor([[7.0]])
    one.push(values)
    values.fill_(1e9)
    one.push(torch.tensor([[7.0]]))
    assert state(one) == (7.0, 0.5)


# --- k --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "k"),
    [
        (0.25, 1),  # k = 1, width 4.5: outside are 0 and 20, .2 of all: enough
        (0.15, 2),  # k = 2, width 9: outside is 20, .1
        (0.05, 4),  # k = 4, width 18: nobody
    ],
)
def test_k_grows_until_the_share_outside_is_at_most_alpha(alpha, k):
    one = pushed(TEN, alpha=alpha)
    assert one.k.item() == k
    assert one.half_width.item() == 4.5 * k


@pytest.mark.parametrize(
    ("limit", "k"),
    [
        (0.05, 2),  # k = 8 and 4: nobody outside; k = 2, width 9: 20, .1 is at least .05
        (0.15, 1),  # k = 1, width 4.5: 0 and 20, .2
        (0.35, 0.5),  # k = .5, width 2.25: 0 1 2 7 8 20, .6
        (0, 8),  # a share of 0 is at least 0
    ],
)
def test_k_shrinks_until_the_share_outside_is_at_least_slack_times_alpha(limit, k):
    assert pushed(TEN, k0=8, alpha=0.9, slack=limit / 0.9).k.item() == k


def test_k_stays_between_the_two_limits():
    for k0 in (1, 2):  # shares .2 and .1
        assert pushed(TEN, k0=k0, alpha=0.25, slack=0.3).k.item() == k0


EIGHT = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
"""q1 1.75, q2 3.5, q3 5.25, IQR 3.5: at k = 1 the fence runs through 0 and 7, a quarter of all."""


def test_deviations_at_k_ranges_count_as_outside_in_the_window():
    assert pushed(EIGHT, alpha=0.2).k.item() == 2  # not with one of the two, .125


def test_a_share_outside_of_exactly_alpha_is_not_too_many():
    assert pushed(EIGHT, alpha=0.25).k.item() == 1
    assert pushed(EIGHT, alpha=0.25, k0=0.5).k.item() == 1  # .5 of all at k = .5


def test_a_share_outside_of_exactly_slack_times_alpha_is_not_too_few():
    assert pushed(EIGHT, alpha=0.5, slack=0.5).k.item() == 1
    assert pushed(EIGHT, k0=4, alpha=0.5, slack=0.5).k.item() == 1


@pytest.mark.parametrize(("changes", "k"), [(0, 1), (1, 2), (2, 4), (3, 4)])
def test_k_grows_at_most_max_changes_times_a_step(changes, k):
    assert pushed(TEN, alpha=0.05, max_changes=changes).k.item() == k


@pytest.mark.parametrize(("changes", "k"), [(0, 64), (1, 32), (2, 16), (6, 1)])
def test_k_shrinks_at_most_max_changes_times_a_step(changes, k):
    assert pushed([1.0] * 8, k0=64, alpha=0.5, slack=1, max_changes=changes).k.item() == k


def test_k_is_kept_from_step_to_step():
    one = fence(10, alpha=0.05, max_changes=1)
    for k in (2, 4, 4, 4):
        one.push(torch.tensor([TEN]))
        assert one.k.item() == k


def test_the_least_width_does_not_change_the_share_that_moves_k():
    # 30 wide by lambda, nobody is outside; k grows as if that were not so
    one = pushed(TEN, alpha=0.05, least=30 / 4.5)
    assert one.k.item() == 4
    assert one.half_width.item() == pytest.approx(30)
