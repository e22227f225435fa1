"""Statistics over time: from the trace if there is one, else what flags hold."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import act, flag, log

from sentinel_bench.report import _statistics
from sentinel_bench.report._read import read_run
from sentinel_bench.report._statistics import (
    MAX_NAMES,
    Statistics,
    distance,
    is_outside,
    payload,
    statistics_of,
)
from sentinel_bench.report._workers import grid_of

Make = Callable[..., Path]


def both(folder: Path) -> tuple[Statistics, dict[str, Any]]:
    """Return the statistics of a run and what its page draws from, through JSON."""
    run = read_run(folder)
    found, grid = statistics_of(run), grid_of(run)
    assert grid is not None
    return found, json.loads(json.dumps(payload(found, grid, (4, 10)), allow_nan=False))


def numbers(text: str) -> list[float]:
    values: list[float] = np.frombuffer(base64.b64decode(text), dtype="<f4").tolist()
    return values


TRACE = [
    (4, 1, "activation", {0: {"l1": [0.25, 0, 1]}, 2: {"l1": [2, 0, 1]}}),
    (5, 1, "activation", {0: {"l1": [math.nan, 0, 2]}}),
    (5, 1, "gradient", {0: {"l1": [1, -math.inf, math.inf], "l2": [3, 2, 4]}}),
]


def test_a_trace_gives_every_worker_its_line_and_every_stage_its_fence(make: Make) -> None:
    found, drawn = both(make(log(), trace=TRACE))
    assert found.traced and drawn["traced"]
    assert drawn["names"] == {"activation": ["l1"], "gradient": ["l1", "l2"]}
    line = drawn["lines"]["activation\nl1\n1\n0"]
    assert drawn["timelines"][line["at"]] == [4, 5]
    first, second = numbers(line["values"])
    assert first == 0.25 and math.isnan(second)
    other = drawn["lines"]["activation\nl1\n1\n2"]
    assert (drawn["timelines"][other["at"]], numbers(other["values"])) == ([4], [2])
    fence = drawn["fences"]["activation\nl1\n1"]
    assert [numbers(fence["low"]), numbers(fence["high"])] == [[0, 0], [1, 2]]
    assert numbers(drawn["fences"]["gradient\nl1\n1"]["high"]) == [math.inf]


def test_without_a_trace_flags_say_what_they_hold(make: Make) -> None:
    rows = [flag(5, 1, 0), flag(6, 1, 0), flag(6, 1, 0, "gradient", sfr=[9, 0, 1])]
    found, drawn = both(make(log(*rows)))
    assert not found.traced
    assert drawn["lines"] == drawn["fences"] == {}
    assert drawn["names"] == {"activation": ["l1", "l2"], "gradient": ["sfr"]}
    own = drawn["flags"]["activation\n1\n0"]
    assert (own["count"], own["steps"]) == (2, [5, 6])
    assert own["said"]["l1"] == [[0.5, 0.1, 0.2]] * 2


def test_what_is_not_finite_is_null_in_flags(make: Make) -> None:
    row = flag(5, 1, 0, l1=["nan", "-inf", "inf"], l2=["inf", 0, 1])
    _, drawn = both(make(log(row)))
    said = drawn["flags"]["activation\n1\n0"]["said"]
    assert said == {"l1": [[None, None, None]], "l2": [[None, 0, 1]]}


@pytest.mark.parametrize(
    "given", [None, [], "l1", {"l1": 3}, {"l1": [1, 2]}, {"l1": ["a", 1, 2]}, {"l1": [True, 0, 1]}]
)
def test_statistics_of_another_form_are_left_out_but_the_flag_is_not(
    make: Make, given: Any
) -> None:
    row = {**flag(5, 1, 0), "statistics": given}
    found, drawn = both(make(log(row)))
    assert found.names == {"activation": []}
    assert drawn["flags"]["activation\n1\n0"]["steps"] == [5]


def test_unknown_directions_are_left_out(make: Make) -> None:
    found, _ = both(make(log(flag(5, 1, 0, "sideways")), trace=[(4, 1, "up", TRACE[0][3])]))
    assert found.names == {}


def test_the_telling_statistic_is_outside_most_often_then_furthest(make: Make) -> None:
    rows = [
        flag(5, 1, 0, a=[3, 0, 1], b=[9, 0, 1]),
        flag(6, 1, 0, a=[3, 0, 1], b=[0.5, 0, 1]),
        flag(5, 1, 1, a=[3, 0, 1], b=[9, 0, 1]),
    ]
    run = read_run(make(log(*rows)))
    found, grid = statistics_of(run), grid_of(run)
    assert grid is not None
    assert found.telling(grid.of((1, 0))) == ("activation", "a")
    assert found.telling(grid.of((1, 1))) == ("activation", "b")
    assert found.telling(grid.of((2, 3))) is None


def test_without_a_flag_the_direction_in_which_it_acts_is_telling(make: Make) -> None:
    events = log(act(5, 1, 0))
    events[0]["attackers"][0]["mode"] = "gradient"
    run = read_run(make(events, trace=TRACE))
    found, grid = statistics_of(run), grid_of(run)
    assert grid is not None
    assert found.telling(grid.of((1, 0))) == ("gradient", "l1")


def test_outside_is_what_a_fence_does_not_hold() -> None:
    inf, nan = math.inf, math.nan
    outside = [(2, 0, 1), (1, 0, 1), (0, 0, 1), (nan, 0, 1), (inf, 0, 1), (-1, 0, inf)]
    inside = [(0.5, 0, 1), (5, -inf, inf), (nan, -inf, inf), (5, 0, inf)]
    assert [is_outside(x) for x in outside] == [True] * len(outside)
    assert [is_outside(x) for x in inside] == [False] * len(inside)
    assert distance((2, 0, 1)) == 3
    assert distance((nan, 0, 1)) == inf


def test_a_long_trace_is_thinned_over_its_steps(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [(step, 1, "activation", {0: {"l1": [step, 0, 1]}}) for step in range(100)]
    folder = make(log(), trace=long)
    assert both(folder)[1]["stride"] == 1
    monkeypatch.setattr(_statistics, "MAX_FLOATS", 60)  # of 100 values and 200 ends of fences
    drawn = both(folder)[1]
    assert drawn["stride"] == 5
    line = drawn["lines"]["activation\nl1\n1\n0"]
    assert drawn["timelines"][line["at"]] == numbers(line["values"]) == [*range(0, 100, 5)]
    assert len(numbers(drawn["fences"]["activation\nl1\n1"]["low"])) == 20


def test_many_flags_are_thinned_and_still_counted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_statistics, "MAX_FLAGS", 10)
    rows = [flag(5, 1, 0, l1=[i, 0, 1]) for i in range(40)]
    drawn = both(make(log(*rows)))[1]
    own = drawn["flags"]["activation\n1\n0"]
    assert drawn["flagStride"] == 4
    assert own["count"] == 40
    assert [said[0] for said in own["said"]["l1"]] == [*range(0, 40, 4)]


def test_so_many_names_that_nobody_could_choose_are_cut(make: Make) -> None:
    rows = [flag(5, 1, 0, **{f"s{i}": [i, 0, 1]}) for i in range(3 * MAX_NAMES)]
    _, drawn = both(make(log(*rows)))
    assert len(drawn["names"]["activation"]) == MAX_NAMES
    assert len(drawn["flags"]["activation\n1\n0"]["said"]) == MAX_NAMES
