"""`sentinel-bench reproduce`: what it lists, runs, prints, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sentinel_bench import suite
from sentinel_bench.cli import _output
from sentinel_bench.config import Scenario, build
from sentinel_bench.record import find_runs
from sentinel_bench.reproduce import published

Call = Callable[..., Any]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, text_file: Path) -> None:
    """Published numbers of which `table1` has two rows on a short `smoke` and one without cell."""
    scenario = {
        "data": {"path": str(text_file), "vocab_size": 260},
        "train": {"steps": 16, "warmup_steps": 6, "seq_len": 8, "eval_sequences": 8},
    }
    numbers = {"precision": 100, "recall": 100, "f1": 100, "val_loss": 3.8}
    rows = [
        {"attack": "none", "numbers": {**numbers, "val_loss_unprotected": 3.8}},
        {
            "mode": "activation", "attack": "zeros",
            "numbers": {**numbers, "val_loss_unprotected": 11.7},
        },
        {"attack": "ones", "numbers": numbers, "tiny": {"missing": "another [b]model[/b]"}},
    ]  # fmt: skip
    tiny = {"track": "smoke", "scenario": scenario, "defense": "sentinel:min_steps=3"}
    table = {
        "title": "Two <b>rows</b>", "baseline": 3.8, "tiny": tiny, "rows": rows,
        "paper": {"missing": "no such machine"}, "notes": ["the third row was never printed"],
    }  # fmt: skip
    figure = {"title": "Picture", "of": ["table1"], "notes": ["drawn from a table"]}
    content = {
        "spread": 0.008, "absent": {"swarm": "it swarms"},
        "tables": {"table1": table, "figure1": figure},
    }  # fmt: skip
    made = build(published.Published, content, "test")
    monkeypatch.setattr(published, "load", lambda: made)


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a run has started")

    monkeypatch.setattr("sentinel_bench.batch.run", fail)


@pytest.mark.usefixtures("small")
def test_a_table_is_run_once_printed_and_written_and_again_from_its_results(call: Call) -> None:
    command = ["reproduce", "table1", "--seeds", "0-1", "--threads", "1", "--write", "docs/r.md"]
    first = call(*command, "--json")
    assert first.status == 0, first.err
    data = json.loads(first.out)
    assert len(find_runs(Path("runs"))) == 2 * (1 + 1 + 2)
    assert data["cells"] == {"planned": 8, "with_result": 8}
    quiet, zeros, none = data["rows"]
    assert zeros["own"]["val_loss"]["n"] == zeros["own"]["excess_unprotected"]["n"] == 2
    assert zeros["problems"] == quiet["problems"] == []
    assert quiet["verdicts"].keys() == {"quiet"}
    assert (none["own"], none["missing"]) == (None, "another [b]model[/b]")
    text = Path("docs/r.md").read_text()

    again = call(*command)
    assert again.status == 0
    assert "8 of 8 cells are there already: runs" in again.err
    assert Path("docs/r.md").read_text() == text
    assert "published above ours" in again.out
    assert "[b]model[/b]" in again.out
    assert "note: the third row was never printed" in again.out

    results = Path("kept")
    for run in find_runs(Path("runs")):
        (results / run.name).mkdir(parents=True)
        (results / run.name / "result.json").write_bytes((run / "result.json").read_bytes())
    read = call(*command[:4], "--results", results, "--write", "other.md", "--json")
    assert read.status == 0
    assert json.loads(read.out) == data
    assert Path("other.md").read_text() == text
    assert "<b>rows" not in text

    drawn = call("reproduce", "figure1", "--seeds", "0-1", "--results", results,
                 "--write", "docs/r.md")  # fmt: skip
    assert drawn.status == 0, drawn.err
    assert "drawn from a table" in drawn.out
    assert "![Picture](figures/reproduction-figure1-tiny.svg)" in Path("docs/r.md").read_text()
    assert Path("docs/figures/reproduction-figure1-tiny.svg").stat().st_size > 1000


@pytest.mark.usefixtures("small")
def test_an_invalid_cell_is_exit_status_1_and_named(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("oh no")

    def run_here(entries: Any, plan: Any, task: Any, *_: Any) -> None:
        done = suite.run(plan, task.out, _output.Reporter(), threads=1)
        for entry, item in zip(entries, done, strict=True):
            entry.folder, entry.result = item.folder, item.result
            entry.state = "done" if item.valid else "failed"

    monkeypatch.setattr("sentinel_bench.defenses.sentinel.Sentinel.check", fail)
    monkeypatch.setattr("sentinel_bench.batch.run", run_here)
    made = call("reproduce", "table1", "--row", "2", "--seeds", "0", "--threads", "1")
    assert made.status == 1
    assert "row 2, zeros (activation): with defense: invalid" in made.out


@pytest.mark.usefixtures("untrained")
def test_a_dry_run_says_how_many_cells_there_are(call: Call) -> None:
    made = call("reproduce", "table1", "--dry-run")
    assert made.status == 0
    assert "seeds 0, 1, 2: 150 cells from 3 warm-ups, 31,920 steps" in made.out
    assert "25   invisible-noise (gradient)" in made.out
    plan = json.loads(call("reproduce", "figure1", "--dry-run", "--json", "--seeds", "0").out)
    assert (plan["cells"], plan["warm_ups"], len(plan["rows"])) == (50, 1, 75)
    assert plan["rows"][30]["missing"].startswith("the tiny stand-in has one corpus")
    one = json.loads(call("reproduce", "table2", "--row", "1", "--dry-run", "--json").out)
    assert one["cells"] == 6
    assert not Path("runs").exists()


def test_each_corpus_of_a_table_is_read_for_its_own_rows(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, run = [], []

    def load(scenario: Scenario, _: Any) -> Any:
        read.append(scenario.data.name)
        return SimpleNamespace(digest=scenario.data.name)

    def batch(entries: Any, plan: Any, *_: Any) -> None:
        run.append({e.key["data"] for e in entries} | {s.data.name for s, _ in plan.groups})

    monkeypatch.setattr("sentinel_bench.cli._live.load_tokens", load)
    monkeypatch.setattr("sentinel_bench.batch.run", batch)
    assert call("reproduce", "table2", "--scale", "paper", "--seeds", "0").status == 0
    assert read == ["c4", "fineweb", "openwebtext"]
    assert run == [{"c4"}, {"fineweb"}, {"openwebtext"}]


def test_a_corpus_off_line_is_one_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = call("reproduce", "table1", "--scale", "paper", "--device", "cpu", "--row", "1")
    assert made.status == 2
    lines = [line for line in made.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "could not be read from the hub" in lines[0]
    assert made.out == ""
    assert "Traceback" not in made.err


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["tabel1"], "nothing published is called 'tabel1'; did you mean table1"),
        (["table13"], "table13 cannot be reproduced: it holds settings and no measurements"),
        (["table10"], "table10 cannot be reproduced: its numbers are not among those held"),
        (["table20"], "table20 has no counterpart at scale tiny: routing is stochastic"),
        (["table15"], "table15 has no counterpart at scale tiny: the tiny stand-in has one corpus"),
        (["table19", "--scale", "paper"], "table19 has no counterpart at scale paper: signals are"),
        (["swarm"], "there is no track swarm: routing is stochastic"),
        (["table2", "--row", "4"], "table2 has rows 1 to 3, not 4"),
        (["table2", "--seeds", "x"], "--seeds 'x'"),
        (["table1", "--results", "nowhere"], "nowhere: no such file or folder"),
        (["table1", "--results", "."], "no result of table1 at scale tiny is below ."),
        (["table2", "--row", "1", "--write", "r.md"], "--write takes whole tables"),
        (["table1", "--write", "mine.txt"], "mine.txt: is not a document of 'reproduce'"),
    ],
)
def test_what_cannot_be_done_is_one_line_before_anything_runs(
    call: Call, arguments: list[str], message: str
) -> None:
    Path("mine.txt").write_text("mine")
    made = call("reproduce", *arguments)
    assert made.status == 2
    assert made.err.startswith(f"error: {message}")
    assert made.err.count("\n") == 1
    assert made.out == ""
    assert Path("mine.txt").read_text() == "mine"


def test_names_are_listed_with_what_each_has_at_which_scale(call: Call) -> None:
    listed = {row["name"]: row for row in json.loads(call("reproduce", "list", "--json").out)}
    assert listed["table1"]["tiny"] == {"rows": 25, "of": 25, "missing": ""}
    assert listed["table4"]["paper"]["rows"] == 3
    text = call("reproduce", "list").out
    assert "table18" in text
    assert "6 of 6" in text
    assert "lu2024" in call("reproduce", "--help").out


def test_no_torch_is_imported_to_plan_and_to_read() -> None:
    code = (
        "import sys; sys.argv[1:] = ['reproduce', 'table1', '--dry-run']\n"
        "from sentinel_bench.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'scipy', 'sklearn', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
