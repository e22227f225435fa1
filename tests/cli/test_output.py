"""What the commands print, and how they end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from sentinel_bench.aggregators import AGGREGATORS
from sentinel_bench.api import (
    Aggregator,
    AggregatorParams,
    Attack,
    AttackContext,
    Knowledge,
)
from sentinel_bench.attacks import ATTACKS
from sentinel_bench.cli import _output, cli
from sentinel_bench.config import Frozen
from sentinel_bench.defenses import DEFENSES
from sentinel_bench.record import find_runs

Call = Callable[..., Any]
Tiny = Callable[..., list[str]]
ZEROS = ["run", "--attack", "zeros", "--defense", "averaging"]


class NeedyParams(Frozen):
    depth: int
    width: int = 3


class Needy(Attack[NeedyParams]):
    """Needs a parameter, and is broken."""

    name = "needy"
    goal = formula = source = "test"
    knowledge = frozenset({Knowledge.OWN})
    Params = NeedyParams

    def signal(self, x: Any, ctx: AttackContext) -> Any:
        raise RuntimeError("oh [no] more")


class MuteParams(AggregatorParams):
    reach: float = 0.5


class Mute(Aggregator[MuteParams]):
    """Cannot say what it requires."""

    name = "mute"
    goal = formula = source = "test"
    Params = MuteParams

    def requires(self, n: int, f: int) -> str | None:
        raise ValueError("no idea")


def test_a_run_prints_one_row_for_each_of_its_three_runs(call: Call, tiny: Tiny) -> None:
    done = call(*ZEROS, *tiny())
    assert done.status == 0
    lines = done.out.splitlines()
    head, rows = lines[0], lines[1:4]
    for column in ("attack", "defense", "precision", "recall", "F1", "val. loss", "outcome"):
        assert column in head
    assert "seed" not in head
    assert [row.split()[:2] for row in rows] == [
        *[["none", "none"], ["zeros", "none"], ["zeros", "averaging"]]
    ]
    assert rows[0].split()[-1] == "baseline"
    assert {row.split()[-1] for row in rows[1:]} <= {"defended", "broken"}
    assert lines[-3:] == [f"record: {f}" for f in _in_order(lines[-3:])]
    assert {Path(line.removeprefix("record: ")) for line in lines[-3:]} == {
        *find_runs(Path("runs"))
    }
    assert "warm-up" in done.err
    assert "record" not in done.err


def _in_order(lines: list[str]) -> list[str]:
    return [line.removeprefix("record: ") for line in lines]


def test_json_is_all_that_is_on_stdout(call: Call, tiny: Tiny) -> None:
    done = call(*ZEROS, *tiny(), "--json", "--seeds", "0-1")
    assert done.status == 0
    results = json.loads(done.out)
    assert [r["cell"]["seeds"]["data"] for r in results] == [0, 0, 0, 1, 1, 1]
    assert [r["cell"]["defense"] for r in results[:3]] == ["none", "none", "averaging"]
    for r in results:
        stored = json.loads(Path(r.pop("folder"), "result.json").read_text())
        assert r == stored
        assert r["commands"][0].startswith("sentinel-bench run --attack zeros")
    table = call(*ZEROS, *tiny(), "--resume", "--seeds", "0-1")
    assert "seed" in table.out.splitlines()[0]
    assert table.err.count("reused") == 6


def test_resume_prints_the_same_table(call: Call, tiny: Tiny) -> None:
    first = call(*ZEROS, *tiny())
    again = call(*ZEROS, *tiny(), "--resume")
    assert again.out == first.out
    assert [line.split(": ")[-1] for line in again.err.splitlines() if "reused" in line] == [
        f"reused {f}" for f in _in_order(first.out.splitlines()[-3:])
    ]


def test_an_invalid_cell_gives_status_1_and_its_reason(
    call: Call, tiny: Tiny, plug: Callable[..., None]
) -> None:
    plug(Needy)
    done = call("run", "--attack", "needy:depth=2", "--defense", "none", *tiny())
    assert done.status == 1
    assert "invalid" in done.out.splitlines()[2]
    assert "needy-vs-none: invalid: attack: attack needy" in done.out
    assert "RuntimeError: oh [no] more" in done.out
    assert "Traceback" not in done.err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_dry_run_prints_the_resolved_settings_and_leaves_nothing(
    call: Call, as_json: bool
) -> None:
    options = ["--attack", "delay:steps=5", "--lr", "2e-3", "--seeds", "3,5", "--dry-run"]
    done = call("run", *options, "--defense", "sentinel", *["--json"] * as_json)
    assert done.status == 0
    assert done.err.startswith("note: sentinel uses the fences found for track core")
    data = json.loads(done.out) if as_json else yaml.safe_load(done.out)
    assert data["scenario"]["train"]["lr"] == 0.002
    assert data["scenario"]["grid"] == {"stages": 8, "replicas": 8}
    assert data["scenario"]["track"] == "custom"
    assert [s["data"] for s in data["seeds"]] == [3, 5]
    assert [(c["attack"]["name"], c["defense"]["name"]) for c in data["cells"]] == [
        *[("none", "none"), ("delay", "none"), ("delay", "sentinel")]
    ]
    assert data["cells"][1]["attack"]["steps"] == 5
    assert "lambda" in data["cells"][2]["defense"]
    assert [*Path().iterdir()] == []


def test_flags_go_over_the_file_and_the_file_over_the_track(call: Call) -> None:
    Path("words.txt").write_text("words")
    Path("run.yaml").write_text(
        "track: smoke\nattack: zeros\ndefense: [none, sentinel]\n"
        "train: {lr: 0.5, steps: 70}\ndata: {path: words.txt}\n"
    )

    def plan(*options: str) -> Any:
        done = call("run", "--config", "run.yaml", "--dry-run", "--json", *options)
        assert done.status == 0, done.err
        return json.loads(done.out)

    data = plan("--lr", "0.25")
    train = data["scenario"]["train"]
    assert (train["lr"], train["steps"], train["warmup_steps"]) == (0.25, 70, 30)
    assert [c["attack"]["name"] for c in data["cells"]] == ["none", "zeros", "zeros"]
    assert plan("--attack", "ones")["cells"][1]["attack"]["name"] == "ones"
    assert plan()["scenario"]["data"]["path"] == "words.txt"
    assert plan("--data", "c4")["scenario"]["data"] == {
        **data["scenario"]["data"],
        "path": None,
        "name": "c4",
    }
    core = plan("--track", "core", "--warmup", "10", "--set", "threat.waves=1")
    assert core["scenario"]["grid"]["stages"] == 8
    assert plan("--set", "threat.gap=3")["scenario"]["threat"]["gap"] == 3


@pytest.mark.parametrize(
    "what, names",
    [
        ("attacks", list(ATTACKS)),
        ("defenses", list(DEFENSES)),
        ("aggregators", list(AGGREGATORS)),
        ("models", ["llama-tiny", "gpt2-tiny"]),
        ("datasets", ["sotu", "c4", "fineweb", "fineweb-edu", "openwebtext", "wikitext2"]),
        ("tracks", ["core", "adaptive", "mixed", "smoke"]),
    ],
)
def test_a_list_names_everything(call: Call, what: str, names: list[str]) -> None:
    rows = json.loads(call("list", what, "--json").out)
    assert [row["name"] for row in rows[: len(names)]] == names
    assert all(row["does"] for row in rows)
    table = call("list", what)
    assert table.status == 0
    for name in names:
        assert re.search(rf"^{re.escape(name)} ", table.out, re.MULTILINE)


def test_runs_are_listed_with_their_outcome_even_the_damaged_ones(call: Call, tiny: Tiny) -> None:
    assert call("list", "runs").out == "no runs in runs\n"
    assert json.loads(call("list", "runs", "--json").out) == []
    call(*ZEROS, *tiny())
    folders = find_runs(Path("runs"))
    (folders[0] / "result.json").unlink()
    (folders[1] / "config.json").write_text("{")
    (folders[2] / "result.json").write_text("{}")
    rows = json.loads(call("list", "runs", "--json").out)
    assert [row["run"] for row in rows] == [f.name for f in folders]
    assert [row["outcome"] for row in rows] == ["unfinished", "unreadable", "unreadable"]
    assert call("list", "runs").status == 0


def test_show_tells_all_about_a_plugin(call: Call, plug: Callable[..., None]) -> None:
    plug(Needy)
    data = json.loads(call("show", "defense", "sentinel", "--json").out)
    parameters = {p["name"]: p for p in data["parameters"]}
    assert parameters["lambda"]["default"].keys() == {"activation", "gradient"}
    assert parameters["violations"]["default"] == 5
    assert all(p["description"] for p in data["parameters"])
    text = call("show", "attack", "delay").out
    for part in ("goal", "formula", "source", "knowledge  own", "steps = 100   integer >= 1"):
        assert part in text
    assert "depth = required" in call("show", "attack", "needy").out
    assert "parameters none" in call("show", "attack", "none").out


def test_show_tells_all_about_an_aggregator(call: Call) -> None:
    data = json.loads(call("show", "aggregator", "multi-krum", "--json").out)
    assert data["condition"] == "n >= 2f+3: 5 rows for f = 1"
    assert [p["name"] for p in data["parameters"]] == ["f", "strict", "m"]
    text = call("show", "aggregator", "bulyan").out
    for part in ("goal", "formula", "source", "condition  n >= 4f+3", "strict = True   boolean"):
        assert part in text
    rows = {row["name"]: row for row in json.loads(call("list", "aggregators", "--json").out)}
    assert rows["mean"]["condition"] == "none"
    assert rows["krum"]["condition"] == data["condition"]
    assert "Krum" in rows["bulyan"]["does"] and "1802.07927" in rows["bulyan"]["source"]


def test_a_broken_aggregator_hides_no_other(call: Call, plug: Callable[..., None]) -> None:
    plug(Mute)
    rows = {row["name"]: row for row in json.loads(call("list", "aggregators", "--json").out)}
    assert {*rows} == {*AGGREGATORS, "mute"}
    assert "ValueError: no idea" in rows["mute"]["does"]
    done = call("show", "aggregator", "mute")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("error: aggregator 'mute' cannot be asked what it requires")


@pytest.mark.parametrize(
    "kind, names",
    [("attack", ATTACKS), ("defense", DEFENSES), ("aggregator", AGGREGATORS)],
)
def test_show_knows_every_built_in_plugin(call: Call, kind: str, names: dict[str, str]) -> None:
    for name in names:
        done = call("show", kind, name)
        assert (done.status, done.err) == (0, "")
        assert done.out.startswith(f"name       {name}\n")


def test_score_finds_a_changed_result(call: Call, tiny: Tiny) -> None:
    call(*ZEROS, *tiny())
    folder = find_runs(Path("runs"))[-1]
    good = call("score", folder)
    assert (good.status, good.err) == (0, "the stored result is equal\n")
    assert re.search(r"^outcome +(defended|broken)$", good.out, re.MULTILINE)
    assert json.loads(call("score", folder, "--json").out)["differences"] == []
    path = folder / "result.json"
    stored = json.loads(path.read_text())
    for key in ("validation_loss", "precision"):
        changed = {**stored, "scores": {**stored["scores"], key: 0.125}}
        path.write_text(json.dumps(changed))
        bad = call("score", folder)
        assert bad.status == 1
        assert bad.err.startswith(f"differs: scores.{key}: stored 0.125, recomputed")
        (line,) = json.loads(call("score", folder, "--json").out)["differences"]
        assert key in line
    path.unlink()
    assert call("score", folder).status == 1


def test_score_of_what_is_no_run_is_one_line(call: Call, tiny: Tiny) -> None:
    call(*ZEROS, *tiny())
    folder = find_runs(Path("runs"))[-1]
    config = json.loads((folder / "config.json").read_text())
    del config["cell"]
    (folder / "config.json").write_text(json.dumps(config))
    for path in ("nowhere", folder):
        done = call("score", path)
        assert done.status == 1
        assert done.out == ""
        assert re.fullmatch(r"error: .*config.json: .*\n", done.err)


def test_leaderboards_are_built_from_runs(call: Call, tiny: Tiny) -> None:
    call(*ZEROS, *tiny())
    done = call("leaderboard", "build", "runs", "--out", "boards")
    names = [*(f"custom/{n}" for n in ("README.md", "board.json", "board.csv")), "site/index.html"]
    written = [str(Path("boards", name)) for name in names]
    assert (done.status, done.out.splitlines()) == (0, written)
    assert "averaging" in Path("boards/custom/README.md").read_text()
    done = call("leaderboard", "build", "runs", "--out", "none", "--json")
    assert json.loads(done.out)
    assert not Path("none").exists()


def test_without_a_command_help_is_shown(call: Call) -> None:
    for command in ([], ["leaderboard"]):
        done = call(*command)
        assert done.status == 2
        assert "Usage:" in done.out + done.err
    done = call("--help")
    assert done.status == 0
    assert "Start with: sentinel-bench run" in done.out
    assert call("run", "-h").status == 0
    assert re.fullmatch(r"sentinel-bench, version [\d.]+\n", call("--version").out)


def test_the_table_is_plain_text_without_a_terminal(tiny: Tiny, call: Call) -> None:
    done = CliRunner().invoke(cli, [*ZEROS, *tiny()])
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert len(done.stdout.splitlines()[1]) > 80


@pytest.mark.parametrize("out", [["--out", "/home/me/runs"], ["--out=/home/me/runs"]])
def test_the_recorded_command_does_not_tell_where_runs_are(
    monkeypatch: pytest.MonkeyPatch, out: list[str]
) -> None:
    words = ["run", "--attack", "bias:sigma=1", *out, "--set", "data.name=two words", "--resume"]
    monkeypatch.setattr("sys.argv", ["x", *words])
    wanted = "sentinel-bench run --attack bias:sigma=1 --set 'data.name=two words' --resume"
    assert _output.command() == wanted
