"""Faults on the command line: what ends a run, what is survived, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench.record import find_runs, read_events

Call = Callable[..., Any]
Tiny = Callable[..., list[str]]
CRASH = ["run", "--attack", "crash", "--defense", "none", "--mode", "both"]


def test_a_crash_ends_the_run_with_exit_status_1_and_the_way_out(call: Call, tiny: Tiny) -> None:
    done = call(*CRASH, *tiny())
    assert done.status == 1
    said = " ".join(done.out.split())
    assert "crash-vs-none: invalid: fault: stage 1, replica" in said
    assert "sent no activation at step 4 (a simulated crash): rerun with --on-crash ban" in said
    assert "Traceback" not in done.err
    rows = [row for run in find_runs(Path("runs")) for row in read_events(run)]
    assert [(r["party"], r["message"][:7]) for r in rows if r["type"] == "error"] == [
        ("fault", "stage 1")
    ]


def test_with_the_way_out_it_is_survived_and_the_table_shows_the_bans(
    call: Call, tiny: Tiny
) -> None:
    given = [*CRASH, *tiny(), "--on-crash", "ban", "--deadline", "2.5"]
    done = call(*given, "--json")
    assert done.status == 0
    scores = json.loads(done.out)[-1]["scores"]
    assert [scores[k] for k in ("acted", "banned", "f1", "detection_steps_mean")] == [2, 2, 100, 1]
    table = call(*given, "--resume")
    assert table.err.count("reused") == 2
    (row,) = [line for line in table.out.splitlines() if line.startswith("crash ")]
    assert row.split()[1:7] == ["none", "100.0", "100.0", "100.0", "1.0", "0"]


def test_the_handling_is_part_of_the_identity_of_a_cell_and_not_of_the_honest_one(
    call: Call, tiny: Tiny
) -> None:
    call(*CRASH, *tiny(), "--on-crash", "ban")
    again = call(*CRASH, *tiny(), "--on-crash", "ban", "--deadline", "1", "--resume")
    assert "none vs none: reused" in again.err
    assert "crash (both) vs none: runs/" in again.err
    assert "is not reused; differs in scenario.faults.deadline" in again.err


def test_settings_of_faults_are_shown_and_may_stand_in_a_file(call: Call) -> None:
    Path("faults.yaml").write_text("attack: crash\nfaults: {deadline: 3, on_crash: ban}\n")
    for given, deadline in (([], 3), (["--deadline", "1.5"], 1.5), (["--deadline", "null"], None)):
        done = call("run", "--config", "faults.yaml", *given, "--dry-run", "--json")
        assert json.loads(done.out)["scenario"]["faults"] == {
            "deadline": deadline,
            "on_crash": "ban",
        }


@pytest.mark.parametrize(
    "options, message",
    [
        (["--on-crash", "stop"], "faults.on_crash: Input should be 'end' or 'ban'"),
        (["--deadline", "0"], "faults.deadline: Input should be greater than 0"),
        (["--deadline", "-1"], "faults.deadline: "),
        (["--deadline", "soon"], "faults.deadline: "),
        (["--deadline", "1e300"], "faults.deadline: "),
        (["--deadline", ".nan"], "faults.deadline: "),
        (["--deadline", ".inf"], "faults.deadline: "),
        (["--set", "faults.deadlin=1"], "unknown key 'faults.deadlin'; did you mean deadline"),
        (["--attack", "crash:afer=1"], "attack crash: unknown key 'afer'; did you mean after"),
        (["--attack", "on-off:attack=crsh"], "unknown attack 'crsh'; did you mean crash"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    call: Call, options: list[str], message: str
) -> None:
    done = call(*CRASH, *options)
    assert (done.status, done.out) == (2, "")
    assert message in done.err
    assert not Path("runs").exists()


def test_the_page_of_a_fault_says_how_it_is_run_and_what_its_scores_mean(call: Call) -> None:
    pages = Path(__file__).parents[2] / "docs" / "attacks"
    for name, says in (("crash", "--on-crash ban"), ("straggle", "recall and F1 are 0")):
        assert says in call("show", "attack", name).out
        text = (pages / f"{name}.md").read_text()
        assert f"--attack {name} --defense sentinel --mode both --on-crash ban\n" in text
        assert "## To know" in text
        assert says in text
    assert "note" not in json.loads(call("show", "attack", "zeros", "--json").out)
