import numpy as np
import pytest

from sentinel_bench.data.batches import Batches
from sentinel_bench.data.tokens import Tokens
from sentinel_bench.errors import ConfigError


def tokens(train: int = 5000, held_out: int = 1000) -> Tokens:
    """Ids that are their own places."""
    return Tokens(np.arange(train, dtype=np.uint16), np.arange(held_out, dtype=np.uint16), 5000, "")


def batches(data: Tokens | None = None, **changes: int) -> Batches:
    settings = {"batch_size": 3, "seq_len": 16, "replicas": 4, "seed": 7} | changes
    return Batches(data or tokens(), **settings)


def test_batches_are_int64_replica_major_and_targets_are_one_ahead() -> None:
    inputs, targets = batches().train(0)
    assert inputs.shape == targets.shape == (12, 16)
    assert inputs.dtype == targets.dtype == np.int64
    assert (targets == inputs + 1).all()


def test_a_replicas_rows_do_not_depend_on_the_number_of_replicas() -> None:
    many = batches(replicas=8).train(5)[0]
    few = batches(replicas=2).train(5)[0]
    assert (many[:6] == few).all()


def test_a_step_does_not_depend_on_the_steps_before() -> None:
    used = batches()
    for step in (3, 1, 9):
        used.train(step)
    assert (used.train(5)[0] == batches().train(5)[0]).all()


def test_another_seed_step_or_replica_gives_other_rows() -> None:
    rows = batches().train(5)[0]
    assert (rows != batches(seed=8).train(5)[0]).any()
    assert (rows != batches().train(6)[0]).any()
    assert (rows[:3] != rows[3:6]).any()


def test_first_and_last_token_of_the_training_part_can_be_drawn() -> None:
    data = batches(tokens(train=18), batch_size=64)
    inputs, targets = data.train(0)
    assert inputs.min() == 0
    assert targets.max() == 17


def test_held_out_windows_are_spread_evenly_without_overlap() -> None:
    chunks = batches().held_out(20)
    assert [len(inputs) for inputs, _ in chunks] == [12, 8]
    inputs = np.concatenate([i for i, _ in chunks])
    targets = np.concatenate([t for _, t in chunks])
    assert (targets == inputs + 1).all()
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs[0, 0] == 0
    assert targets[-1, -1] == 999
    gaps = np.diff(inputs[:, 0])
    assert gaps.min() >= 17
    assert gaps.max() - gaps.min() <= 1


def test_held_out_windows_are_the_same_for_every_seed() -> None:
    for (a, _), (b, _) in zip(batches().held_out(9), batches(seed=99).held_out(9), strict=True):
        assert (a == b).all()


def test_if_fewer_held_out_windows_exist_all_are_given() -> None:
    inputs = np.concatenate([i for i, _ in batches().held_out(10_000)])
    assert len(inputs) == 1000 // 17
    assert np.diff(inputs[:, 0]).min() >= 17


def test_one_held_out_window_is_enough() -> None:
    chunks = batches(tokens(held_out=17)).held_out(512)
    assert [inputs.shape for inputs, _ in chunks] == [(1, 16)]


@pytest.mark.parametrize(
    ("data", "part"), [(tokens(train=16), "training"), (tokens(held_out=16), "held-out")]
)
def test_a_part_that_is_too_short_is_told_with_both_numbers(data: Tokens, part: str) -> None:
    with pytest.raises(ConfigError, match=rf"{part} part .* has 16 tokens, .* at least 17"):
        batches(data)


def test_a_part_of_exactly_one_sequence_is_enough() -> None:
    inputs, _ = batches(tokens(train=17, held_out=17)).train(0)
    assert (inputs[:, 0] == 0).all()
