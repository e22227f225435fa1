"""What is packed: the complete set of a track, of one code, all of it or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench import tracks
from sentinel_bench.config import Component
from sentinel_bench.errors import ConfigError
from sentinel_bench.provenance import digest
from sentinel_bench.submit import check, pack
from sentinel_bench.submit._cells import complete, packages_of


@pytest.fixture
def some(runs: Path, tmp_path: Path) -> Path:
    """A copy of the runs, to be changed."""
    return Path(shutil.copytree(runs, tmp_path / "runs"))


@pytest.fixture
def run_of(some: Path) -> Callable[[str], Path]:
    """Return a function that gives the run folder of a cell."""

    def find(label: str) -> Path:
        (folder,) = some.glob(f"*_{label}_*")
        return folder

    return find


def told(done: Any) -> list[tuple[str, str]]:
    return [(found.rule, found.what) for found in done.complaints]


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if not p.is_dir()}


def test_equal_runs_give_equal_bytes(runs: Path, packed: Path, tmp_path: Path, about: Any) -> None:
    moved = Path(shutil.copytree(runs, tmp_path / "elsewhere"))
    done = pack([*moved.iterdir()][::-1], "smoke", "mine", tmp_path, about=about)
    assert done.folder == tmp_path / "smoke" / "mine"
    assert content(done.folder) == content(packed)
    assert len(content(packed)) == 4 * 3 + 1


def test_runs_of_other_cells_are_left_out_and_said(runs: Path, tmp_path: Path, about: Any) -> None:
    done = pack([runs], "smoke", "mine", tmp_path, about=about)
    assert sorted(p.name.split("_")[1] for p in done.left_out) == ["delay-vs-none", "zeros-vs-none"]
    assert done.findings == [] and done.complaints == []


def test_an_attack_can_be_packed(runs: Path, tmp_path: Path, about: Any) -> None:
    folders = [p for p in runs.iterdir() if "delay" not in p.name]
    done = pack(folders, "smoke", "zeros", tmp_path, kind="attack", about=about)
    assert done.complaints == [] and done.findings == []
    report = check(tmp_path / "smoke" / "zeros")
    assert {str(r.key) for r in report.records.values()} == {
        "none against none, seed 0",
        "zeros (activation) against none, seed 0",
        "zeros (activation) against cascade, seed 0",
    }


def test_what_is_not_filled_in_is_found_and_written_all_the_same(
    runs: Path, tmp_path: Path, about: Any
) -> None:
    done = pack([runs], "smoke", "mine", tmp_path)
    assert done.folder is not None
    assert [f.place for f in done.findings] == [f"entry.yaml: {key}" for key in sorted(about)]


def test_missing_cells_are_listed_one_by_one(run_of: Any, some: Path, tmp_path: Path) -> None:
    shutil.rmtree(run_of("zeros-vs-cascade"))
    shutil.rmtree(run_of("none-vs-none"))
    done = pack([some], "smoke", "mine", tmp_path)
    assert told(done) == [
        ("cell-missing", "none against none, seed 0"),
        ("cell-missing", "zeros (activation) against cascade, seed 0"),
    ]
    assert done.folder is None and not (tmp_path / "smoke").exists()


def change_config(folder: Path, change: Callable[[Any], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    config["digest"] = digest(config["identity"])
    (folder / "config.json").write_text(json.dumps(config))


def test_other_settings_are_named(run_of: Any, some: Path, tmp_path: Path) -> None:
    def change(config: Any) -> None:
        for tree in (config["cell"], config["identity"]):
            tree["scenario"]["train"] |= {"lr": 0.5, "batch_size": 2}

    change_config(run_of("zeros-vs-cascade"), change)
    done = pack([some], "smoke", "mine", tmp_path)
    (settings, missing) = done.complaints
    assert settings.rule == "settings" and settings.place.endswith(run_of("zeros-vs-cascade").name)
    assert settings.what == (
        "train.batch_size is 2, and 1 in the track; train.lr is 0.5, and 0.0015 in the track"
    )
    assert missing.rule == "cell-missing"


def test_a_failed_run_is_told_and_its_valid_twin_taken(
    run_of: Any, some: Path, tmp_path: Path, about: Any
) -> None:
    good = run_of("zeros-vs-cascade")
    bad = shutil.copytree(good, some / "29991231T000000Z_zeros-vs-cascade_ffffff")
    with (bad / "events.jsonl").open("a") as file:
        file.write('{"type": "error", "party": "host", "message": "no memory"}\n')
    assert pack([some], "smoke", "mine", tmp_path, about=about).complaints == []
    shutil.rmtree(good)
    done = pack([some], "smoke", "other", tmp_path)
    assert [f.rule for f in done.complaints] == ["cell-invalid"]
    assert done.complaints[0].what.endswith("seed 0: host: no memory")


def test_unfinished_and_broken_runs_are_told_if_their_cells_are_missing(
    run_of: Any, some: Path, tmp_path: Path, about: Any
) -> None:
    for label in ("zeros-vs-cascade", "delay-vs-cascade"):
        shutil.copytree(run_of(label), some / f"29991231T000000Z_{label}_ffffff")
    (some / "29991231T000000Z_zeros-vs-cascade_ffffff" / "result.json").unlink()
    (some / "29991231T000000Z_delay-vs-cascade_ffffff" / "events.jsonl").write_bytes(b"\xff\n{}\n")
    assert pack([some], "smoke", "mine", tmp_path, about=about).complaints == []
    for path in some.glob("2[0-8]*-vs-cascade_*"):
        if "none" not in path.name:
            shutil.rmtree(path)
    rules = [f.rule for f in pack([some], "smoke", "other", tmp_path).complaints]
    assert sorted(rules) == ["cell-invalid", "cell-invalid", "cell-missing", "cell-missing"]


@pytest.mark.parametrize("key", ["engine", "data"])
def test_mixed_code_is_told(key: str, run_of: Any, some: Path, tmp_path: Path) -> None:
    change_config(run_of("zeros-vs-cascade"), lambda c: c["identity"].update({key: "0" * 64}))
    (found,) = pack([some], "smoke", "mine", tmp_path).complaints
    assert found.rule == "code" and found.what.startswith(f"{key} is ")


def test_an_entry_that_is_there_is_not_written_over(runs: Path, tmp_path: Path) -> None:
    target = tmp_path / "smoke" / "mine"
    target.mkdir(parents=True)
    assert pack([runs], "smoke", "mine", tmp_path).folder == target
    before = content(target)
    with pytest.raises(ConfigError, match="is there already"):
        pack([runs], "smoke", "mine", tmp_path)
    assert content(target) == before
    (tmp_path / "smoke" / "file").write_text("x")
    (tmp_path / "smoke" / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match="is there already"):
            pack([runs], "smoke", name, tmp_path)


def test_a_crash_leaves_nothing_behind(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sentinel_bench.submit._pack.check", crash)
    with pytest.raises(KeyboardInterrupt):
        pack([runs], "smoke", "mine", tmp_path)
    assert [*(tmp_path / "smoke").iterdir()] == []


@pytest.mark.parametrize("name", ["", "A", "a b", "../x", "results", "-x", "x" * 65, "é", "a.b"])
def test_names_are_small(name: str, runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--name"):
        pack([runs], "smoke", name, tmp_path)


def test_runs_that_cannot_be_an_entry_are_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown track 'smok'; did you mean smoke"):
        pack([runs], "smok", "mine", tmp_path)
    with pytest.raises(ConfigError, match="holds no run"):
        pack([tmp_path], "smoke", "mine", tmp_path)
    with pytest.raises(ConfigError, match="several attacks: delay:steps=20, zeros"):
        pack([runs], "smoke", "mine", tmp_path, kind="attack")
    bare = [p for p in runs.iterdir() if p.name.endswith("none") or "vs-none" in p.name]
    with pytest.raises(ConfigError, match="of no defense"):
        pack(bare, "smoke", "mine", tmp_path)


def test_complete_sets_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    track = tracks.Track(
        summary="",
        attacks=["none", "zeros", "label-flip"],
        modes=["activation", "gradient"],
        seeds=[0, 5],
        defenses={"sentinel": {}},
    )
    benchmark = tracks.Benchmark(tracks={"t": track})
    monkeypatch.setattr(tracks, "load", lambda: benchmark)
    seed_0 = [
        "none against none",
        "none against d",
        "zeros (activation) against d",
        "zeros (gradient) against d",
        "label-flip (update) against d",
    ]
    both = [f"{key}, seed {seed}" for seed in (0, 5) for key in seed_0]
    assert [str(k) for k in complete("t", "defense", "d")] == both
    found = [str(k) for k in complete("t", "attack", "a", on_weights=True)]
    assert found[:4] == [
        "none against none, seed 0",
        "a (update) against none, seed 0",
        "a (update) against sentinel, seed 0",
        f"a (update) against {tracks.DEFENSE}, seed 0",
    ]
    assert len(complete("t", "attack", "a")) == 2 * (1 + 2 * 3)


def test_the_package_of_a_plugin_is_in_its_name() -> None:
    assert packages_of("cascade:k=1 + krum") == ["sentinel-bench"]
    assert packages_of("none + lab/rule:f=1") == ["lab"]
    assert packages_of("a/x:k=b/c + b/y") == ["a", "b"]
    assert Component.parse("a/x:k=b/c").name == "a/x"
