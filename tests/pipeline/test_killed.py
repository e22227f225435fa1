"""A process of a run that is killed or stopped: the run ends in time, and says so."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from sentinel_bench import suite, tracks
from sentinel_bench.config import Component
from sentinel_bench.placement import Placement
from sentinel_bench.record import find_runs, read_events, read_result

STEPS, TIMEOUT, TIMES = 20, 4.0, 10
PLACEMENTS = [Placement(processes=2, timeout=TIMEOUT), Placement(processes=3, timeout=TIMEOUT)]


class Assassin:
    """A progress that does something to a worker at a step, once."""

    def __init__(self, step: int, rank: int, number: signal.Signals) -> None:
        self.step, self.rank, self.number = step, rank, number
        self.pids: list[int] = []
        self.done = 0

    def say(self, text: str) -> None: ...

    def start(self, label: str, total: int) -> None: ...

    def finish(self) -> None: ...

    def advance(self) -> None:
        self.done += 1
        if self.done == self.step:
            self.pids = sorted(p.pid or 0 for p in multiprocessing.active_children())
            os.kill(self.pids[self.rank], self.number)


def exists(pid: int) -> bool:
    """Tell whether a process is there; one that only waits to be reaped is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def run(out: Path, assassin: Assassin, placement: Placement) -> None:
    """Run a baseline and one attack."""
    train = {"steps": STEPS, "warmup_steps": 5, "eval_sequences": 8}
    threat = {"waves": 1, "honest_last": 1}
    scenario = tracks.scenario("smoke", {"train": train, "threat": threat})
    zeros, none = Component(name="zeros"), Component(name="none")
    plan = suite.make_plan([scenario], [zeros], [none], {}, unprotected=False)
    finished = suite.run(plan, out, assassin, placement=placement)
    assert [f.cell.label for f in finished] == ["none-vs-none", "zeros-vs-none"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_whoever_is_killed_or_stopped_ends_its_run_and_no_other(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Ten times each, at random steps of random ranks."""
    dice = random.Random(int(number))
    for i in range(TIMES):
        placement = PLACEMENTS[i % len(PLACEMENTS)]
        rank = dice.randrange(placement.processes)
        # the warm-up and the baseline are one run, the attack is another
        assassin = Assassin(dice.randint(2, 2 * STEPS - 6), rank, number)
        out = tmp_path / str(i)
        began = time.monotonic()
        run(out, assassin, placement)
        assert time.monotonic() - began < 60 + 10 * TIMEOUT
        assert not multiprocessing.active_children()
        assert not any(exists(pid) for pid in assassin.pids)
        rows = [read_events(folder) for folder in find_runs(out)]
        assert sorted(events[-1]["status"] for events in rows) == ["complete", "error"]
        outcomes = {
            events[-1]["status"]: (read_result(folder) or {})["scores"]["outcome"]
            for folder, events in zip(find_runs(out), rows, strict=True)
        }
        assert outcomes["error"] == "invalid"
        errors = [r["message"] for events in rows for r in events if r["type"] == "error"]
        assert len(errors) == 1
        stages = placement.stages_in_words(rank, 4)
        assert f"rank {rank} ({stages})" in errors[0], errors
