"""`sentinel-bench sweep`: what it runs, prints, writes and refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sentinel_bench.api import Attack, AttackContext, NoParams
from sentinel_bench.record import find_runs

Call = Callable[..., Any]
Tiny = Callable[..., list[str]]
SWEEP = ["sweep", "--attack", "bias:sigma=0.1..10", "--defense", "sentinel"]
FILES = ("json", "png", "svg")


class Broken(Attack[NoParams]):
    name = "broken"
    goal = formula = source = "test"

    def signal(self, x: Any, ctx: AttackContext) -> Any:
        raise RuntimeError("oh [no] more")


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a run has started")

    monkeypatch.setattr("sentinel_bench.runner.Group.run", fail)


def test_a_sweep_runs_prints_and_writes_once_and_reuses_its_cells(call: Call, tiny: Tiny) -> None:
    command = [*SWEEP, "--track", "smoke", "--points", "2", "--seeds", "0-1", *tiny(), "--json"]
    first = call(*command)
    assert first.status == 0, first.err
    data = json.loads(first.out)
    assert len(find_runs(Path("runs"))) == 2 * (1 + 2 * 2)
    assert data["command"].startswith("sentinel-bench sweep --attack bias:sigma=0.1..10")
    assert data["settings"]["scenario"]["grid"] == {"stages": 4, "replicas": 4}
    assert [s["threat"] for s in data["settings"]["seeds"]] == [0, 1]
    assert [(p["strength"], p["cell"], p["defense"]) for p in data["points"]] == [
        (0.1, "bias:sigma=0.1", "sentinel"),
        (10, "bias:sigma=10", "sentinel"),
    ]
    for point in data["points"]:
        for name in ("recall", "f1", "false_bans", "validation_loss", "damage", "unprotected"):
            assert point[name]["n"] == 2
            assert point[name]["min"] <= point[name]["max"]
        assert sum(point["outcomes"].values()) == 2
    assert [row["attack"] for row in data["undetected"]] == ["bias:sigma=0.1..10"]
    assert "written: runs/sweep.json, runs/sweep.png, runs/sweep.svg" in first.err
    files = {kind: Path(f"runs/sweep.{kind}").read_bytes() for kind in FILES}
    assert json.loads(files["json"]) == data
    assert files["png"].startswith(b"\x89PNG")

    again = call(*command)
    assert again.status == 0
    assert again.err.count("reused") == 10
    assert again.out == first.out
    assert {kind: Path(f"runs/sweep.{kind}").read_bytes() for kind in FILES} == files
    assert len(find_runs(Path("runs"))) == 10

    table = call(*command[:-1], "--plot", "figures/one.two")
    assert [path.name for path in sorted(Path("figures").iterdir())] == [
        f"one.two.{kind}" for kind in FILES
    ]
    head, rows = table.out.splitlines()[:2], table.out.splitlines()[2:]
    for column in ("attack", "strength", "defense", "recall", "F1", "false bans", "damage"):
        assert column in head[0] + head[1]
    assert [row.split()[:3] for row in rows if row.startswith("bias ")] == [
        ["bias", f"sigma={s}", "sentinel"] for s in ("0.1", "10")
    ]
    assert "bias:sigma=0.1..10 vs sentinel: largest undetected damage" in table.out


def test_a_cell_that_fails_is_listed_and_the_others_go_on(
    call: Call, tiny: Tiny, plug: Callable[..., None]
) -> None:
    plug(Broken)
    attacks = ["--attack", "broken", "--attack", "zeros", "--attack", "delay:steps=2"]
    done = call("sweep", *attacks, "--defense", "none", *tiny())
    assert done.status == 1
    lines = done.out.splitlines()
    (row,) = [line for line in lines if line.startswith("broken  ")]
    assert row.count("1 of 1 invalid") == 2
    assert re.search(r"1 invalid$", row.rstrip())
    assert [line.split()[0] for line in lines if "+" in line] == ["zeros", "delay:steps=2"] * 2
    assert any("broken vs none, seed 0: invalid: attack: " in line for line in lines)
    assert "RuntimeError: oh [no] more" in done.out
    assert "broken vs none: largest undetected damage not known; without a valid run" in done.out
    data = json.loads(Path("runs/sweep.json").read_text())
    assert data["points"][0]["damage"] == {
        "mean": None,
        "min": None,
        "max": None,
        "n": 0,
        "missing": {"invalid": 1},
    }
    assert "broken vs none: 1 of 1 invalid" in Path("runs/sweep.svg").read_text()


def test_a_file_that_cannot_be_written_is_one_line_after_the_table(
    call: Call, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("sentinel_bench.plots.save", full)
    done = call("sweep", "--attack", "zeros", "--defense", "none", *tiny())
    assert done.status == 1
    assert "zeros vs none: largest undetected damage" in done.out
    assert done.err.splitlines()[-1] == "error: runs: cannot write the sweep: disk full"


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    "options, part",
    [
        (["--attack", "bias:sigma=3..1"], "smaller to a larger number"),
        (["--attack", "bias:sgima=1..3"], "unknown key 'sgima'; did you mean sigma"),
        (["--attack", "bias:sigma=.."], "is no range; write lo..hi"),
        (["--attack", "bias:sigma=0..3"], "greater than 0"),
        (["--attack", "bias:sigma=1..3", "--points", "1"], "at least 2 points"),
        (["--attack", "bias:sigma=1..3", "--points", "x"], "--points.*not a valid integer"),
        (["--attack", "bias:sigma=1..3", "--scale", "cubic"], "'cubic' is not one of"),
        (["--attack", "scaling:factor=-1..3", "--scale", "log"], "--scale linear"),
        (["--attack", "zeros", "--defense", "sentinel:slack=0.1..0.3"], "only attacks are swept"),
        (["--attack", "zeros", "--defense", "sentinell"], "did you mean sentinel"),
        (["--attack", "zeros", "--fraction", "0.5", "--defense", "none"], "fewer than half"),
        (["--attack", "zeros", "--plot", "."], "name files, not a folder"),
        (["--attack", "zeros", "--plot", "file/a"], "file: cannot write here"),
        (["--attack", "zeros", "--plot", "taken"], "taken.svg is a folder"),
        ([], "name at least one --attack"),
    ],
)
def test_what_cannot_be_swept_is_one_line_before_any_run(
    call: Call, options: list[str], part: str
) -> None:
    Path("file").write_text("")
    Path("taken.svg").mkdir()
    done = call("sweep", *options, *([] if "--defense" in options else ["--defense", "sentinel"]))
    assert done.status == 2
    assert done.out == ""
    (line,) = done.err.splitlines()
    assert re.fullmatch(f"error: .*{part}.*", line)


@pytest.mark.usefixtures("untrained")
def test_a_dry_run_prints_all_cells_and_leaves_nothing(call: Call) -> None:
    done = call(*SWEEP, "--points", "3", "--lr", "2e-3", "--dry-run", "--plot", "new/sweep")
    assert done.status == 0
    assert done.err.startswith("note: sentinel uses the fences found for track core")
    cells = yaml.safe_load(done.out)["cells"]
    assert [(c["attack"].get("sigma"), c["defense"]["name"]) for c in cells] == [
        (None, "none"),
        *((sigma, defense) for sigma in (0.1, 1.0, 10.0) for defense in ("none", "sentinel")),
    ]
    assert [*Path().iterdir()] == []


@pytest.mark.usefixtures("untrained")
def test_a_file_of_settings_may_name_a_range(call: Call) -> None:
    Path("sweep.yaml").write_text("attack: ['delay:steps=1..9', zeros]\ndefense: none\n")
    done = call("sweep", "--config", "sweep.yaml", "--points", "3", "--dry-run", "--json")
    cells = json.loads(done.out)["cells"]
    assert [c["attack"].get("steps") for c in cells] == [None, 1, 3, 9, None]


def test_help_says_that_finished_cells_are_reused(call: Call) -> None:
    done = call("sweep", "--help")
    assert re.search(r"Finished cells of\s+--out\s+are always\s+reused", done.out)


def test_planning_a_sweep_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from sentinel_bench.cli import cli; cli.main(sys.argv[1:], 'x', "
        "standalone_mode=False); "
        "print('LOADED', {'torch', 'matplotlib', 'sklearn'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *SWEEP, "--dry-run"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "LOADED set()"
