"""Cells run again: which, with what outcome, and what is written about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench import suite
from sentinel_bench.submit import check, standing, verify
from sentinel_bench.submit._entry import Numbers, Rerun, agree, level_of
from sentinel_bench.submit._verify import draw


class Quiet:
    """Progress that nobody sees."""

    def say(self, text: str) -> None: ...
    def start(self, label: str, total: int) -> None: ...
    def advance(self) -> None: ...
    def finish(self) -> None: ...


def again(entry: Path, out: Path, sample: int | None = None, seed: int = 0) -> Any:
    done, findings = verify(entry, out, Quiet(), seed=seed, sample=sample, threads=1)
    assert findings == []
    return done


def all_of(entry: Path, forge: Any) -> list[Any]:
    labels = ("none-vs-none", "none-vs-cascade", "zeros-vs-cascade", "delay-vs-cascade")
    return [forge(label) for label in labels]


def test_the_sample_follows_from_seed_and_content(entry: Path, forge: Any) -> None:
    report = check(entry)
    names = [n for n in report.records if not n.startswith("none-vs-none")]
    drawn = {seed: draw(report, seed, 1) for seed in range(20)}
    assert drawn == {seed: draw(report, seed, 1) for seed in range(20)}
    assert {name for names in drawn.values() for name in names} == set(names)
    assert sorted(draw(report, 0, None)) == sorted(names) and len(draw(report, 0, 2)) == 2
    assert sorted(draw(report, 0, 99)) == sorted(names)
    cell = forge("zeros-vs-cascade")
    cell.step(40)["grad_norm"] += 1e-9
    cell.save()
    other = check(entry)
    assert not other.findings and other.digest != report.digest
    assert {s: draw(other, s, 1) for s in range(20)} != drawn


def test_a_sample_that_agrees_makes_it_checked(entry: Path, tmp_path: Path) -> None:
    done = again(entry, tmp_path / "new", sample=1, seed=5)
    assert done.level == "checked" and done.cells == 4
    (drawn,) = draw(check(entry), 5, 1)
    assert {r.cell for r in done.reruns} == {
        drawn,
        *(n for n in check(entry).records if "none-vs-none" in n),
    }
    assert all(r.agrees and not r.differing and r.submitted == r.found for r in done.reruns)
    written = json.loads((entry / "verification.json").read_text())
    assert written == done.model_dump(mode="json", by_alias=True)
    assert check(entry).findings == []
    assert [f.rule for f in check(entry, incoming=True).findings] == ["verification"]
    assert standing(entry).level == "checked (2 of 4 cells run again)"


def test_all_that_agree_make_it_reproduced(entry: Path, reproduced: Path) -> None:
    assert standing(entry).level == "self-reported"
    assert standing(reproduced).level == "reproduced"
    assert check(reproduced).findings == []


def test_a_forgery_without_contradiction_is_found_by_running_again(
    entry: Path, forge: Any, runs: Path
) -> None:
    cell = forge("delay-vs-cascade")
    cell.of("eval")[0]["loss"] -= 0.02
    cell.save()
    assert check(entry).findings == []
    done = again(entry, runs)
    assert done.level == "self-reported"
    assert [r.cell.split("_")[0] for r in done.reruns if not r.agrees] == ["delay-vs-cascade"]
    assert check(entry).findings == [] and standing(entry).level == "self-reported"


def other_engine(entry: Path, forge: Any) -> None:
    """Make an entry that was run by other code."""
    cells = all_of(entry, forge)
    for cell in cells:
        cell.config["identity"]["engine"] = "0" * 64
        cell.save(redigested=True)
    for cell in cells:
        for row in cell.of("baseline"):
            row["digest"] = cells[0].config["digest"]
        cell.save()
        name = cell.folder.name.rpartition("_")[0]
        cell.folder.rename(cell.folder.with_name(f"{name}_{cell.config['digest'][:12]}"))


def test_other_code_is_named_and_judged_by_wider_tolerances(
    entry: Path, forge: Any, runs: Path
) -> None:
    cell = forge("delay-vs-cascade")
    cell.of("eval")[0]["loss"] -= 0.008
    cell.save()
    other_engine(entry, forge)
    assert check(entry).findings == []
    done = again(entry, runs)
    assert done.level == "reproduced"
    assert all(r.differing == ["engine"] for r in done.reruns)


def test_an_entry_with_findings_is_not_run(
    entry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "run", lambda *_, **__: pytest.fail("a run has started"))
    (entry / "plugin.py").write_text("")
    done, findings = verify(entry, tmp_path, Quiet(), seed=0, sample=1)
    assert done is None and [f.rule for f in findings] == ["file-name"]
    assert not (entry / "verification.json").exists()


def test_an_interrupted_verification_writes_nothing(
    entry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    before = sorted(p.name for p in entry.iterdir())
    monkeypatch.setattr(suite, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        again(entry, tmp_path / "new")
    assert sorted(p.name for p in entry.iterdir()) == before


@pytest.fixture(scope="module")
def reproduced(packed: Path, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An entry that is reproduced, and that nobody changes."""
    folder = Path(shutil.copytree(packed, tmp_path_factory.mktemp("reproduced") / "mine"))
    assert again(folder, runs).level == "reproduced"
    return folder


@pytest.fixture
def verified(entry: Path, reproduced: Path) -> Path:
    """A copy of it, to be changed."""
    shutil.copy(reproduced / "verification.json", entry)
    return entry


def test_a_verification_of_other_cells_counts_for_nothing(verified: Path, forge: Any) -> None:
    cell = forge("delay-vs-cascade")
    cell.step(40)["grad_norm"] += 1e-9
    cell.save()
    assert [f.what for f in check(verified).findings] == ["is of other cells than these"]
    assert standing(verified).level == "self-reported"


FORGED: dict[str, Callable[[Any], Any]] = {
    "level": lambda v: v.update(level="checked"),
    "cells": lambda v: v.update(cells=2),
    "agrees": lambda v: v["reruns"][0].update(agrees=False),
    "submitted": lambda v: v["reruns"][0]["submitted"].update(f1=1.0),
    "found": lambda v: v["reruns"][0]["found"].update(validation_loss=99.0),
    "cell": lambda v: v["reruns"][0].update(cell="../x"),
    "field": lambda v: v.update(note=1),
    "kind": lambda v: v.update(cells="4"),
    "number": lambda v: v["reruns"][0]["found"].update(validation_loss="nan"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_verification_that_contradicts_itself_is_found(name: str, verified: Path) -> None:
    path = verified / "verification.json"
    content = json.loads(path.read_text())
    FORGED[name](content)
    path.write_text(json.dumps(content))
    assert {f.rule for f in check(verified).findings} == {"verification"}


BANS = [[1, 2, 33]]


@pytest.mark.parametrize(
    "same_code, found, agrees",
    [
        (True, (100.0, 5.0, BANS), True),
        (True, (100.0, 5.0009, BANS), True),
        (True, (100.0, 5.0011, BANS), False),
        (True, (100.0, 5.0, [[1, 2, 34]]), False),
        (True, (100.0, 5.0, []), False),
        (True, (100.0, None, BANS), False),
        (False, (94.7, 5.009, [[1, 2, 34]]), True),
        (False, (93.9, 5.0, BANS), False),
        (False, (100.0, 4.98, BANS), False),
        (False, (100.0, None, BANS), False),
    ],
)
def test_tolerances_by_hand(same_code: bool, found: Any, agrees: bool) -> None:
    def numbers(f1: float, loss: float | None, bans: Any) -> Numbers:
        return Numbers(outcome="defended", f1=f1, validation_loss=loss, bans=bans)

    one, other = numbers(100.0, 5.0, BANS), numbers(*found)
    assert agree(one, other, same_code) is agrees
    assert agree(other, one, same_code) is agrees
    invalid = Numbers(outcome="invalid", f1=None, validation_loss=None, bans=[])
    assert not agree(invalid, invalid, same_code)
    lost = Numbers(outcome="broken", f1=100.0, validation_loss=None, bans=BANS)
    assert agree(lost, lost, same_code)


def test_levels_by_hand() -> None:
    number = Numbers(outcome="defended", f1=100.0, validation_loss=5.0, bans=[])

    def rerun(cell: str, agrees: bool = True) -> Rerun:
        return Rerun(
            cell=cell, code="", differing=[], submitted=number, found=number, agrees=agrees
        )

    assert level_of([], 2) == "self-reported"
    assert level_of([rerun("a")], 2) == "checked"
    assert level_of([rerun("a"), rerun("a")], 2) == "checked"
    assert level_of([rerun("a"), rerun("b")], 2) == "reproduced"
    assert level_of([rerun("a"), rerun("b", False)], 2) == "self-reported"


def test_a_link_is_not_written_through(entry: Path, runs: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (entry / "verification.json").symlink_to(victim)
    done, findings = verify(entry, runs, Quiet(), seed=0, sample=1)
    assert done is None and [f.rule for f in findings] == ["file-kind"]
    assert victim.read_text() == "precious"
