"""What became of each worker: honest or not, acted or not, banned or not, as `score` counts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sentinel_bench.report._read import Run
from sentinel_bench.score import acts_and_bans
from sentinel_bench.soundness import Row, Worker, planned, worker_of


@dataclass(frozen=True)
class State:
    """What became of a worker.

    Attributes:
        key: for templates.
        letter: what stands in its cell of the grid, beside the colour.
        words: for legends.
        color, ink: of the cell and of its letter.
    """

    key: str
    letter: str
    words: str
    color: str
    ink: str


HONEST = State("honest", "", "honest", "#f1f1ee", "#222222")
FALSE_BAN = State("false-ban", "F", "honest, banned", "#e69f00", "#000000")
DETECTED = State("detected", "D", "attacker, acted and banned", "#0072b2", "#ffffff")
MISSED = State("missed", "M", "attacker, acted, not banned", "#d55e00", "#000000")
IDLE = State("idle", "N", "attacker, never acted", "#ffffff", "#222222")
EARLY = State("early", "E", "attacker, banned before it acted", "#cc79a7", "#000000")
STATES = (HONEST, FALSE_BAN, DETECTED, MISSED, IDLE, EARLY)
"""Colours of Okabe and Ito, which the colour-blind can tell apart."""


@dataclass(frozen=True)
class Fate:
    """One worker, and what the record says about it.

    Attributes:
        worker: stage and replica.
        attacker: its row of the ground truth, if it is malicious.
        acted, banned: steps, if it did and was.
        flags: direction to number.
        tamper: how many signals it corrupted, and how far, if the run came to its end.
    """

    worker: Worker
    state: State
    attacker: Row | None
    acted: int | None
    banned: int | None
    reason: str
    flags: Counter[str]
    tamper: Row | None

    @property
    def delay(self) -> int | None:
        """Steps from its first corrupted signal to its ban, inclusive."""
        if self.state is not DETECTED or self.banned is None or self.acted is None:
            return None
        return self.banned - self.acted + 1

    @property
    def total(self) -> int:
        """Number of flags."""
        return self.flags.total()

    @property
    def notable(self) -> bool:
        """True if it is more than an honest worker that is left alone."""
        return self.state is not HONEST

    @property
    def name(self) -> str:
        """Stage and replica in words."""
        return f"stage {self.worker[0]}, replica {self.worker[1]}"


@dataclass(frozen=True)
class Grid:
    """All workers of a run.

    Attributes:
        stages, replicas: shape of the grid.
        fates: of all that something happened to; the others are honest and were left alone.
    """

    stages: int
    replicas: int
    fates: dict[Worker, Fate]

    def of(self, worker: Worker) -> Fate:
        """Return what became of a worker."""
        return self.fates.get(worker) or Fate(worker, HONEST, None, None, None, "", Counter(), None)

    def count(self, *states: State) -> int:
        """Return the number of workers in some states."""
        if HONEST in states:
            notable = sum(fate.state not in states for fate in self.fates.values())
            return self.stages * self.replicas - notable
        return sum(fate.state in states for fate in self.fates.values())

    def interesting(self) -> list[Fate]:
        """Return the attackers, and the honest that were banned or flagged, the most flagged first.

        Attackers come in the order of their stages.
        """
        attackers = [fate for fate in self.fates.values() if fate.attacker is not None]
        honest = [fate for fate in self.fates.values() if fate.attacker is None]
        honest.sort(key=lambda fate: (fate.banned is None, -fate.total, fate.worker))
        return sorted(attackers, key=lambda fate: fate.worker) + honest


def grid_of(run: Run) -> Grid | None:
    """Return what became of the workers; None where the record does not say who there is."""
    start = run.start
    if start is None:
        return None
    attackers = {worker_of(row): row for row in start["attackers"]}
    acts, bans = acts_and_bans(run.rows)
    reasons = {worker_of(row): str(row.get("reason", "")) for row in run.of("ban")}
    tampers = {worker_of(row): row for row in run.of("tamper")}
    flags: dict[Worker, Counter[str]] = {}
    for row in run.of("flag"):
        flags.setdefault(worker_of(row), Counter())[str(row.get("direction"))] += 1
    fates = {}
    for worker in sorted(planned(start) | acts.keys() | bans.keys() | flags.keys()):
        if worker[0] >= start["stages"] or worker[1] >= start["replicas"]:
            continue
        fates[worker] = Fate(
            worker,
            _state(worker in attackers, worker in acts, worker in bans),
            attackers.get(worker),
            acts.get(worker),
            bans.get(worker),
            reasons.get(worker, ""),
            flags.get(worker, Counter()),
            tampers.get(worker),
        )
    return Grid(start["stages"], start["replicas"], fates)


def _state(attacker: bool, acted: bool, banned: bool) -> State:
    if acted:
        return DETECTED if banned else MISSED
    if attacker:
        return EARLY if banned else IDLE
    return FALSE_BAN if banned else HONEST


def label_of(attacker: Row) -> str:
    """Return the attack of a row of the ground truth, with its parameters."""
    from sentinel_bench.config import Component

    name, params = str(attacker.get("attack", "?")), attacker.get("params")
    return Component(name=name, params=params if isinstance(params, dict) else {}).label()


def confusion(grid: Grid) -> dict[str, int]:
    """Return the workers that were banned or not, by whether they are attackers that acted."""
    return {
        "true_bans": grid.count(DETECTED),
        "missed": grid.count(MISSED),
        "false_bans": grid.count(FALSE_BAN, EARLY),
        "left": grid.count(HONEST, IDLE),
    }


def starts_of(run: Run) -> Sequence[int]:
    """Return the steps at which attackers begin, each once."""
    start = run.start
    rows: Sequence[Any] = start["attackers"] if start else ()
    return sorted({row["start"] for row in rows if type(row.get("start")) is int})
