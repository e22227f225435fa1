"""Suites: which cells there are, shards, what is left to do, one suite in a folder at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench import batch, suite
from sentinel_bench.batch import Entry, entries_of, fate, seconds_left
from sentinel_bench.config import Component, Scenario
from sentinel_bench.errors import ConfigError
from sentinel_bench.record import RunFolder, find_runs, read_events, read_result
from sentinel_bench.runner import bury, failed_cells, title

Make = Callable[..., Scenario]


def parse(*texts: str) -> list[Component]:
    return [Component.parse(text) for text in texts]


def plan(
    scenario: Scenario,
    attacks: tuple[str, ...] = ("none", "zeros", "update-sign-flip"),
    defenses: tuple[str, ...] = ("averaging",),
    seeds: tuple[int, ...] = (0, 1),
    modes: Any = ("activation", "gradient"),
) -> suite.Plan:
    return suite.plan_track(scenario, modes, seeds, parse(*attacks), parse(*defenses), {})


def names(plan: suite.Plan) -> list[str]:
    return [title(cell) for cell in plan.cells]


def entries(make_scenario: Make, **options: Any) -> list[Entry]:
    return entries_of(plan(make_scenario(), **options), "data")


# Which cells.


def test_a_track_has_each_attack_in_each_mode_with_and_without_defense_each_once(
    make_scenario: Make,
) -> None:
    found = plan(make_scenario(), seeds=(3,))
    assert names(found) == [
        "seed 3: none vs none",
        "seed 3: none vs averaging",
        "seed 3: zeros vs none",
        "seed 3: zeros vs averaging",
        "seed 3: update-sign-flip vs none",  # has no mode
        "seed 3: update-sign-flip vs averaging",
        "seed 3: zeros (gradient) vs none",
        "seed 3: zeros (gradient) vs averaging",
    ]
    assert len(found.groups) == 1


def test_seeds_do_not_share_a_warm_up_and_modes_and_schedules_do(make_scenario: Make) -> None:
    found = plan(make_scenario(), seeds=(0, 1))
    assert len(found.groups) == 2
    late = make_scenario(threat__schedule="at-once", threat__fraction=0.3)
    both = suite.Plan([*plan(make_scenario()).groups, *plan(late).groups])
    merged = suite.share_warmups(both)
    assert len(merged.groups) == 2
    assert sorted(map(title, merged.cells)) == sorted(
        [*names(found), *(n for n in names(found) if ": none" not in n)]
    )
    other = suite.Plan([*plan(make_scenario()).groups, *plan(make_scenario(train__lr=1)).groups])
    assert len(suite.share_warmups(other).groups) == 4


@pytest.mark.parametrize("n", [1, 2, 3, 7, 50])
def test_shards_have_every_cell_once_and_the_baselines_of_their_groups(
    make_scenario: Make, n: int
) -> None:
    whole = plan(make_scenario())
    shards = [entries_of(whole, "data", (k, n)) for k in range(1, n + 1)]
    for shard in shards:
        bases = {e.group for e in shard if e.cell.is_baseline}
        assert {e.group for e in shard} == bases
        assert sum(e.cell.is_baseline for e in shard) == len(bases)
    own = [title(e.cell) for shard in shards for e in shard if not e.cell.is_baseline]
    assert own == [title(c) for c in whole.cells if not c.is_baseline]


# How long.


def test_the_time_left_is_that_of_each_protection_over_the_jobs(make_scenario: Make) -> None:
    some = entries(make_scenario, attacks=("none", "zeros"), seeds=(0,), modes=("activation",))
    assert [e.cell.label for e in some] == [
        "none-vs-none", "none-vs-averaging", "zeros-vs-none", "zeros-vs-averaging",
    ]  # fmt: skip
    assert seconds_left(some, 2) is None
    some[0].state, some[0].seconds = "done", 10.0
    # averaging is not known: the mean of what is
    assert seconds_left(some, 1) == 30.0
    some[1].state, some[1].seconds = "reused", 30.0
    assert seconds_left(some, 1) == 10.0 + 30.0
    assert seconds_left(some, 2) == 20.0
    assert seconds_left(some, 9) == 20.0  # two cells are left: nine jobs are no faster than two
    some[3].state, some[3].share = "running", 0.5
    assert seconds_left(some, 1) == 10.0 + 15.0
    for entry in some:
        entry.state = "failed"
    assert seconds_left(some, 1) == 0.0


def test_how_a_process_ended_is_said() -> None:
    assert fate(-9) == "was killed by signal 9 (the system does that when memory runs out)"
    assert fate(-15) == "was killed by signal 15"
    assert fate(3) == "ended with exit status 3"


# One folder.


def test_one_suite_at_a_time_in_a_folder(tmp_path: Path) -> None:
    with batch.alone_in(tmp_path):
        with (
            pytest.raises(ConfigError, match="another suite is running there"),
            batch.alone_in(tmp_path),
        ):
            pass
        other = tmp_path / "other"
        other.mkdir()
        with batch.alone_in(other):
            pass
    with batch.alone_in(tmp_path):  # free again, though its file is still there
        pass


def record(out: Path, entry: Entry, *rows: tuple[str, dict[str, Any]]) -> Path:
    config = {"identity": entry.key, "cell": entry.cell.model_dump(mode="json"), "commands": []}
    with RunFolder.create(out, entry.cell.label, config) as folder:
        for kind, fields in rows:
            folder.append(kind, **fields)
        return folder.path


START = {
    "time": "2026-01-01T00:00:00+00:00", "stages": 4, "replicas": 4, "steps": 12, "warmup_steps": 4,
    "tokens_per_step": 32, "attackers": [], "state_bytes": 0,
}  # fmt: skip


def test_the_cell_of_a_dead_process_is_recorded_as_invalid_with_the_reason(
    make_scenario: Make, tmp_path: Path
) -> None:
    entry, other, *_ = entries(make_scenario)
    since = time.time() - 5
    path = record(tmp_path, entry, ("start", START))
    with (path / "events.jsonl").open("a") as file:
        file.write('{"type": "step", "st')  # killed while it wrote
    record(tmp_path, other, ("start", START))
    found = bury(tmp_path, entry.key, "its process was killed", since)
    assert found is not None
    assert found.folder == path
    result = read_result(path)
    assert result == found.result
    assert result["scores"]["outcome"] == "invalid"
    assert "its process was killed" in result["scores"]["reason"]
    assert [row["type"] for row in read_events(path)] == ["start", "error", "end"]
    assert read_result(find_runs(tmp_path)[-1]) is None or find_runs(tmp_path)[-1] == path


def test_what_an_earlier_suite_left_unfinished_is_not_taken_for_it(
    make_scenario: Make, tmp_path: Path
) -> None:
    entry = entries(make_scenario)[0]
    path = record(tmp_path, entry, ("start", START))
    os.utime(path, (1, 1))
    assert bury(tmp_path, entry.key, "killed", time.time() - 5) is None
    assert read_result(path) is None


def test_only_cells_whose_newest_run_has_failed_count_as_failed(
    make_scenario: Make, tmp_path: Path
) -> None:
    some = entries(make_scenario, seeds=(0,))
    base, cell = some[0], some[2]
    since = time.time() - 5
    record(tmp_path, cell, ("start", START))
    bury(tmp_path, cell.key, "killed", since)
    assert list(failed_cells(tmp_path).values()) == ["host: killed"]
    again = batch.only_failed(some, tmp_path)
    assert again == [base, cell]  # with what it is compared with
    path = record(tmp_path, cell, ("start", START))
    path = path.rename(path.with_name("29991231T000000Z_later_000000"))
    (path / "result.json").write_text('{"scores": {"outcome": "defended"}}')
    assert failed_cells(tmp_path) == {}
    assert batch.only_failed(some, tmp_path) == []
    (path / "result.json").write_text("{")  # not readable: the run before counts
    assert len(failed_cells(tmp_path)) == 1
