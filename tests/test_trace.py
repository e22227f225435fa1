"""A trace gives back what was written, whatever was cut off, and changes nothing of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench import suite
from sentinel_bench.config import Component, Scenario
from sentinel_bench.errors import RunError
from sentinel_bench.record import read_config, read_events
from sentinel_bench.trace import TRACE, Boundary, Trace, read_trace, tracing


class Quiet:
    def say(self, text: str) -> None: ...
    def start(self, label: str, total: int) -> None: ...
    def advance(self) -> None: ...
    def finish(self) -> None: ...


def said(**numbers: float) -> dict[str, list[float]]:
    return {name: [value, -1.0, 2.0] for name, value in numbers.items()}


def read(folder: Path) -> list[Boundary]:
    found = read_trace(folder)
    assert found is not None
    return found


def test_what_was_written_comes_back_in_order(tmp_path: Path) -> None:
    with Trace(tmp_path) as trace:
        trace.append(7, 1, "activation", {0: said(l1=0.5, l2=4), 3: said(l1=0.25, l2=8)})
        trace.append(7, 2, "update", {2: said(norm=1)})
        trace.append(8, 1, "gradient", {0: said(l1=0.125, l2=16)})
    first, second, third = read(tmp_path)
    assert (first.step, first.stage, first.direction) == (7, 1, "activation")
    assert first.names == third.names == ("l1", "l2")
    assert first.replicas == (0, 3)
    assert first.values.tolist() == [[0.5, 0.25], [4, 8]]
    assert first.low.tolist() == [-1, -1] and first.high.tolist() == [2, 2]
    assert (second.stage, second.names, second.values.tolist()) == (2, ("norm",), [[1]])
    assert (third.step, third.replicas, third.values.tolist()) == (8, (0,), [[0.125], [16]])
    assert (tmp_path / TRACE).read_text().count('"names"') == 2  # once for each set of them


def test_numbers_that_json_has_no_word_for_come_back(tmp_path: Path) -> None:
    odd = {
        0: {"a": [math.nan, -math.inf, math.inf]},
        1: {"a": [1e300, -math.inf, math.inf]},  # no float32
    }
    with Trace(tmp_path) as trace:
        trace.append(0, 0, "activation", odd)
    (boundary,) = read(tmp_path)
    assert math.isnan(boundary.values[0, 0])
    assert [boundary.values[0, 1], boundary.low[0], boundary.high[0]] == [
        *(math.inf, -math.inf, math.inf)
    ]


def test_nobody_tested_or_nothing_said_is_no_row(tmp_path: Path) -> None:
    with Trace(tmp_path) as trace:
        trace.append(0, 0, "activation", {})
        trace.append(0, 0, "activation", {0: {}, 1: {}})
    assert read(tmp_path) == []
    assert len((tmp_path / TRACE).read_bytes().splitlines()) == 1


def test_every_row_is_on_disk_before_the_next_and_one_cut_off_is_left_out(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    for step in range(3):
        trace.append(step, 0, "activation", {0: said(l1=step)})
        assert [b.step for b in read(tmp_path)] == [*range(step + 1)]  # never closed: a kill
    content = (tmp_path / TRACE).read_bytes()
    (tmp_path / TRACE).write_bytes(content[:-20])
    assert [b.step for b in read(tmp_path)] == [0, 1]


def test_a_run_without_a_trace_has_none_and_no_file(tmp_path: Path) -> None:
    with tracing(tmp_path, wanted=False) as trace:
        assert trace is None
    assert [*tmp_path.iterdir()] == []
    assert read_trace(tmp_path) is None


def test_a_trace_is_never_written_over(tmp_path: Path) -> None:
    with Trace(tmp_path) as trace:
        trace.append(0, 0, "activation", {0: said(l1=1)})
    with pytest.raises(RunError, match=r"trace\.jsonl: cannot be made: File exists"):
        Trace(tmp_path)
    assert len(read(tmp_path)) == 1


ROW = {
    "type": "boundary",
    "step": 0,
    "stage": 0,
    "direction": "activation",
    "statistics": 0,
    "replicas": [0],
    "data": "AAAAAAAAAAAAAAAA",
}


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": 1e3},
        {"stage": True},
        {"statistics": 1},
        {"statistics": None},
        {"replicas": [0, 1]},
        {"replicas": 3},
        {"data": "AAAA"},
        {"data": "#"},
        {"data": 7},
        {"type": "else"},
    ],
)
def test_a_row_of_another_form_is_an_error_that_names_it(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    names = {"type": "statistics", "names": ["l1"]}
    rows = [{"type": "trace", "schema": 1}, names, ROW]
    path = tmp_path / TRACE

    def write(rows: list[dict[str, Any]]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(rows)
    assert len(read(tmp_path)) == 1
    bad = {**ROW, **change}
    if bad["type"] == "else":
        del bad["data"]
    write([*rows, bad, ROW])
    with pytest.raises(RunError, match=r"trace\.jsonl:4: no row of a trace"):
        read(tmp_path)


@pytest.mark.parametrize("head", [b"", b"\n", b'{"type": "trace", "schema": 2}\n', b"\x00\xff\n"])
def test_another_file_is_no_trace(tmp_path: Path, head: bytes) -> None:
    (tmp_path / TRACE).write_bytes(head)
    with pytest.raises(RunError, match=r"trace\.jsonl"):
        read_trace(tmp_path)


# In a run.


@pytest.fixture(scope="module")
def pair(
    make_scenario: Callable[..., Scenario], tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, Path]:
    """The same run of zeros against sentinel with and without a trace."""
    attack, defense = Component(name="zeros"), Component.parse("sentinel:min_steps=2,lambda=.05")
    plan = suite.make_plan([make_scenario()], [attack], [defense], {}, unprotected=False)
    found = {}
    for traced in (True, False):
        out = tmp_path_factory.mktemp("traced" if traced else "plain")
        found[traced] = suite.run(plan, out, Quiet(), threads=1, trace=traced)[-1].folder
    return found


def without_clocks(folder: Path) -> list[dict[str, Any]]:
    clocks = ("time", "seconds", "tokens_per_second")
    return [{k: v for k, v in row.items() if k not in clocks} for row in read_events(folder)]


def test_a_traced_run_is_the_same_run_and_the_same_cell(pair: dict[bool, Path]) -> None:
    traced, plain = pair[True], pair[False]
    assert without_clocks(traced) == without_clocks(plain)
    assert read_config(traced)["digest"] == read_config(plain)["digest"]
    assert read_trace(plain) is None


def test_every_tested_worker_is_in_the_trace_of_every_boundary(pair: dict[bool, Path]) -> None:
    events, boundaries = read_events(pair[True]), read(pair[True])
    steps = [row for row in events if row["type"] == "step"]
    tested = {row["step"]: sum(row["checked"]) for row in steps if sum(row["checked"])}
    found = dict.fromkeys(tested, 0)
    for boundary in boundaries:
        found[boundary.step] += len(boundary.replicas)
        assert boundary.names == ("l1", "l2", "sfr", "swd")
    assert found == tested
    assert {b.direction for b in boundaries} == {"activation", "gradient"}


def test_a_flag_says_what_the_trace_says(pair: dict[bool, Path]) -> None:
    places = {(b.step, b.stage, b.direction): b for b in read(pair[True])}
    flags = [row for row in read_events(pair[True]) if row["type"] == "flag"]
    assert flags
    for row in flags:
        boundary = places[row["step"], row["stage"], row["direction"]]
        column = boundary.replicas.index(row["replica"])
        for i, (name, numbers) in enumerate(row["statistics"].items()):
            assert boundary.names[i] == name
            own = [boundary.values[i, column], boundary.low[i], boundary.high[i]]
            assert own == pytest.approx(numbers, rel=1e-6)
