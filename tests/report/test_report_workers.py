"""What became of each worker, by hand, and never otherwise than `score` counts it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_runs import REPLICAS, STAGES, STEPS, WARMUP, act, ban, flag, log, tamper

from sentinel_bench.report._read import Run
from sentinel_bench.report._workers import Grid, confusion, grid_of, label_of, starts_of
from sentinel_bench.score import score

Make = Callable[..., Path]
Events = list[dict[str, Any]]


def run_of(events: Events) -> Run:
    return Run(Path(), {}, None, events, score(events), None)  # type: ignore[arg-type]


def grid(events: Events) -> Grid:
    found = grid_of(run_of(events))
    assert found is not None
    return found


# Attackers are (1, 0), (1, 1) and (2, 3). (1, 0) acts and is banned, (1, 1) acts and is not,
# (2, 3) is banned before it acts; (0, 2) is honest and banned, (0, 1) honest and flagged.
FATES = (
    *(act(5, 1, 0), act(5, 1, 1), tamper(1, 0), tamper(1, 1)),
    *(ban(7, 1, 0), ban(6, 2, 3), ban(8, 0, 2, "severe"), flag(5, 0, 1), flag(6, 0, 1, "update")),
)


def test_states_by_hand() -> None:
    found = grid(log(*FATES))
    states = {worker: fate.state.key for worker, fate in found.fates.items()}
    assert states == {
        (0, 1): "honest",
        (0, 2): "false-ban",
        (1, 0): "detected",
        (1, 1): "missed",
        (2, 3): "early",
    }
    assert found.of((1, 0)).delay == 7 - 5 + 1
    assert found.of((2, 3)).delay is None
    assert found.of((0, 2)).reason == "severe"
    assert found.of((0, 1)).flags == {"activation": 1, "update": 1}
    assert found.of((1, 0)).tamper == tamper(1, 0)
    assert found.of((2, 2)).state.key == "honest"
    assert confusion(found) == {"true_bans": 1, "missed": 1, "false_bans": 2, "left": 12 - 4}


def test_attackers_that_never_act_are_told_from_the_honest() -> None:
    found = grid(log())
    assert {fate.state.key for fate in found.fates.values()} == {"idle"}
    assert confusion(found) == {"true_bans": 0, "missed": 0, "false_bans": 0, "left": 12}


def test_attackers_come_first_then_the_honest_that_were_banned_then_the_most_flagged() -> None:
    rows = [flag(5, 0, 0), flag(5, 0, 1), flag(6, 0, 1), flag(6, 2, 0), ban(9, 2, 0)]
    order = [fate.worker for fate in grid(log(*rows)).interesting()]
    assert order == [(1, 0), (1, 1), (2, 3), (2, 0), (0, 1), (0, 0)]


def test_every_state_has_a_letter_and_a_colour_of_its_own() -> None:
    from sentinel_bench.report._workers import STATES

    assert len({state.letter for state in STATES}) == len(STATES)
    assert len({state.color for state in STATES}) == len(STATES)


def test_without_a_start_event_there_is_no_grid() -> None:
    assert grid_of(run_of([row for row in log() if row["type"] != "start"])) is None


WORKERS = st.tuples(st.integers(0, STAGES - 1), st.integers(0, REPLICAS - 1))
LATE = st.integers(WARMUP, STEPS - 1)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    attackers=st.sets(WORKERS, max_size=6),
    acted=st.dictionaries(WORKERS, LATE, max_size=6),
    banned=st.dictionaries(WORKERS, LATE, max_size=8),
)
def test_counts_are_those_of_the_scores(
    attackers: set[tuple[int, int]],
    acted: dict[tuple[int, int], int],
    banned: dict[tuple[int, int], int],
) -> None:
    acted = {worker: step for worker, step in acted.items() if worker in attackers}
    rows = [act(step, *worker) for worker, step in acted.items()]
    rows += [ban(step, *worker) for worker, step in banned.items()]
    rows += [tamper(*worker) for worker in acted]
    events = log(*rows, attackers=sorted(attackers))
    scores, found = score(events), grid(events)
    assert scores["outcome"] != "invalid", scores["reason"]
    counts = confusion(found)
    assert counts["true_bans"] + counts["missed"] == scores["acted"]
    assert counts["false_bans"] == scores["false_bans"]
    assert counts["true_bans"] + counts["false_bans"] == scores["banned"]
    assert sum(counts.values()) == STAGES * REPLICAS
    delays = [fate.delay for fate in found.fates.values() if fate.delay is not None]
    mean = sum(delays) / len(delays) if delays else None
    assert scores["detection_steps_mean"] == (mean if mean is None else pytest.approx(mean))


def test_attacks_of_attackers_are_named_with_their_parameters() -> None:
    assert label_of({"attack": "delay", "params": {"steps": 3}}) == "delay:steps=3"
    assert label_of({"attack": "zeros", "params": None}) == "zeros"
    assert label_of({}) == "?"


def test_starts_of_attackers_are_each_named_once() -> None:
    assert starts_of(run_of(log())) == [5]
    assert starts_of(run_of([])) == []
