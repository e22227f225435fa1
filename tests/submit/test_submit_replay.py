"""Flags, amnesties and bans of hand-written records, against the ledger by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sentinel_bench.api import ResponseParams
from sentinel_bench.submit._replay import Replay

FLAG, BAN, AMNESTY, ACT = "flag", "ban", "amnesty", "act"


def record(*rows: tuple[Any, ...], steps: int = 40, attacker: int | None = None) -> list[Any]:
    """A record of 2 stages x 4 replicas; each row is kind, step, replica, fields; stage is 1."""
    attackers = [] if attacker is None else [{"stage": 1, "replica": attacker, "start": 0}]
    start = {"type": "start", "stages": 2, "replicas": 4, "warmup_steps": 0, "attackers": attackers}
    events: list[Any] = [start]
    for step in range(steps):
        flagged = 0
        for kind, at, replica, *rest in rows:
            if at == step:
                row = {"type": kind, "step": step, "stage": 1, "replica": replica}
                row |= {"direction": "activation", "tampered": False, "reason": "violations"}
                events.append(row | {"replicas": 3} | (rest[0] if rest else {}))
                flagged += kind == FLAG
        row = {"type": "step", "step": step, "checked": [8, 0], "flagged": [flagged, 0]}
        events.append(row | {"tampered": 0, "excluded": 0})
    events += [
        {"type": "tamper", "stage": 1, "replica": row[2], "signals": 0}
        for row in rows
        if row[0] == ACT
    ]
    return events


def problems(events: list[Any], **policy: Any) -> list[str]:
    return [what for _, what in Replay(events, ResponseParams(**policy), True).problems()]


FIVE = [(FLAG, step, 2) for step in (3, 5, 9, 10, 20)]


def test_the_fifth_violation_bans() -> None:
    assert problems(record(*FIVE, (BAN, 20, 2))) == []
    assert problems(record(*FIVE)) == [
        "step: worker (1, 2) had to be banned by its violations, and was not"
    ]
    assert problems(record(*FIVE), bans=False) == []
    assert problems(record(*FIVE), violations=6) == []


def test_a_ban_needs_as_many_flags_unless_it_is_severe() -> None:
    four = FIVE[1:]
    assert problems(record(*four, (BAN, 20, 2))) == ["ban: worker (1, 2) had 4 flags of 5"]
    assert problems(record(*four, (BAN, 20, 2, {"reason": "severe"}))) == []
    late = [*FIVE[:4], (BAN, 11, 2, {"reason": "severe"})]
    assert problems(record(*late)) == ["ban: worker (1, 2) was not flagged at step 11"]


def test_what_may_have_been_forgiven_need_not_ban() -> None:
    # Steps 3 and 20 are 17 apart: with 17 clean steps until a violation is forgiven, the first may
    # have been; with 18 it cannot have been.
    assert problems(record(*FIVE), forgive_after=17) == []
    assert len(problems(record(*FIVE), forgive_after=18)) == 1


def test_flags_under_an_amnesty_need_not_ban() -> None:
    lifted = (AMNESTY, 20, 0)
    assert problems(record(*FIVE, lifted)) == []
    assert len(problems(record(*FIVE, lifted), amnesty_rollback=False)) == 1
    assert problems(record((AMNESTY, 20, 0)), amnesty=False) == ["amnesty: of nobody"]


def test_who_is_banned_does_nothing_more() -> None:
    found = problems(record(*FIVE, (BAN, 20, 2), (FLAG, 25, 2)))
    assert found == ["flag: worker (1, 2) was banned at step 20"]


def test_a_flag_is_right_only_after_an_act() -> None:
    told = {"tampered": True}
    events = record((ACT, 5, 1), (FLAG, 6, 1, told), attacker=1)
    events[-2 - 33]["flagged"] = [0, 1]
    assert "has not tampered" not in " ".join(problems(events))
    early = problems(record((ACT, 7, 1), (FLAG, 6, 1, told), attacker=1))
    assert "flag: worker (1, 1) has not tampered with anything" in early


def test_a_stage_without_workers_ends_the_run() -> None:
    bans = [
        row
        for replica in range(4)
        for row in ((FLAG, 20, replica), (BAN, 20, replica, {"reason": "severe"}))
    ]
    gone = "end: all workers of a stage are banned, and the run went on"
    assert problems(record(*bans)) == [gone]
    assert problems([*record(*bans, steps=21), {"type": "exhausted", "stage": 1}]) == []
    some = [*record(*bans[2:], steps=21), {"type": "exhausted", "stage": 1}]
    assert problems(some) == ["exhausted: stage 1 still has workers"]


@pytest.mark.parametrize("begin, steps, idle", [(0, 40, True), (0, 20, False)])
def test_an_attacker_that_had_time_and_did_nothing_is_idle(
    begin: int, steps: int, idle: bool
) -> None:
    replay = Replay(record(steps=steps, attacker=3), ResponseParams(), True)
    assert list(replay.problems()) == []
    assert replay.idle() == ([(1, 3)] if idle else [])
