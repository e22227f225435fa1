"""Commitment: hashes by hand, what an audit of hashes finds, and what it misses."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from work_again import Desk, desk, flagged, rows, started

from sentinel_bench.defenses.commitment import Commitment, compare_hashes, top_values

LARGE = (2, 32, 32)
"""2048 elements: a hash of 128 holds one of sixteen."""


def audited(d: Desk, text: str = "commitment:q=1") -> list[int]:
    return flagged(started(text, len(d.sent), LARGE).check(d.signals()))


# --- hashes ---------------------------------------------------------------------------------------


def test_a_hash_is_the_positions_and_the_bf16_values_of_the_largest_magnitudes():
    x = torch.tensor([[[[0.5, -3.0]], [[1.001, 2.0]]]])
    positions, values = top_values(x, 3)
    assert positions.tolist() == [[1, 3, 2]]
    assert values.tolist() == [[-3.0, 2.0, 1.0]]  # 1.001 in bfloat16
    assert (positions.dtype, values.dtype) == (torch.int32, torch.bfloat16)


def test_hashes_are_compared_by_hand():
    def compare(where: list[int], values: list[float], too: list[int], values_too: list[float]):
        tensors = [torch.tensor([t]) for t in (where, values, too, values_too)]
        return [t.item() for t in compare_hashes(*tensors)]

    assert compare([4, 7], [2.0, -1.0], [7, 4], [-1.0, 2.0]) == [0.0, 0.0]
    # 9 and 1 have no partner; 4: |2 - 1| / 2, 7: |-1 - 1| / 1
    assert compare([4, 7, 9, 0], [2, -1, 0.5, 3], [7, 4, 1, 0], [1, 1, 0.5, 3]) == [0.25, 2.5 / 3]
    assert compare([0, 1], [0.0, 0.0], [5, 6], [1.0, 1.0]) == [1.0, 0.0]
    assert compare([0, 1], [0.0, 0.0], [5, 6], [0.0, 0.0]) == [0.0, 0.0]


def test_six_bytes_are_kept_for_each_value_stage_direction_and_replica():
    def kept(text: str, replicas: int) -> int:
        return started(text, replicas, LARGE).state_bytes() - started("audit", 1).state_bytes()

    assert kept("commitment", 4) == 3 * 2 * 4 * 128 * 6
    assert kept("commitment:top=10", 8) == 3 * 2 * 8 * 10 * 6
    small = started("commitment", 4, (1, 1, 3)).state_bytes() - started("audit", 1).state_bytes()
    assert small == 3 * 2 * 4 * 3 * 6  # a signal of three elements
    five = started("commitment", 4, LARGE, microbatches=5).state_bytes()
    assert five - started("commitment", 4, LARGE).state_bytes() == 4 * kept("commitment", 4)


# --- what an audit finds --------------------------------------------------------------------------


def change(x: torch.Tensor, what: str) -> torch.Tensor:
    match what:
        case "zeros":
            return torch.zeros_like(x)
        case "scaled by 1.01":
            return x * 1.01
        case "turned":
            return -x
        case "one token later":
            return x.roll(1, 1)
        case "of another":
            return torch.randn(x.shape, generator=torch.Generator().manual_seed(99))
        case "large elsewhere":
            return x.where(torch.arange(x.shape[-1]) > 3, 50.0)
    raise AssertionError(what)


@pytest.mark.parametrize(
    "what",
    ["zeros", "scaled by 1.01", "turned", "one token later", "of another", "large elsewhere"],
)
def test_an_audit_of_hashes_finds_what_changes_the_largest_values(what):
    d = desk(4, shape=LARGE)
    d.sent = d.honest.clone()
    d.sent[2] = change(d.honest[2], what)
    assert audited(d) == [2]


@pytest.mark.parametrize("dtype, noise", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_rounding_passes(dtype, noise):
    for seed in range(5):
        d = desk(8, seed=seed, shape=LARGE)
        error = noise * torch.randn(d.honest.shape, generator=torch.Generator().manual_seed(seed))
        d.honest, d.sent = d.honest.to(dtype), (d.honest * (1 + error)).to(dtype)
        assert audited(d) == []


def test_signals_of_nothing_but_zeros_pass_wherever_their_largest_are_said_to_be():
    d = Desk(torch.zeros(4, *LARGE), torch.zeros(4, *LARGE))
    assert audited(d) == []


def test_what_stays_below_the_largest_values_is_missed_as_its_blind_spot_says():
    d = desk(4, shape=LARGE)
    d.sent = d.honest.clone()
    flat = d.sent[1].flatten()
    small = flat.abs() < flat.abs().topk(128).values[-1]
    d.sent[1] = flat.where(~small, 0.0).view(LARGE)
    assert small.sum() == 2048 - 128
    assert audited(d) == []
    assert flagged(started("audit:q=1", 4, LARGE).check(d.signals())) == [1]


def test_positions_may_differ_as_far_as_the_overlap_allows():
    d = desk(4, shape=LARGE)
    d.sent = d.honest.clone()
    flat = d.sent[1].flatten()
    flat[flat.abs().topk(128).indices[-20:]] = 0.0  # 20 of 128 fall out: 84 % are left
    d.sent[1] = flat.view(LARGE)
    assert audited(d) == []
    assert audited(d, "commitment:q=1,overlap=0.85") == [1]


# --- drawing --------------------------------------------------------------------------------------


def test_a_share_q_is_drawn_and_a_liar_is_banned_at_once_when_it_is():
    d, defense = desk(8, [3], shape=LARGE), started("commitment:q=0.1", 8, LARGE)
    for step in range(60):
        before = len(d.recomputed)
        verdict = defense.check(d.signals(step=step))
        caught = [3] if any(3 in of for of in d.recomputed[before:]) else []
        assert flagged(verdict) == rows(verdict.severe) == caught
    assert 25 <= sum(map(len, d.recomputed)) <= 75  # of 480, 48 expected
    assert any(3 in of for of in d.recomputed)


def test_the_hashes_of_each_boundary_and_microbatch_are_kept_until_its_next_signals():
    defense = started("commitment:q=1", 4, LARGE, microbatches=2)
    assert isinstance(defense, Commitment)
    seen = []
    for stage, direction, m in product((0, 1), ("activation", "gradient"), (0, 1)):
        d = desk(4, [2], seed=len(seen), shape=LARGE)
        seen.append(d.signals(stage=stage, direction=direction, microbatch=m))
        assert flagged(defense.check(seen[-1])) == [2]
    for signals in seen:
        for kept, expected in zip(
            defense._place(signals), top_values(signals.sent, 128), strict=True
        ):
            assert torch.equal(kept, expected)
