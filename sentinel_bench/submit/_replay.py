"""Whether flags, amnesties and bans of a record follow from each other, as the ledger has it.

The ledger (`sentinel_bench/ledger.py`) is played again as far as a record tells: what a worker has
been forgiven is not in it, so its violations lie between two bounds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sentinel_bench.api import ResponseParams
from sentinel_bench.soundness import Worker, worker_of
from sentinel_bench.submit._form import Problem

Row = Mapping[str, Any]

MAY_IDLE = frozenset({"zeros", "mimic", "update-mimic", "on-off", "mixed", "swap", "fence-rider"})
"""Attacks that may send what is right for long: it is what they do, or there is nothing to do."""
PATIENCE = 20
"""Steps in which any other attacker acts for the first time."""


class Replay:
    """The workers of a record, step by step.

    Args:
        events: well-formed and in order.
        policy: what follows a flag.
        watched: whether there is a defense at all.
    """

    def __init__(self, events: Sequence[Row], policy: ResponseParams, watched: bool) -> None:
        self._events = events
        self._policy = policy
        self._watched = watched
        self._start = events[0]
        self._begins = {worker_of(a): a["start"] for a in self._start["attackers"]}
        self._acted: dict[Worker, int] = {}
        self._banned: dict[Worker, int] = {}
        self._flags: dict[Worker, list[int]] = defaultdict(list)
        """Steps of the flags of each worker."""
        self._sure: dict[Worker, list[int]] = defaultdict(list)
        """Those that no amnesty may have lifted."""

    def problems(self) -> Iterator[Problem]:
        """Yield what contradicts what came before it."""
        step: list[tuple[int, Row]] = []
        for number, row in enumerate(self._events, start=1):
            if row["type"] == "step":
                yield from self._step(step, number, row)
                step = []
            elif row["type"] in ("act", "flag", "amnesty", "ban", "recovery", "resync"):
                step.append((number, row))
            elif row["type"] == "exhausted" and not self._empty(row["stage"]):
                yield number, f"exhausted: stage {row['stage']} still has workers"
        yield from self._ending()

    def idle(self) -> list[Worker]:
        """Return the attackers that had time to act and did not."""
        end = max((row["step"] for row in self._events if row["type"] == "step"), default=0)
        return [
            worker
            for worker, begin in self._begins.items()
            if worker not in self._acted
            and min(self._banned.get(worker, end), end) - begin >= PATIENCE
            and not self._lost(worker[1])
        ]

    def _step(self, rows: list[tuple[int, Row]], number: int, step: Row) -> Iterator[Problem]:
        lifted = {(r["stage"], r["direction"]) for _, r in rows if r["type"] == "amnesty"}
        flagged = [0, 0]
        for at, row in rows:
            wrong = self._row(row, lifted)
            if wrong is not None:
                yield at, f"{row['type']}: {wrong}"
            if row["type"] == "flag":
                flagged[row["tampered"]] += 1
        if step["flagged"] != flagged:
            yield number, f"step: flagged is {step['flagged']}, and the flags are {flagged}"
        passes = 1 + sum(row["type"] == "recovery" for _, row in rows)
        if sum(step["checked"]) > passes * 4 * self._start["stages"] * self._start["replicas"]:
            yield number, f"step: checked is {step['checked']}, more than the workers send"
        if step["excluded"] > self._start["replicas"]:
            yield number, f"step: excluded is {step['excluded']}, more than there are replicas"
        quiet = step["step"] < self._start["warmup_steps"]
        counts = (*step["checked"], step["tampered"], step["excluded"])
        if quiet and (rows or any(counts) or step.get("skipped")):
            yield number, "step: something happens in the honest warm-up"
        if not self._watched and any(step["checked"]):
            yield number, "step: signals are checked, though there is no defense"
        if not self._begins and (step["checked"][1] or step["tampered"]):
            yield number, "step: signals are tampered with, though nobody attacks"
        missed = self._due(step["step"])
        if missed is not None:
            yield number, f"step: worker {missed} had to be banned by its violations, and was not"

    def _row(self, row: Row, lifted: set[tuple[int, str]]) -> str | None:
        kind, step = row["type"], row["step"]
        if kind in ("recovery", "resync"):
            return None
        if kind == "amnesty":
            few = not 0 < row["replicas"] <= self._start["replicas"]
            return "of nobody" if few or not self._policy.amnesty else None
        worker = worker_of(row)
        if worker in self._banned:
            return f"worker {worker} was banned at step {self._banned[worker]}"
        if kind == "act":
            return self._act(worker, step)
        if not self._watched:
            return "there is no defense"
        if kind == "ban":
            return self._ban(worker, row)
        if row["tampered"] and worker not in self._acted:
            return f"worker {worker} has not tampered with anything"
        self._flags[worker].append(step)
        if not (self._policy.amnesty_rollback and (row["stage"], row["direction"]) in lifted):
            self._sure[worker].append(step)
        return None

    def _act(self, worker: Worker, step: int) -> str | None:
        if worker in self._acted:
            return f"worker {worker} acts for the first time again"
        self._acted[worker] = step
        begin = self._begins.get(worker)
        if begin is None or step < begin:
            return f"worker {worker} does not attack at step {step}"
        return None

    def _ban(self, worker: Worker, row: Row) -> str | None:
        step, needed = row["step"], self._policy.violations
        flags = self._flags[worker]
        self._banned[worker] = step
        if not self._policy.bans:
            return "the defense does not ban"
        if step not in flags:
            return f"worker {worker} was not flagged at step {step}"
        if row["reason"] == "violations" and len(flags) < needed:
            return f"worker {worker} had {len(flags)} flags of {needed}"
        return None

    def _due(self, step: int) -> Worker | None:
        """Return a worker that must have been banned: nothing of these flags can be forgiven."""
        for worker, flags in self._sure.items():
            if worker in self._banned or flags[-1] != step or not self._policy.bans:
                continue
            if sum(step - f < self._policy.forgive_after for f in flags) >= self._policy.violations:
                return worker
        return None

    def _ending(self) -> Iterator[Problem]:
        last = len(self._events)
        exhausted = any(row["type"] == "exhausted" for row in self._events)
        banned = Counter(stage for stage, _ in self._banned)
        if not exhausted and self._start["replicas"] in banned.values():
            yield last, "end: all workers of a stage are banned, and the run went on"
        tampered = {worker_of(row) for row in self._events if row["type"] == "tamper"}
        if tampered != self._acted.keys():
            yield last, "end: the tamper events are not those of the workers that acted"
        signals = sum(row["signals"] for row in self._events if row["type"] == "tamper")
        counted = sum(row["tampered"] for row in self._events if row["type"] == "step")
        on_weights = any(a.get("mode") == "update" for a in self._start["attackers"])
        if counted != signals and not on_weights:  # what is done to weights is no signal
            yield last, f"end: {signals} signals were tampered with, and {counted} in the steps"

    def _empty(self, stage: int) -> bool:
        everybody = range(self._start["replicas"])
        return all((stage, r) in self._banned for r in everybody) or all(map(self._lost, everybody))

    def _lost(self, replica: int) -> bool:
        """Tell whether a rank's data is lost: a worker of it is banned, and nobody takes over."""
        return self._policy.on_ban == "drop" and any(r == replica for _, r in self._banned)
