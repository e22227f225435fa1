"""`sentinel-bench leaderboard collect`, then `build`: what is printed, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import act, ban, log, write_run

from sentinel_bench.config import Scenario

Call = Callable[..., Any]


@pytest.fixture
def folder(make_scenario: Callable[..., Scenario], tmp_path: Path) -> Path:
    """A finished run in `runs`."""
    scenario = make_scenario(grid__stages=3, train__steps=10, train__warmup_steps=4)
    return write_run(tmp_path / "runs", scenario, log(act(5, 1, 0), ban(7, 1, 0)))


def test_runs_become_pages(call: Call, folder: Path) -> None:
    done = call("leaderboard", "collect", "runs")
    assert done.status == 0
    (target,) = Path("leaderboards/custom/results").iterdir()
    assert done.out == f"{target}\n"
    assert done.err.endswith("1 written, 0 unchanged, 0 replaced, 0 left out\n")
    done = call("leaderboard", "build", "leaderboards")
    assert done.status == 0 and done.err == ""
    page = Path("leaderboards/site/index.html")
    assert done.out.splitlines()[-1] == str(page) and page.is_file()
    entry = page.parent / "tracks" / "custom" / "defense-sentinel.html"
    assert "Workers banned" in entry.read_text()


def test_a_record_that_cannot_be_used_is_said_and_makes_the_status_one(
    call: Call, folder: Path
) -> None:
    (folder / "events.jsonl").write_text("")
    done = call("leaderboard", "collect", "runs", "--json")
    assert done.status == 1
    reason = f"{folder.relative_to(folder.parents[1]) / 'events.jsonl'}: is empty"
    assert json.loads(done.out) == {
        "written": [], "unchanged": [], "removed": [],
        "left_out": [{"run": f"runs/{folder.name}", "reason": reason}],
    }  # fmt: skip
    assert f"left out: runs/{folder.name}: {reason}\n" in done.err


def test_a_run_that_is_not_finished_is_no_failure(call: Call, folder: Path) -> None:
    (folder / "result.json").unlink()
    done = call("leaderboard", "collect", "runs")
    assert (done.status, done.out) == (0, "")
    assert "not finished: it has no result.json" in done.err


def test_a_track_without_runs_is_one_line(call: Call, folder: Path) -> None:
    done = call("leaderboard", "collect", "runs", "--track", "cor")
    assert (done.status, done.out) == (2, "")
    assert done.err == "error: no finished run is of track 'cor'; known: custom\n"
