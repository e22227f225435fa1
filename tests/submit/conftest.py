"""Runs of the smoke track, made once, an entry packed from them, and ways to forge a copy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench import suite, tracks
from sentinel_bench.config import Component, merge
from sentinel_bench.provenance import digest
from sentinel_bench.record import decode
from sentinel_bench.score import result
from sentinel_bench.submit import pack
from sentinel_bench.submit._pack import compact
from sentinel_bench.submit._strict import read_rows

ABOUT = {"what": "x", "who": "A. Author", "contact": "a@b.org", "paper": "none", "licence": "MIT"}


class Quiet:
    """Progress that nobody sees."""

    def say(self, text: str) -> None: ...
    def start(self, label: str, total: int) -> None: ...
    def advance(self) -> None: ...
    def finish(self) -> None: ...


@pytest.fixture(scope="session")
def quiet() -> Quiet:
    """Progress that nobody sees."""
    return Quiet()


@pytest.fixture(scope="session")
def about() -> dict[str, str]:
    """What a submitter fills in."""
    return ABOUT


@pytest.fixture(scope="session")
def benchmark(text_file: Path) -> tracks.Benchmark:
    """The smoke track with a corpus and a model that take no time."""
    smoke = tracks.get("smoke")
    changes = {
        "data": {"path": str(text_file), "vocab_size": 260},
        "model": {"hidden_size": 16, "intermediate_size": 32},
        "train": {"batch_size": 1, "seq_len": 8, "eval_sequences": 8},
    }
    tiny = smoke.model_copy(update={"scenario": merge(smoke.scenario, changes)})
    return tracks.Benchmark(tracks={"smoke": tiny})


@pytest.fixture(scope="module", autouse=True)
def _tiny_track(benchmark: tracks.Benchmark) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracks, "load", lambda: benchmark)
        yield


@pytest.fixture(scope="session")
def runs(benchmark: tracks.Benchmark, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs of all attacks of the track, without and with a defense."""
    out = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracks, "load", lambda: benchmark)
        attacks = [Component.parse(text) for text in tracks.get("smoke").attacks]
        scenario = tracks.scenario("smoke", {})
        plan = suite.make_plan([scenario], attacks, [Component(name="cascade")], {})
        assert all(done.valid for done in suite.run(plan, out, Quiet(), threads=1))
    return out


@pytest.fixture(scope="session")
def packed(
    runs: Path, benchmark: tracks.Benchmark, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An entry that nobody changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracks, "load", lambda: benchmark)
        done = pack([runs], "smoke", "mine", tmp_path_factory.mktemp("boards"), about=ABOUT)
    assert done.folder is not None, done.complaints
    return done.folder


@pytest.fixture
def entry(packed: Path, tmp_path: Path) -> Path:
    """A copy of the entry, to be changed."""
    return Path(shutil.copytree(packed, tmp_path / "mine"))


@dataclass
class Forged:
    """The content of a cell of an entry: change it, then `save`."""

    folder: Path
    config: dict[str, Any] = field(init=False)
    result: dict[str, Any] = field(init=False)
    events: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.config = json.loads((self.folder / "config.json").read_text())
        self.result = json.loads((self.folder / "result.json").read_text())
        rows, _ = read_rows((self.folder / "events.jsonl.gz").read_bytes(), 10**8)
        self.events = [decode(row) for row in rows]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind."""
        return [row for row in self.events if row["type"] == kind]

    def step(self, number: int) -> dict[str, Any]:
        """Return the row of a step."""
        return self.of("step")[number]

    def save(self, *, rescored: bool = True, redigested: bool = False) -> None:
        """Write it back, with all that follows from it made to fit."""
        if redigested:
            self.config["digest"] = digest(self.config["identity"])
        if rescored:
            self.result = result(self.config, self.events, self.result["provenance"])
        (self.folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        (self.folder / "result.json").write_text(json.dumps(self.result, indent=2) + "\n")
        (self.folder / "events.jsonl.gz").write_bytes(compact(self.events))


@pytest.fixture
def opened_cell() -> Callable[[Path], Forged]:
    """Return a function that opens the folder of a cell."""
    return Forged


@pytest.fixture
def forge(entry: Path) -> Callable[[str], Forged]:
    """Return a function that opens a cell of the entry by the beginning of its name."""

    def open_cell(label: str) -> Forged:
        (folder,) = (entry / "cells").glob(f"{label}_*")
        return Forged(folder)

    return open_cell


@pytest.fixture
def call(
    command_line: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Any]:
    """Return a function that runs `sentinel-bench submit` in an empty folder, in this process."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return partial(command_line, "submit")
