"""Many cells over several processes: jobs, shards, what fails, and how long it will take.

    cells of a track -> groups that share a warm-up -> chunks of a group -> jobs

Each job is a process of its own with one chunk at a time: it trains the warm-up of the chunk and
forks from it. Cells without attack and defense come first, since all others are compared with
theirs. Every cell is recorded as it ends, so whatever ends a job loses the cell that was running.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from sentinel_bench import suite
from sentinel_bench.config import Cell, Scenario
from sentinel_bench.errors import SentinelBenchError
from sentinel_bench.runner import Finished, identity, known_cells

State = Literal["waiting", "running", "done", "reused", "failed"]


@dataclass
class Entry:
    """A cell of a suite, and what has become of it.

    Attributes:
        group: number of the warm-up that it forks from.
        seconds: that it took, or the running one so far.
    """

    cell: Cell
    group: int
    state: State = "waiting"
    folder: Path | None = None
    result: dict[str, Any] | None = None
    reason: str = ""
    seconds: float = 0.0

    @property
    def over(self) -> bool:
        """True if there is nothing left to do."""
        return self.state in ("done", "reused", "failed")


@dataclass
class Chunk:
    """Cells of one group that one job runs one after the other."""

    scenario: Scenario
    entries: list[Entry]
    baseline: Entry | None = None
    """That of the group, if it is not among the entries."""


def entries_of(plan: suite.Plan, shard: tuple[int, int] = (1, 1)) -> list[Entry]:
    """Return the cells of a plan, or a shard of them.

    Shard k of n has the k-th n-th of the cells, in an order that keeps those of a group together.
    The cell without attack and defense of each of its groups is part of every shard.
    """
    whole = [Entry(cell, number) for number, (_, cells) in enumerate(plan.groups) for cell in cells]
    others = [e for e in whole if not e.cell.is_baseline]
    k, n = shard
    own = others[len(others) * (k - 1) // n : len(others) * k // n]
    groups = {e.group for e in own}
    return [e for e in whole if e.cell.is_baseline and e.group in groups] + own


def reuse(entries: Iterable[Entry], out: Path, tokens: Mapping[int, str]) -> list[str]:
    """Mark what `out` has already; return why similar runs do not count.

    Args:
        entries: the cells.
        out: folder of the run folders.
        tokens: number of a group to the digest of its token ids.
    """
    known, notes = known_cells(out), []
    for entry in entries:
        folder, note = suite.find(known, entry.cell, identity(entry.cell, tokens[entry.group]))
        if folder is not None:
            entry.folder, entry.state = folder, "reused"
            entry.result = suite.rescored(folder)
        elif note:
            notes.append(note)
    return notes


def chunks_of(
    entries: Sequence[Entry], plan: suite.Plan, jobs: int
) -> tuple[list[Chunk], list[Chunk]]:
    """Return the chunks of what is left to do: first the baselines, then the rest.

    A group is cut only where there are fewer groups than jobs: each part trains the warm-up again.
    """
    first, rest = [], []
    left = [e for e in entries if not e.over]
    numbers = sorted({e.group for e in left})
    for number in numbers:
        scenario = plan.groups[number][0]
        base = next(e for e in entries if e.group == number and e.cell.is_baseline)
        if not base.over:
            first.append(Chunk(scenario, [base]))
        own = [e for e in left if e.group == number and not e.cell.is_baseline]
        parts = max(1, -(-jobs // len(numbers)))
        rest += [Chunk(scenario, own[i::parts], base) for i in range(parts) if own[i::parts]]
    return first, rest
