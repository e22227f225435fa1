"""Many cells over several processes: jobs, shards, what fails, and how long it will take.

    cells of a track -> entries -> those left to do -> jobs

Each job is a process that trains the warm-up of one group of cells and forks from it, one cell
after the other, as it is handed them; a second job joins a group where that pays. The cell without
attack and defense comes first, since all others are compared with it. Every cell is recorded as it
ends, so whatever ends a job loses the cell that was running, and no other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from sentinel_bench import runner, suite
from sentinel_bench.batch_worker import Work, work
from sentinel_bench.config import Cell
from sentinel_bench.errors import ConfigError, SentinelBenchError
from sentinel_bench.pipeline.crew import fork_server
from sentinel_bench.provenance import digest
from sentinel_bench.record import read_events

State = Literal["waiting", "running", "done", "reused", "failed"]

JOINS = 4
"""Cells that must be left for each job of a group before another one trains its warm-up too."""
POLL = 0.5
"""Seconds between two looks at the jobs."""
STARTING = 300.0
"""Seconds that a job has to begin: a busy machine imports slowly."""
GRACE = 20.0
"""Seconds that a job has to record the cell that it is at, when the suite is interrupted."""


@dataclass(eq=False)
class Entry:
    """A cell of a suite, and what has become of it.

    Attributes:
        group: number of the warm-up that it forks from.
        key: its identity.
        share: of its steps that are done.
        seconds: that it took, without the warm-up if that was shared.
    """

    cell: Cell
    group: int
    key: dict[str, Any]
    state: State = "waiting"
    folder: Path | None = None
    result: dict[str, Any] | None = None
    reason: str = ""
    share: float = 0.0
    seconds: float = 0.0

    @property
    def over(self) -> bool:
        """True if there is nothing left to do."""
        return self.state in ("done", "reused", "failed")


def entries_of(plan: suite.Plan, data: str, shard: tuple[int, int] = (1, 1)) -> list[Entry]:
    """Return the cells of a plan, or a shard of them.

    Shard k of n has the k-th n-th of the cells, in an order that keeps those of a group together.
    The cell without attack and defense of each of its groups is part of every shard.

    Args:
        plan: the cells.
        data: digest of the token ids.
        shard: k and n, from 1 on.
    """
    whole = [
        Entry(cell, number, runner.identity(cell, data))
        for number, (_, cells) in enumerate(plan.groups)
        for cell in cells
    ]
    others = [e for e in whole if not e.cell.is_baseline]
    k, n = shard
    own = others[len(others) * (k - 1) // n : len(others) * k // n]
    groups = {e.group for e in own} if n > 1 else {e.group for e in whole}
    return [e for e in whole if e.cell.is_baseline and e.group in groups] + own


def reuse(entries: Iterable[Entry], out: Path) -> list[str]:
    """Mark what `out` has already; return why similar runs do not count."""
    known, notes = runner.known_cells(out), []
    for entry in entries:
        folder, note = runner.find(known, entry.cell, entry.key)
        if folder is not None:
            entry.folder, entry.state, entry.share = folder, "reused", 1.0
            events = read_events(folder)
            entry.result = runner.rescored(folder, events)
            entry.seconds = runner.seconds_of(events)
        elif note:
            notes.append(note)
    return notes


def only_failed(entries: Sequence[Entry], out: Path) -> list[Entry]:
    """Return those that have failed in `out`, and what they are compared with."""
    failed = runner.failed_cells(out)
    again = [e for e in entries if not e.over and digest(e.key) in failed]
    groups = {e.group for e in again}
    base = [e for e in entries if e.cell.is_baseline and e.group in groups and e not in again]
    return base + again


def by_attack(entries: Iterable[Entry]) -> dict[str, dict[str, list[Entry]]]:
    """Return entries as a table: attack to defense to the cells of all seeds."""
    rows: dict[str, dict[str, list[Entry]]] = {}
    for entry in entries:
        row = rows.setdefault(runner.attack_of(entry.cell), {})
        row.setdefault(entry.cell.protection, []).append(entry)
    return rows


def seconds_left(entries: Iterable[Entry], jobs: int) -> float | None:
    """Return how long the rest will take, by the cells that are over; None before the first."""
    entries = list(entries)
    by_protection: dict[str, list[float]] = {}
    for entry in entries:
        if entry.over and entry.seconds > 0:
            by_protection.setdefault(entry.cell.protection, []).append(entry.seconds)
    if not by_protection:
        return None
    known = {name: fmean(seconds) for name, seconds in by_protection.items()}
    usual = fmean(known.values())
    left = [
        (1 - entry.share) * known.get(entry.cell.protection, usual)
        for entry in entries
        if not entry.over
    ]
    return sum(left) / max(1, min(jobs, len(left)))


@contextlib.contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Keep other suites out of a folder, which would run the same cells again.

    Raises:
        ConfigError: one is at work there; or the folder cannot be written.
    """
    path = out / ".suite.lock"
    try:
        file = path.open("w")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be made: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{out}: another suite is running there; wait for it, or choose another --out"
            ) from error
        yield


def run(
    entries: Sequence[Entry],
    plan: suite.Plan,
    task: Work,
    jobs: int,
    changed: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Run what is left to do over `jobs` processes; the entries say what has become of it.

    Args:
        entries: the cells; those that are over stay as they are.
        plan: they come from.
        task: where and how cells are run.
        jobs: processes at a time.
        changed: called whenever an entry may have changed, at least every half second.
        say: is told what the user should know.

    Raises:
        ConfigError: a job cannot begin with what it was given: no such device, no corpus.
        KeyboardInterrupt: after the running cells were recorded as interrupted.
    """
    _Crew(entries, plan, task, jobs, changed, say).run()


@dataclass(eq=False)
class _Job:
    """A process, and what it is at."""

    process: BaseProcess
    pipe: Connection
    group: int
    entries: list[Entry]
    current: Entry | None = None
    ready: bool = False
    dismissed: bool = False
    greeted: bool = False
    heard: float = field(default_factory=time.monotonic)
    begun: float = field(default_factory=time.time)


class _Crew:
    """The processes of a suite."""

    def __init__(
        self,
        entries: Sequence[Entry],
        plan: suite.Plan,
        task: Work,
        jobs: int,
        changed: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._entries = entries
        self._plan = plan
        self._task = task
        self._number = jobs
        self._changed = changed
        self._say = say
        self._context = fork_server(task.threads or 1)
        self._jobs: list[_Job] = []

    def run(self) -> None:
        """Run all."""
        try:
            while self._staffed():
                for job in self._jobs:
                    self._serve(job)
                pipes = {job.pipe: job for job in self._jobs}
                for pipe in wait(list(pipes), timeout=POLL):
                    self._hear(pipes[pipe])  # type: ignore[index]
                self._watch()
                self._changed()
        finally:
            self._end()

    def _waiting(self, group: int) -> list[Entry]:
        return [e for e in self._entries if e.group == group and e.state == "waiting"]

    def _baseline(self, group: int) -> Entry:
        return next(e for e in self._entries if e.group == group and e.cell.is_baseline)

    def _staffed(self) -> bool:
        """Start what jobs there may be; return False when all is done."""
        while len(self._jobs) < self._number:
            group = self._neediest()
            if group is None:
                break
            self._start(group)
        return bool(self._jobs)

    def _neediest(self) -> int | None:
        """Return the group with the most work for one more job; None where none is worth it."""
        best, most = None, 0.0
        for group in range(len(self._plan.groups)):
            there = sum(job.group == group and not job.dismissed for job in self._jobs)
            left = len(self._waiting(group))
            share = left / (there + 1)
            if left and (not there or share >= JOINS) and share > most:
                best, most = group, share
        return best

    def _start(self, group: int) -> None:
        mine, theirs = self._context.Pipe()
        entries = self._waiting(group)
        cells = [entry.cell for entry in entries]
        scenario = self._plan.groups[group][0]
        process = self._context.Process(
            target=work,
            args=(theirs, self._task, scenario, cells, dict(os.environ)),
            name=f"suite, group {group}",
        )
        process.start()
        theirs.close()  # else its end would not be seen
        self._jobs.append(_Job(process, mine, group, entries))

    def _serve(self, job: _Job) -> None:
        """Hand a job that is ready its next cell, or let it go if there is none."""
        if not job.ready:
            return
        base = self._baseline(job.group)
        left = [e for e in job.entries if e.state == "waiting"]
        if left and not base.over:
            if base.state == "running":
                return  # another job is at it, and all others are compared with it
            left = [base]
        job.ready = False
        with contextlib.suppress(OSError):  # its death is noticed by who reads
            if not left:
                job.dismissed = True
                job.pipe.send(None)
                return
            job.current = left[0]
            job.current.state, job.begun, job.heard = "running", time.time(), time.monotonic()
            job.pipe.send((job.entries.index(left[0]), base.result))

    def _hear(self, job: _Job) -> None:
        try:
            kind, value = job.pipe.recv()
        except (EOFError, OSError):
            self._bury(job)
            return
        job.heard, job.greeted = time.monotonic(), True
        if kind == "say":
            self._say(value)
        elif kind == "refused":
            raise ConfigError(value)
        elif kind == "share" and job.current is not None:
            job.current.share = value
        elif kind == "ready":
            job.ready = True
        elif kind == "over" and job.current is not None:
            self._close(job.current, time.time() - job.begun, *value)
            job.current, job.ready = None, True

    def _close(
        self, entry: Entry, seconds: float, folder: Path | None, result: dict[str, Any] | None,
        reason: str,
    ) -> None:  # fmt: skip
        entry.folder, entry.result, entry.seconds, entry.share = folder, result, seconds, 1.0
        scores = result["scores"] if result else {"outcome": "invalid", "reason": reason}
        failed = scores["outcome"] == "invalid"
        entry.state = "failed" if failed else "done"
        entry.reason = scores["reason"] or reason if failed else ""

    def _bury(self, job: _Job, why: str = "") -> None:
        """Record as failed the cell at which a process has died; others go on with the rest."""
        job.process.join(GRACE)
        self._jobs.remove(job)
        job.pipe.close()
        code = job.process.exitcode
        if job.dismissed:
            return
        reason = why or f"its process {fate(code)}"
        entry = job.current or next((e for e in job.entries if e.state == "waiting"), None)
        if entry is None:
            return
        found = None
        if job.current is not None:
            with contextlib.suppress(SentinelBenchError, OSError):  # then it stays unfinished
                found = runner.bury(self._task.out, entry.key, reason, job.begun)
        folder, result = (found.folder, found.result) if found else (None, None)
        self._close(entry, time.time() - job.begun, folder, result, reason)

    def _watch(self) -> None:
        """Give up on a job that has shown no progress for too long."""
        for job in list(self._jobs):
            limit = self._task.placement.timeout if job.greeted else STARTING
            late = time.monotonic() - job.heard > limit
            if late and not job.ready and not job.dismissed:
                job.process.kill()
                self._bury(job, f"no progress for {limit:g} s (--timeout)")

    def _end(self) -> None:
        """End all processes; each records the cell that it is at as interrupted."""
        for job in self._jobs:
            job.process.terminate()
        for job in self._jobs:
            job.process.join(GRACE)
            job.process.kill()
            job.process.join()
            job.pipe.close()
            if job.current is not None:
                job.current.state = "waiting"
        self._jobs.clear()


def fate(code: int | None) -> str:
    """Say how a process came to its end."""
    if code is None or code >= 0:
        return f"ended with exit status {code}"
    hint = " (the system does that when memory runs out)" if code == -9 else ""
    return f"was killed by signal {-code}{hint}"
