"""From runs to a board: which cells are taken, which are left out and why, and what is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import act, ban, cut, digest_of, log, write_run

from sentinel_bench.config import Scenario
from sentinel_bench.errors import ConfigError, RunError
from sentinel_bench.leaderboard import summarize
from sentinel_bench.leaderboard._read import read
from sentinel_bench.leaderboard.collect import Collected, collect, name_of

Make = Callable[..., Path]
FOUND = log(act(5, 1, 0), ban(7, 1, 0))


@pytest.fixture
def make(make_scenario: Callable[..., Scenario], tmp_path: Path) -> Make:
    """Return a function that writes a finished run into the folder `runs`, and returns it."""

    def run(finished: str = "01", events: Any = None, code: str = "feedbeef", **more: Any) -> Path:
        given = {"grid__stages": 3, "train__steps": 10, "train__warmup_steps": 4}
        given |= {key: more.pop(key) for key in [*more] if "__" in key or key == "track"}
        rows = [dict(row) for row in (FOUND if events is None else events)]
        if rows and rows[-1]["type"] == "end":
            rows[-1]["time"] = f"2026-01-{finished}T00:00:00Z"
        folder = write_run(tmp_path / "runs", make_scenario(**given), rows, **more)
        return _with_code(folder, code)

    return run


def _with_code(folder: Path, code: str) -> Path:
    """Make a run one of another engine, and so of another digest."""
    from sentinel_bench.record import digest

    config = json.loads((folder / "config.json").read_text())
    config["identity"]["engine"] = code
    config["digest"] = digest(config["identity"])
    (folder / "config.json").write_text(json.dumps(config))
    if (folder / "result.json").exists():
        result = json.loads((folder / "result.json").read_text())
        result["digest"] = config["digest"]
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def run(tmp_path: Path, **more: Any) -> Collected:
    return collect([tmp_path / "runs"], tmp_path / "boards", **more)


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def test_a_cell_is_a_folder_with_its_result_and_its_curves(make: Make, tmp_path: Path) -> None:
    folder = make()
    done = run(tmp_path)
    name = f"zeros_activation_vs_sentinel_s0_{digest_of(folder)[:8]}"
    target = tmp_path / "boards" / "custom" / "results" / name
    assert (done.written, done.left_out, done.removed) == ([target], [], [])
    assert files(tmp_path / "boards") == [
        f"custom/results/{name}/{file}" for file in ("curves.json", "result.json")
    ]
    assert (target / "result.json").read_bytes() == (folder / "result.json").read_bytes()
    curves = json.loads((target / "curves.json").read_text())
    assert curves["digest"] == digest_of(folder) and curves["bans"] == [[7, 1, 0, True]]
    assert summarize([tmp_path / "boards"])["tracks"]["custom"]["rows"][0]["n"] == 1


def test_collecting_again_changes_nothing(make: Make, tmp_path: Path) -> None:
    make()
    (target,) = run(tmp_path).written
    before = [(path.name, path.stat().st_mtime_ns) for path in sorted(target.iterdir())]
    done = run(tmp_path)
    assert (done.written, done.unchanged) == ([], [target])
    assert before == [(path.name, path.stat().st_mtime_ns) for path in sorted(target.iterdir())]


@pytest.mark.parametrize("name", ["curves.json", "result.json"])
def test_a_folder_that_lost_a_file_is_mended(make: Make, tmp_path: Path, name: str) -> None:
    make()
    (target,) = run(tmp_path).written
    before = (target / name).read_bytes()
    (target / name).unlink()
    assert run(tmp_path).written == [target]
    assert (target / name).read_bytes() == before


def test_names_are_fit_for_every_file_system(make: Make) -> None:
    folder = make(attack="delay:steps=5", defense="sentinel:violations=3", aggregator="median",
                  seeds__model=1, seeds__data=2, seeds__threat=3)  # fmt: skip
    ((item,), _) = read([folder])
    end = f"_s1-2-3_{digest_of(folder)[:8]}"
    assert name_of(item) == f"delay-steps-5_activation_vs_sentinel-violations-3-median{end}"
    from dataclasses import replace

    hostile = replace(item, attack="../../<b>\u202e\n" + "x" * 500, defense=".. / ..")
    assert "/" not in name_of(hostile) and len(name_of(hostile)) < 130
    assert not name_of(hostile).startswith(".")


def test_newer_code_replaces_an_older_cell(make: Make, tmp_path: Path) -> None:
    old = make("01", code="old")
    (first,) = run(tmp_path).written
    shutil.rmtree(old)
    make("02", code="new")
    done = run(tmp_path)
    assert len(done.written) == 1 and done.removed == [first.resolve()]
    assert not first.exists() and done.written[0].is_dir()


def test_an_older_cell_does_not_replace_a_newer_one(make: Make, tmp_path: Path) -> None:
    new = make("02", code="new")
    (kept,) = run(tmp_path).written
    shutil.rmtree(new)
    old = make("01", code="old")
    done = run(tmp_path)
    assert (done.written, done.removed) == ([], [])
    ((left),) = done.left_out
    assert left.run == old and not left.failed
    assert "the board has a newer cell" in left.reason and kept.name in left.reason


@pytest.mark.parametrize("first", ["valid", "invalid"])
def test_an_invalid_cell_never_stands_in_for_a_valid_one(
    make: Make, tmp_path: Path, first: str
) -> None:
    crash = log(status="error")
    valid, invalid = ("01", FOUND), ("02", crash)
    order = [valid, invalid] if first == "valid" else [invalid, valid]
    for finished, events in order:
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        make(finished, events, code=finished)
        done = run(tmp_path)
    (row,) = summarize([tmp_path / "boards"])["tracks"]["custom"]["rows"]
    assert (row["n"], row["invalid"]) == (1, [])
    if first == "valid":
        ((left),) = done.left_out
        assert left.reason.startswith("invalid (error: ") and "has a valid cell" in left.reason


def test_of_runs_of_one_cell_the_newest_that_can_be_read_is_taken(
    make: Make, tmp_path: Path
) -> None:
    make("01", code="a")
    good, bad = make("02", code="b"), make("03", code="c")
    (bad / "events.jsonl").write_text("")
    done = run(tmp_path)
    assert done.written[0].name.endswith(digest_of(good)[:8])
    reasons = {left.run: (left.failed, left.reason) for left in done.left_out}
    assert reasons.pop(bad) == (True, f"{bad / 'events.jsonl'}: is empty")
    ((failed, reason),) = reasons.values()
    assert not failed and "a run has a newer cell" in reason


def test_a_killed_run_is_left_out(make: Make, tmp_path: Path) -> None:
    make()
    killed = make(finished=" ", attack="ones")
    (killed / "result.json").unlink()
    cut(killed)
    done = run(tmp_path)
    assert [(left.run, left.reason, left.failed) for left in done.left_out] == [
        (killed, "not finished: it has no result.json", False)
    ]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda r: r["scores"].update(f1=100.0), "says otherwise than the events (scores.f1"),
        (lambda r: r["cell"].update(defense="none"), "says otherwise than the events (cell.def"),
        (lambda r: r.update(digest="0" * 64), "another digest than config.json"),
        (lambda r: r["scores"].update(f1=None), "says otherwise than the events (scores.f1"),
        (lambda r: r.pop("scores"), "scores is missing"),
    ],
)
def test_a_result_that_is_not_that_of_its_events_is_left_out(
    make: Make, tmp_path: Path, change: Any, words: str
) -> None:
    folder = make(events=log(act(5, 1, 0), ban(7, 1, 0), ban(6, 0, 0)))
    result = json.loads((folder / "result.json").read_text())
    change(result)
    (folder / "result.json").write_text(json.dumps(result))
    done = run(tmp_path)
    ((left),) = done.left_out
    assert words in left.reason and left.failed
    assert not (tmp_path / "boards").exists()


def test_a_result_of_an_older_score_is_taken_as_it_is(make: Make, tmp_path: Path) -> None:
    folder = make()
    result = json.loads((folder / "result.json").read_text())
    del result["scores"]["harm_weighted_recall"], result["cell"]["knowledge"]
    (folder / "result.json").write_text(json.dumps(result))
    (target,) = run(tmp_path).written
    assert json.loads((target / "result.json").read_text()) == result


def test_a_cell_without_curves_gets_them_and_another_name(make: Make, tmp_path: Path) -> None:
    folder = make()
    old = tmp_path / "boards" / "custom" / "results" / folder.name
    old.mkdir(parents=True)
    shutil.copy(folder / "result.json", old)
    done = run(tmp_path)
    assert done.removed == [old.resolve()] and not old.exists()
    assert (done.written[0] / "curves.json").is_file()


def test_what_else_is_in_a_replaced_folder_stays(make: Make, tmp_path: Path) -> None:
    folder = make()
    old = tmp_path / "boards" / "custom" / "results" / folder.name
    old.mkdir(parents=True)
    shutil.copy(folder / "result.json", old)
    (old / "note.txt").write_text("mine")
    run(tmp_path)
    assert files(old) == ["note.txt"]


def test_one_track_is_chosen_and_a_misspelt_one_refused(make: Make, tmp_path: Path) -> None:
    make(track="core")
    make(track="mixed", attack="ones")
    done = run(tmp_path, track="core")
    assert [path.parts[-3] for path in done.written] == ["core"] and done.left_out == []
    with pytest.raises(ConfigError, match=r"track 'croe'; did you mean core\?"):
        run(tmp_path, track="croe")


def test_folders_that_hold_no_run_are_refused(make: Make, tmp_path: Path) -> None:
    make()
    with pytest.raises(ConfigError, match="nowhere: no such folder"):
        collect([tmp_path / "nowhere"], tmp_path / "boards")
    with pytest.raises(ConfigError, match=r"holds no run, which is a folder with config\.json"):
        collect([tmp_path], tmp_path / "boards")


def test_a_failed_write_is_one_line_and_keeps_the_older_cell(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make("01", code="old")
    (first,) = run(tmp_path).written
    shutil.rmtree(old)
    make("02", code="new")

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sentinel_bench.leaderboard.collect.write_atomically", full)
    with pytest.raises(RunError, match="cannot be written: No space left on device"):
        run(tmp_path)
    assert (first / "result.json").is_file()
