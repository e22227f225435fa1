"""The ledger on short stories: violations, forgiveness, bans and amnesties."""

from __future__ import annotations

from typing import Any

import pytest

from sentinel_bench.api import ResponseParams
from sentinel_bench.ledger import Ban, Ledger, Ruling

REPLICAS = 8


def ledger(stages: int = 3, **policy: Any) -> Ledger:
    return Ledger(ResponseParams(**policy), stages, REPLICAS)


def rows(*replicas: int) -> list[bool]:
    """The mask of some replicas."""
    return [r in replicas for r in range(REPLICAS)]


def judge(
    book: Ledger,
    *flagged: int,
    stage: int = 1,
    severe: tuple[int, ...] = (),
    untested: tuple[int, ...] = (),
) -> Ruling:
    """Rule on one boundary at which some replicas are flagged."""
    tested = [not t for t in rows(*untested)]
    return book.judge(stage, rows(*flagged), rows(*severe), tested)


def steps(book: Ledger, n: int, *flagged: int, **more: Any) -> list[Ban]:
    """Let `n` steps pass with the same flags; return the bans of the last."""
    bans: list[Ban] = []
    for _ in range(n):
        judge(book, *flagged, **more)
        bans = book.end_step()
    return bans


# --- violations -----------------------------------------------------------------------------------


def test_a_flag_is_one_violation_of_that_worker_alone():
    book = ledger()
    ruling = judge(book, 3)
    assert book.violations == [[0] * 8, [0, 0, 0, 1, 0, 0, 0, 0], [0] * 8]
    assert ruling.flagged == rows(3)
    assert ruling.clean == rows(0, 1, 2, 4, 5, 6, 7)
    assert ruling.amnesty == 0


def test_the_fifth_violation_bans_at_the_end_of_its_step():
    book = ledger()
    assert steps(book, 4, 3) == []
    judge(book, 3)
    assert book.violations[1][3] == 5
    assert not book.banned(1, 3)  # not before the step ends
    assert book.end_step() == [Ban(1, 3, "violations")]
    assert book.banned(1, 3)
    assert not book.banned(0, 3)


def test_the_number_of_violations_is_a_parameter():
    assert steps(ledger(violations=2), 2, 3) == [Ban(1, 3, "violations")]
    assert steps(ledger(violations=6), 5, 3) == []


def test_a_severe_flag_bans_at_the_end_of_the_first_step():
    book = ledger()
    judge(book, 3, severe=(3,))
    assert not book.banned(1, 3)
    assert book.end_step() == [Ban(1, 3, "severe")]


def test_severe_without_a_flag_is_nothing():
    book = ledger()
    judge(book, severe=(3,))
    assert book.end_step() == []
    assert book.violations[1][3] == 0


def test_there_is_one_counter_for_both_directions():
    book = ledger(violations=5)
    for _ in range(2):  # twice a step: forward and backward
        judge(book, 3)
        judge(book, 3)
        assert book.end_step() == []
    judge(book, 3)
    judge(book)
    assert book.end_step() == [Ban(1, 3, "violations")]


def test_two_workers_can_be_banned_in_one_step_and_are_named_in_order():
    book = ledger()
    for _ in range(5):
        judge(book, 6, stage=2)
        judge(book, 5, 0, stage=0)
        bans = book.end_step()
    assert bans == [Ban(0, r, "violations") for r in (0, 5)] + [Ban(2, 6, "violations")]


# --- forgiveness ----------------------------------------------------------------------------------


def test_a_hundred_clean_steps_in_a_row_take_one_violation_back():
    book = ledger()
    steps(book, 3, 3)
    steps(book, 99)
    assert book.violations[1][3] == 3
    steps(book, 1)
    assert book.violations[1][3] == 2
    steps(book, 99)
    assert book.violations[1][3] == 2
    steps(book, 1)
    assert book.violations[1][3] == 1


def test_the_counter_never_falls_below_zero():
    book = ledger(forgive_after=2)
    steps(book, 50)
    assert book.violations == [[0] * 8] * 3
    assert steps(book, 5, 3) == [Ban(1, 3, "violations")]  # no credit for good conduct


def test_a_flag_breaks_the_row_of_clean_steps():
    book = ledger()
    steps(book, 2, 3)
    steps(book, 99)
    steps(book, 1, 3)
    steps(book, 99)
    assert book.violations[1][3] == 3
    steps(book, 1)
    assert book.violations[1][3] == 2


def test_a_flag_in_one_direction_makes_the_step_unclean():
    book = ledger(forgive_after=1)
    judge(book, 3)
    judge(book)
    book.end_step()
    assert book.violations[1][3] == 1


def test_clean_in_both_directions_counts_as_one_step():
    book = ledger(forgive_after=4)
    steps(book, 1, 3)
    for _ in range(3):
        judge(book)
        judge(book)
        book.end_step()
    assert book.violations[1][3] == 1
    steps(book, 1)
    assert book.violations[1][3] == 0


def test_steps_without_a_test_neither_advance_nor_break_the_row():
    book = ledger()
    steps(book, 2, 3)
    steps(book, 60)
    steps(book, 200, untested=(3,))
    assert book.violations[1][3] == 2
    steps(book, 39)
    assert book.violations[1][3] == 2
    steps(book, 1)
    assert book.violations[1][3] == 1


# --- bans -----------------------------------------------------------------------------------------


def test_a_ban_is_permanent():
    book = ledger(forgive_after=1)
    steps(book, 1, 3, severe=(3,))
    for _ in range(500):
        judge(book, untested=(3,))
        assert book.end_step() == []
    assert book.banned(1, 3)


@pytest.mark.parametrize("policy", [{}, {"bans": False}, {"amnesty": False, "violations": 1}])
def test_a_crash_bans_at_the_end_of_its_step_whatever_the_policy(policy):
    book = ledger(**policy)
    for stage, replica in ((1, 3), (0, 2), (1, 3)):
        book.crash(stage, replica)
    judge(book)  # nobody is flagged
    assert not book.banned(1, 3)
    assert book.end_step() == [Ban(0, 2, "crash"), Ban(1, 3, "crash")]
    assert (book.banned(0, 2), book.banned(1, 3)) == (True, True)
    assert book.capacity() == [REPLICAS - 1, REPLICAS - 1, REPLICAS]
    judge(book, untested=(3,))
    assert book.end_step() == []


def test_a_crash_counts_before_a_flag_of_the_same_step():
    book = ledger()
    judge(book, 3, severe=(3,))
    book.crash(1, 3)
    assert book.end_step() == [Ban(1, 3, "crash")]


def test_crashes_of_most_of_a_stage_are_no_amnesty():
    book = ledger()
    for replica in range(5):
        book.crash(1, replica)
    ruling = judge(book, untested=(0, 1, 2, 3, 4))
    assert ruling.amnesty == 0
    assert [b.replica for b in book.end_step()] == [0, 1, 2, 3, 4]


def test_capacity_is_the_number_of_workers_left_in_each_stage():
    book = ledger()
    assert book.capacity() == [8, 8, 8]
    judge(book, 3, 4, severe=(3, 4))
    judge(book, 0, stage=2, severe=(0,))
    book.end_step()
    assert book.capacity() == [8, 6, 7]


@pytest.mark.parametrize(("on_ban", "lost"), [("drop", True), ("reroute", False)])
def test_a_banned_workers_rank_is_lost_only_if_nobody_takes_over(on_ban, lost):
    book = ledger(on_ban=on_ban)
    judge(book, 3, severe=(3,))
    assert not book.lost(3)
    book.end_step()
    assert [book.lost(r) for r in range(REPLICAS)] == [lost and r == 3 for r in range(REPLICAS)]


def test_an_untested_worker_is_not_judged():
    book = ledger()
    ruling = judge(book, 2, 3, severe=(3,), untested=(3,))
    assert ruling.flagged == rows(2)
    assert not ruling.clean[3]
    assert book.violations[1][3] == 0
    assert book.end_step() == []


# --- amnesty --------------------------------------------------------------------------------------


def test_more_than_half_flagged_at_once_is_an_amnesty():
    book = ledger()
    ruling = judge(book, 0, 1, 2, 3, 4, severe=(0,))
    assert ruling.flagged == rows()
    assert ruling.clean == [True] * 8  # the detector learns from all
    assert ruling.amnesty == 5
    assert book.violations[1] == [0] * 8
    assert book.end_step() == []


def test_exactly_half_is_no_amnesty():
    book = ledger()
    ruling = judge(book, 0, 1, 2, 3)
    assert ruling.flagged == rows(0, 1, 2, 3)
    assert ruling.amnesty == 0
    assert book.violations[1] == [1, 1, 1, 1, 0, 0, 0, 0]


def test_half_is_counted_among_the_unbanned_of_the_stage():
    book = ledger()
    steps(book, 1, 6, 7, severe=(6, 7))
    judge(book, 0, 1, 2, stage=0)  # another stage has all its eight
    assert judge(book, 0, 1, 2, untested=(6, 7)).amnesty == 0  # 3 of 6
    assert judge(book, 0, 1, 2, 3, untested=(6, 7)).amnesty == 4  # 4 of 6
    assert judge(book, 0, 1, 2, 3, stage=0).amnesty == 0  # 4 of 8


def test_flags_of_the_untested_do_not_make_an_amnesty():
    ruling = judge(ledger(), 0, 1, 2, 3, 4, untested=(4,))
    assert ruling.amnesty == 0
    assert ruling.flagged == rows(0, 1, 2, 3)


def test_an_amnesty_leaves_the_violations_of_earlier_steps():
    book = ledger()
    steps(book, 4, 0)
    judge(book, 0, 1, 2, 3, 4)
    assert book.violations[1] == [4, 0, 0, 0, 0, 0, 0, 0]
    assert book.end_step() == []


def test_without_rollback_the_taint_is_lifted_but_the_violations_stay():
    book = ledger(amnesty_rollback=False)
    ruling = judge(book, 0, 1, 2, 3, 4)
    assert ruling.flagged == rows()
    assert ruling.clean == [True] * 8
    assert ruling.amnesty == 5
    assert book.violations[1] == [1, 1, 1, 1, 1, 0, 0, 0]
    book.end_step()
    for _ in range(3):
        steps(book, 1, 0, 1, 2, 3, 4)
    assert steps(book, 1, 0, 1, 2, 3, 4) == [Ban(1, r, "violations") for r in range(5)]


def test_without_amnesty_all_flags_count():
    book = ledger(amnesty=False)
    ruling = judge(book, *range(8))
    assert ruling.flagged == [True] * 8
    assert ruling.clean == [False] * 8
    assert ruling.amnesty == 0
    assert book.violations[1] == [1] * 8
