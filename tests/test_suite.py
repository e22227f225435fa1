"""Cells to run folders: identity, resume, interruption, full disks, runs side by side."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench import suite
from sentinel_bench.api import Attack, AttackContext, NoParams
from sentinel_bench.config import Component, Scenario
from sentinel_bench.errors import ConfigError, RunError
from sentinel_bench.record import RunFolder, find_finished, find_runs, read_events, read_result
from sentinel_bench.score import rescore

Make = Callable[..., Scenario]
NO_CLOCK = ("time", "seconds", "tokens_per_second")


class Crash(Attack[NoParams]):
    name = "crash"
    goal = formula = source = "test"

    def signal(self, x: Any, ctx: AttackContext) -> Any:
        raise RuntimeError("crashed")


class Spy:
    """Keeps what is said; `on_advance` is called at every step with their number."""

    def __init__(self, on_advance: Callable[[int], None] = lambda n: None) -> None:
        self.said: list[str] = []
        self.steps = 0
        self._on_advance = on_advance

    def say(self, text: str) -> None:
        self.said.append(text)

    def start(self, label: str, total: int) -> None: ...

    def advance(self) -> None:
        self.steps += 1
        self._on_advance(self.steps)

    def finish(self) -> None: ...


def parse(*texts: str) -> list[Component]:
    return [Component.parse(text) for text in texts]


def plan(
    scenario: Scenario,
    attacks: Iterable[str] = ("zeros",),
    defenses: Iterable[str] = ("averaging",),
) -> suite.Plan:
    return suite.make_plan([scenario], parse(*attacks), parse(*defenses), {})


def run(
    plan: suite.Plan, out: Path, spy: Spy | None = None, **options: Any
) -> list[suite.Finished]:
    return suite.run(plan, out, spy or Spy(), threads=1, **options)


def timeless(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in NO_CLOCK} for row in read_events(folder)]


# The plan.


def test_each_attack_is_run_without_and_with_each_defense_after_the_baseline(
    make_scenario: Make,
) -> None:
    cells = plan(make_scenario(), ["zeros", "delay:steps=2"], ["sentinel", "averaging"]).cells
    assert [c.label for c in cells] == [
        "none-vs-none",
        *["zeros-vs-none", "zeros-vs-sentinel", "zeros-vs-averaging"],
        *["delay-vs-none", "delay-vs-sentinel", "delay-vs-averaging"],
    ]
    both = plan(make_scenario(), ["none", "zeros"], ["none", "sentinel"]).cells
    assert [c.label for c in both] == [
        *["none-vs-none", "none-vs-sentinel", "zeros-vs-none", "zeros-vs-sentinel"]
    ]


def test_seeds_are_used_for_model_data_and_threat_alike(make_scenario: Make) -> None:
    seeds = [s.seeds.model_dump() for s in suite.with_seeds(make_scenario(), [3, 5])]
    assert seeds == [dict.fromkeys(("model", "data", "threat"), s) for s in (3, 5)]


def test_all_that_is_wrong_is_told_at_once_before_anything_runs(make_scenario: Make) -> None:
    scenario = make_scenario(threat__fraction=0.75, model__layers=3)
    with pytest.raises(ConfigError) as caught:
        plan(scenario, ["zeroes", "delay:step=1"], ["sentinal"])
    message = str(caught.value)
    for part in ("did you mean zeros", "did you mean steps", "did you mean sentinel"):
        assert part in message
    assert "3 of 4 replicas of a stage would be malicious" in message
    assert "4 stages are more than the 3 layers" in message


# Runs.


def test_a_run_leaves_folders_that_can_be_scored_again(make_scenario: Make, tmp_path: Path) -> None:
    done = run(plan(make_scenario()), tmp_path, commands=["sentinel-bench run"])
    assert {f.folder for f in done} == set(find_runs(tmp_path))
    for finished in done:
        assert finished.valid
        assert rescore(finished.folder) == (finished.result["scores"], [])
        assert read_result(finished.folder) == finished.result
        assert finished.result["commands"] == ["sentinel-bench run"]
        assert finished.result["cell"]["track"] == "custom"
        assert finished.result["provenance"]["threads"] == 1
    rows = [row for f in done[1:] for row in read_events(f.folder) if row["type"] == "baseline"]
    assert [row["digest"] for row in rows] == [done[0].result["digest"]] * 2
    assert {row["validation_loss"] for row in rows} == {done[0].result["scores"]["validation_loss"]}


def test_resume_takes_what_is_equal_and_says_so(make_scenario: Make, tmp_path: Path) -> None:
    first = run(plan(make_scenario()), tmp_path)
    spy = Spy()
    again = run(plan(make_scenario()), tmp_path, spy, resume=True)
    assert spy.steps == 0
    assert [(f.folder, f.reused, f.result) for f in again] == [
        (f.folder, True, f.result) for f in first
    ]
    said = [line for line in spy.said if "reused" in line]
    assert [line.split(": ")[-1] for line in said] == [f"reused {f.folder}" for f in first]
    more = run(plan(make_scenario(), ["zeros", "ones"]), tmp_path, resume=True)
    assert [f.reused for f in more] == [True, True, True, False, False]
    baseline = next(r for r in read_events(more[3].folder) if r["type"] == "baseline")
    assert baseline["digest"] == first[0].result["digest"]
    spy = Spy()
    changed = run(plan(make_scenario(train__lr=1e-4)), tmp_path, spy, resume=True)
    assert not any(f.reused for f in changed)
    named = [line for line in spy.said if "not reused" in line]
    assert len(named) == len(changed)
    assert all(line.endswith("differs in scenario.train.lr") for line in named)
    threat = run(plan(make_scenario(seeds__threat=1)), tmp_path, resume=True)
    assert [f.reused for f in threat] == [True, False, False]


def test_without_resume_everything_is_run(make_scenario: Make, tmp_path: Path) -> None:
    for _ in range(2):
        assert not any(f.reused for f in run(plan(make_scenario(), ["none"], ["none"]), tmp_path))
    assert len(find_runs(tmp_path)) == 2


def test_an_invalid_cell_is_run_again(
    make_scenario: Make, tmp_path: Path, plug: Callable[..., None]
) -> None:
    plug(Crash)
    for resume in (False, True):
        done = run(plan(make_scenario(), ["crash"], ["none"]), tmp_path, resume=resume)
        assert [f.reused for f in done] == [resume, False]
        assert done[1].result["scores"]["reason"].startswith("attack: attack crash")


@pytest.mark.parametrize("at", [2, 6, 14])
def test_an_interrupted_cell_is_recorded_and_run_again(
    make_scenario: Make, tmp_path: Path, at: int
) -> None:
    """Steps 1 to 4 are the warm-up, 5 to 12 the baseline, 13 to 20 the next cell."""

    def interrupt(n: int) -> None:
        if n == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan(make_scenario()), tmp_path, Spy(interrupt))
    folders = find_runs(tmp_path)
    last = next(f for f in folders if read_events(f)[-1]["status"] == "interrupted")
    assert len(folders) == (2 if at == 14 else 1)
    result = read_result(last)
    assert result is not None
    assert result["scores"]["outcome"] == "invalid"
    assert result["scores"]["reason"].startswith("interrupted")
    assert last not in find_finished(tmp_path).values()
    done = run(plan(make_scenario()), tmp_path, resume=True)
    assert [f.reused for f in done] == [at == 14, False, False]
    for finished, fresh in zip(done, run(plan(make_scenario()), tmp_path), strict=True):
        assert timeless(finished.folder) == timeless(fresh.folder)


class FullDisk:
    """An event file on a disk that takes `left` more rows."""

    def __init__(self, file: Any, left: int, back: bool) -> None:
        self._file, self._left, self._back = file, left, back

    def write(self, data: Any) -> int:
        self._left -= 1
        if self._left < 0 and not (self._back and self._left < -1):
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("back", [False, True])
def test_a_full_disk_ends_the_run_or_makes_the_cell_invalid(
    make_scenario: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    make = RunFolder.__init__

    def init(self: RunFolder, path: Path, digest: str) -> None:
        make(self, path, digest)
        self._events = FullDisk(self._events, 7, back)  # type: ignore[assignment]

    monkeypatch.setattr(RunFolder, "__init__", init)
    if back:
        (only,) = run(plan(make_scenario(), ["none"], ["none"]), tmp_path)
        assert only.result["scores"]["outcome"] == "invalid"
        assert only.result["scores"]["reason"].startswith("host: ")
    else:
        with pytest.raises(RunError, match="no space left on device") as caught:
            run(plan(make_scenario()), tmp_path)
        assert caught.value.exit_code == 1
    assert not find_finished(tmp_path)


def test_two_runs_in_one_folder_at_once_do_not_mix(make_scenario: Make, tmp_path: Path) -> None:
    inner: list[suite.Finished] = []

    def run_another(n: int) -> None:
        if n == 6:  # in the middle of a cell
            inner.extend(run(plan(make_scenario(seeds__data=1)), tmp_path / "both"))

    outer = run(plan(make_scenario()), tmp_path / "both", Spy(run_another))
    assert len({f.folder for f in inner + outer}) == len(find_runs(tmp_path / "both")) == 6
    for finished in inner + outer:
        assert finished.valid
        assert rescore(finished.folder)[1] == []
    for name, group, seed in (("inner", inner, 1), ("outer", outer, 0)):
        alone = run(plan(make_scenario(seeds__data=seed)), tmp_path / name)
        assert [timeless(f.folder) for f in group] == [timeless(f.folder) for f in alone]


def test_a_diverged_baseline_makes_its_cells_invalid(
    make_scenario: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sentinel_bench.pipeline.train.Trainer.evaluate", lambda self: (float("nan"), 64)
    )
    done = run(plan(make_scenario()), tmp_path)
    assert [f.result["scores"]["outcome"] for f in done] == ["broken", "invalid", "invalid"]
    assert done[1].result["scores"]["reason"].startswith("baseline")


def test_a_corpus_shorter_than_a_sequence_is_told_before_a_folder_is_made(
    make_scenario: Make, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"seq_len 100000 needs at least 100,001"):
        run(plan(make_scenario(train__seq_len=100_000)), tmp_path)
    assert not find_runs(tmp_path)
