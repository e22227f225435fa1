"""The curves of a run: hand-worked numbers, small files, nothing that JSON has no word for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import act, at, ban, digest_of, flag, log, write_run

from sentinel_bench.config import Scenario
from sentinel_bench.leaderboard import curves
from sentinel_bench.leaderboard.curves import curves_of, short
from sentinel_bench.report._read import read_run

Draw = Callable[..., dict[str, Any]]


@pytest.fixture
def draw(make_scenario: Callable[..., Scenario], tmp_path: Path) -> Draw:
    """Return a function that gives the curves of a run of 10 steps, 4 of them warm-up."""

    def run(*rows: Any, trace: Any = None, **more: Any) -> dict[str, Any]:
        scenario = make_scenario(grid__stages=3, train__steps=10, train__warmup_steps=4)
        folder = write_run(tmp_path / "runs", scenario, log(*rows, **more), trace=trace)
        found = curves_of(read_run(folder))
        assert found["digest"] == digest_of(folder)
        json.dumps(found, allow_nan=False)
        return found

    return run


def test_numbers_have_four_digits_and_are_finite() -> None:
    assert [short(x) for x in (4.21152, 12345.6, -0.000123456, 0.0)] == [
        4.212, 12350.0, -0.0001235, 0.0,
    ]  # fmt: skip
    assert [short(float(x)) for x in ("nan", "inf", "-inf")] == [None, None, None]


def test_losses_are_means_of_as_many_steps_each(
    draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "POINTS", 4)
    losses = {0: 4.0, 1: 5.0, 2: 7.5, 3: 1.0, 4: "nan", 5: 1.0, 6: 2.0, 7: 3.0, 8: 4.00006, 9: None}
    found = draw(losses=losses)
    # ten steps in four parts are three steps each; a part with NaN has no number, and no loss
    # at the last step leaves that part without one, so that the line ends before it
    assert found["loss"] == {"every": 3, "values": [5.5, None, 3.0]}
    assert (found["steps"], found["warmup"]) == (10, 4)


def test_a_short_run_keeps_each_step(draw: Draw) -> None:
    found = draw(losses={3: "inf"})["loss"]
    assert found["every"] == 1
    assert found["values"] == [4.0, 3.9, 3.8, None, 3.6, 3.5, 3.4, 3.3, 3.2, 3.1]


def test_bans_say_whether_the_worker_had_attacked(draw: Draw) -> None:
    found = draw(
        *(act(5, 1, 0), ban(7, 1, 0)),  # found
        *(ban(5, 1, 1), act(6, 1, 1)),  # banned before it acted: a false ban
        ban(6, 0, 2),  # honest
    )
    assert found["bans"] == [[5, 1, 1, False], [6, 0, 2, False], [7, 1, 0, True]]
    assert found["attackers"] == [[1, 0, 5, 5], [1, 1, 5, None], [2, 3, 5, None]]
    assert found["more"] == {"attackers": 0, "bans": 0}


def test_signals_are_counted_by_truth_after_the_warm_up(
    draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "BINS", 4)
    # each of the six steps has 10 honest and 2 tampered signals, of both one flagged
    assert draw()["signals"] == {
        "every": 2, "from": 4, "honest": [[20, 2]] * 3, "tampered": [[4, 2]] * 3,
    }  # fmt: skip


def test_telling_workers_are_the_first_of_each_kind(draw: Draw) -> None:
    found = draw(
        *(act(5, 1, 0), act(4, 1, 1), act(6, 2, 3), ban(9, 1, 0), ban(8, 1, 1)),
        *(ban(7, 0, 1), ban(6, 0, 3)),
        flag(5, 1, 1, l1=[0.5, 0.1, 0.2], l2=[1.5, 1.0, 2.0], sfr=[1, 0, 9]),
    )  # fmt: skip
    assert [(w["role"], w["stage"], w["replica"]) for w in found["workers"]] == [
        ("detected", 1, 1),
        ("false-ban", 0, 3),
        ("missed", 2, 3),
    ]
    first, honest, missed = found["workers"]
    assert (first["acted"], first["banned"], first["attack"]) == (4, 8, "zeros")
    assert first["direction"] == "activation"
    # outside of its fence first, and one more; no others
    assert first["statistics"] == [
        {"name": "l1", "flags": [[5, 0.5, 0.1, 0.2]], "trace": []},
        {"name": "l2", "flags": [[5, 1.5, 1.0, 2.0]], "trace": []},
    ]
    assert (honest["attack"], honest["statistics"], missed["statistics"]) == ("", [], [])


def test_a_trace_gives_values_and_fences_of_each_step(draw: Draw) -> None:
    trace = [
        (step, 1, "activation", {0: {"l1": [0.1 * step, 0.0, float("inf")]}, 1: {"l1": [9, 0, 1]}})
        for step in (5, 6)
    ]
    (worker,) = draw(act(5, 1, 0), trace=trace, attackers=[(1, 0)])["workers"]
    assert worker["statistics"] == [
        {"name": "l1", "flags": [], "trace": [[5, 0.5, 0.0, None], [6, 0.6, 0.0, None]]}
    ]


def test_long_lists_are_thinned_out_and_say_so(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "FLAGS", 3)
    monkeypatch.setattr(curves, "WORKERS", 2)
    flags = [flag(step, 2, 3, l1=[step, 0, 1]) for step in range(4, 10)]
    found = draw(act(4, 2, 3), ban(5, 0, 0), ban(6, 0, 1), ban(7, 0, 2), *flags)
    assert len(found["bans"]) == 2 and len(found["attackers"]) == 2
    assert found["more"] == {"attackers": 1, "bans": 1}
    missed = found["workers"][-1]
    assert [row[0] for row in missed["statistics"][0]["flags"]] == [5, 7, 9]  # the last is kept


def test_what_is_not_finite_is_null(draw: Draw) -> None:
    (worker,) = draw(
        act(5, 1, 0), flag(5, 1, 0, l1=["nan", "-inf", 0.25]), attackers=[(1, 0)]
    )["workers"]  # fmt: skip
    assert worker["statistics"][0]["flags"] == [[5, None, None, 0.25]]


def test_a_run_that_ended_before_its_first_step_has_empty_curves(
    make_scenario: Callable[..., Scenario], tmp_path: Path
) -> None:
    events = [at("error", 0, 0, 0, party="attack", message="x")]
    found = curves_of(read_run(write_run(tmp_path, make_scenario(), events)))
    assert (found["loss"]["values"], found["bans"], found["workers"]) == ([], [], [])


def test_curves_of_a_large_run_are_a_few_kilobytes(
    make_scenario: Callable[..., Scenario], tmp_path: Path
) -> None:
    who = [(s, r) for s in range(3) for r in range(4)]
    name = "statistic " * 100
    rows = [act(4, s, r) for s, r in who] + [ban(9, s, r) for s, r in who]
    rows += [flag(step, 1, 0, **{name: [1 / 3, 1e-9, 1e9]}) for step in range(4, 10)] * 20
    scenario = make_scenario(grid__stages=3, train__steps=10, train__warmup_steps=4)
    trace = [(step, 1, "activation", {0: {name: [1 / 3, 0, 1]}}) for step in range(10)] * 30
    folder = write_run(tmp_path, scenario, log(*rows, attackers=who), trace=trace)
    assert len(json.dumps(curves_of(read_run(folder)))) < 8000
