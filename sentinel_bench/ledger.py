"""The ledger: what follows when a signal is flagged (SENTINEL, arXiv 2603.03592, section 4).

A detector says which signals are odd; the ledger turns that into violations, taint, amnesty and
bans. It knows workers by stage and replica alone, and nothing about who is malicious. Plain Python
numbers, no tensors: it decides about a handful of workers at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from sentinel_bench.api import ResponseParams


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the ledger decides about one boundary in one direction.

    Attributes:
        flagged: `[replicas]`, the flags that count: of tested workers, and not under amnesty.
        clean: `[replicas]`, tested and not flagged: the detector may learn from these.
        amnesty: number of replicas whose flags were lifted, 0 without an amnesty.
    """

    flagged: list[bool]
    clean: list[bool]
    amnesty: int


@dataclass(frozen=True, slots=True)
class Ban:
    """A worker that is banned from the end of this step on."""

    stage: int
    replica: int
    reason: Literal["violations", "severe", "crash"]


class Ledger:
    """Violations and bans of a grid of workers.

    Args:
        policy: the response's parameters.
        stages, replicas: shape of the grid.

    Attributes:
        lenient: True if `judge` rules that nobody is flagged, whatever a detector says.
    """

    lenient: ClassVar[bool] = False

    def __init__(self, policy: ResponseParams, stages: int, replicas: int) -> None:
        self.policy = policy
        self.stages = stages
        self.replicas = replicas
        self.violations = [[0] * replicas for _ in range(stages)]
        self._streak = [[0] * replicas for _ in range(stages)]
        self._banned = [[False] * replicas for _ in range(stages)]
        self._tested: set[tuple[int, int]] = set()
        self._odd: set[tuple[int, int]] = set()
        self._severe: set[tuple[int, int]] = set()
        self._crashed: set[tuple[int, int]] = set()

    def banned(self, stage: int, replica: int) -> bool:
        """Tell whether a worker is banned."""
        return self._banned[stage][replica]

    def lost(self, replica: int) -> bool:
        """Tell whether a rank's data is lost: a worker is banned and nobody takes over."""
        return self.policy.on_ban == "drop" and any(row[replica] for row in self._banned)

    def capacity(self) -> list[int]:
        """Return the number of workers left in each stage."""
        return [row.count(False) for row in self._banned]

    def ban(self, stage: int, replica: int) -> None:
        """Ban a worker, whatever it has done."""
        self._banned[stage][replica] = True

    def judge(
        self, stage: int, flagged: Sequence[bool], severe: Sequence[bool], tested: Sequence[bool]
    ) -> Ruling:
        """Rule on the flags at one boundary; call `end_step` after the last of a step.

        Args:
            stage: the stage that sent.
            flagged, severe: `[replicas]`, what the detector says.
            tested: `[replicas]`, neither banned nor tainted.
        """
        odd = [f and t for f, t in zip(flagged, tested, strict=True)]
        amnesty = sum(odd)
        if not (self.policy.amnesty and 2 * amnesty > self._banned[stage].count(False)):
            amnesty = 0
        counted = odd if not (amnesty and self.policy.amnesty_rollback) else [False] * len(odd)
        for replica, is_tested in enumerate(tested):
            worker = (stage, replica)
            if is_tested:
                self._tested.add(worker)
            if counted[replica]:
                self._odd.add(worker)
                self.violations[stage][replica] += 1
                if severe[replica]:
                    self._severe.add(worker)
        lifted = [False] * len(odd) if amnesty else odd
        clean = [t and not f for t, f in zip(tested, lifted, strict=True)]
        return Ruling(lifted, clean, amnesty)

    def crash(self, stage: int, replica: int) -> None:
        """Have a worker banned at the end of this step, since a message of it was lost.

        That is no flag: neither amnesty nor a policy without bans has a say.
        """
        self._crashed.add((stage, replica))

    def end_step(self) -> list[Ban]:
        """Close a step: ban, and forgive what has been clean for long enough."""
        bans = []
        for stage, replica in sorted(self._tested | self._crashed):
            worker = (stage, replica)
            if worker in self._crashed:
                self._banned[stage][replica] = True
                bans.append(Ban(stage, replica, "crash"))
                continue
            if worker not in self._odd:
                self._forgive(stage, replica)
                continue
            self._streak[stage][replica] = 0
            enough = self.violations[stage][replica] >= self.policy.violations
            if self.policy.bans and (enough or worker in self._severe):
                self._banned[stage][replica] = True
                bans.append(
                    Ban(stage, replica, "severe" if worker in self._severe else "violations")
                )
        self._tested.clear()
        self._odd.clear()
        self._severe.clear()
        self._crashed.clear()
        return bans

    def _forgive(self, stage: int, replica: int) -> None:
        self._streak[stage][replica] += 1
        if self._streak[stage][replica] >= self.policy.forgive_after:
            self._streak[stage][replica] = 0
            self.violations[stage][replica] = max(0, self.violations[stage][replica] - 1)
