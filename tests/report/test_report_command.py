"""`sentinel-bench report`: what it writes where, and what it says when it cannot."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
from made_runs import act, ban, flag, log, tamper

from sentinel_bench.cli import main
from sentinel_bench.record import RunFolder, find_runs, read_events

Make = Callable[..., Path]
EVENTS = log(act(5, 1, 0), ban(7, 1, 0), tamper(1, 0), flag(6, 1, 0))
FIGURES = [f"{name}.{kind}" for name in ("losses", "workers", "statistics") for kind in
           ("png", "svg")]  # fmt: skip


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs `report` in an empty folder; status, stdout and stderr."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def run(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["sentinel-bench", "report", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


def written(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


PAGE = sorted(["report.html", *(f"figures/{name}" for name in FIGURES)])


def test_page_and_figures_go_into_the_run_folder(call: Callable[..., object], make: Make) -> None:
    folder = make(EVENTS)
    before = written(folder)
    assert call(folder) == (0, f"{folder / 'report.html'}\n", "")
    assert sorted({*written(folder)} - {*before}) == PAGE
    assert call(folder) == (0, f"{folder / 'report.html'}\n", "")  # over the old one
    assert find_runs(folder.parent) == [folder]


def test_out_leaves_the_run_folder_as_it_is(call: Callable[..., object], make: Make) -> None:
    folder = make(EVENTS)
    before = written(folder)
    assert call(folder, "--out", "a/b") == (0, "a/b/report.html\n", "")
    assert written(Path("a/b")) == PAGE
    assert written(folder) == before


def test_several_runs_each_have_a_folder_in_out(call: Callable[..., object], make: Make) -> None:
    one, two = make(EVENTS), make(EVENTS, attack="ones")
    assert call(one, two, one, "--out", "all") == (
        0,
        f"all/{one.name}/report.html\nall/{two.name}/report.html\n",
        "",
    )
    assert written(Path("all")) == sorted(f"{run.name}/{p}" for run in (one, two) for p in PAGE)


def test_json_names_every_file(call: Callable[..., tuple[int, str, str]], make: Make) -> None:
    folder = make(EVENTS)
    status, out, err = call(folder, "--json")
    assert (status, err) == (0, "")
    (found,) = json.loads(out)
    assert found["run"] == str(folder)
    files_ = [found["page"], *found["figures"]]
    assert sorted(str(Path(path).relative_to(folder)) for path in files_) == PAGE


def test_a_run_that_cannot_be_read_does_not_keep_the_others_from_being_written(
    call: Callable[..., tuple[int, str, str]], make: Make
) -> None:
    bad, good = make(EVENTS), make(EVENTS, attack="ones")
    (bad / "events.jsonl").write_text("")
    status, out, err = call(bad, good)
    assert (status, out) == (1, f"{good / 'report.html'}\n")
    assert err == f"error: {bad / 'events.jsonl'}: is empty\n"
    status, out, _ = call(bad, "--json")
    assert (status, json.loads(out)) == (1, [])


def test_mistakes_of_the_user_are_one_line(
    call: Callable[..., tuple[int, str, str]], make: Make
) -> None:
    folder = make(EVENTS)
    for args, words in [
        ([], "Missing argument 'RUN...'"),
        (["nowhere"], "nowhere: no run folder, it has no config.json"),
        ([folder.parent], f"name one in it, such as {folder}"),
        ([folder, "--out", folder / "config.json"], "cannot write here"),
    ]:
        status, out, err = call(*args)
        assert (status, out) == (2, ""), err
        assert words in err and err.count("\n") == 1 and "Traceback" not in err
    assert call(folder, "nowhere")[0] == 2
    assert not (folder / "report.html").exists()


def test_two_runs_of_one_name_do_not_go_to_one_place(
    call: Callable[..., tuple[int, str, str]], make: Make, tmp_path: Path
) -> None:
    folder = make(EVENTS)
    shutil.copytree(folder, tmp_path / "copy" / folder.name)
    status, out, err = call(folder, tmp_path / "copy" / folder.name, "--out", "all")
    assert (status, out) == (2, "")
    assert "two runs have the same name" in err
    assert not Path("all").exists()


def test_a_failed_write_is_an_error_and_leaves_no_part_of_a_page(
    call: Callable[..., tuple[int, str, str]], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(EVENTS)

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sentinel_bench.report._write.write_atomically", full)
    status, out, err = call(folder)
    assert (status, out) == (1, "")
    assert err == f"error: {folder}: cannot write the report: No space left on device\n"
    assert not (folder / "report.html").exists()


def test_a_run_of_this_very_moment_can_be_looked_at(
    call: Callable[..., tuple[int, str, str]], make: Make
) -> None:
    done = make(EVENTS)
    config = json.loads((done / "config.json").read_text())
    del config["digest"]
    with RunFolder.create(done.parent, "going-on", config) as folder:
        for row in read_events(done)[:6]:
            folder.append(row.pop("type"), **row)
        status, out, _ = call(folder.path)
        assert (status, out) == (0, f"{folder.path / 'report.html'}\n")
        assert "the run is still going on" in (folder.path / "report.html").read_text()


def test_torch_and_matplotlib_are_not_loaded_before_they_are_needed() -> None:
    import subprocess

    code = (
        "import sys, sentinel_bench.cli, sentinel_bench.report\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'matplotlib', 'jinja2')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_template_is_installed() -> None:
    root = Path(__file__).parents[2]
    names = {path.name for path in (files("sentinel_bench.report") / "templates").iterdir()}
    assert names == {"page.html", "style.css", "explore.js"}
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "sentinel_bench.report" in settings["packages"]
    assert settings["package-data"]["sentinel_bench.report"] == ["templates/*"]
