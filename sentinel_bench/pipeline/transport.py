"""What messages do on their way: some never come, some are late. Nobody sleeps; seconds are added.

Simulated: a receiver that finds out that a message is missing, how long it waits for one, and what
then follows (`FaultConfig`). Receivers find out for themselves, each anew: a worker that is silent
in both directions is waited for twice.

Time: replicas end each step together, and the crossings of a step come one after the other, as in
a synchronous pipeline. So a crossing takes as long as its latest message, at most the deadline, and
the waits of the crossings of a step add up, those of passes that are done again too. A message
that never comes is waited for until the deadline; without one, the receiver sees at once that the
connection is closed.

Not simulated: a worker that has crashed still answers, in that step, what verifiers ask it, and has
a part in the all-reduce of its stage (`quarantine` leaves its rank out).
"""

from __future__ import annotations

from dataclasses import replace

from sentinel_bench.api import Direction
from sentinel_bench.config import FaultConfig
from sentinel_bench.errors import FaultError
from sentinel_bench.ledger import Ledger
from sentinel_bench.pipeline.tamper import Sent


class Transport:
    """Delivers the messages of a cell, or finds them lost.

    Args:
        faults: how long is waited, and what follows from a lost message.
        ledger: is told whose messages were lost, and knows the ranks that send nothing any more.
    """

    def __init__(self, faults: FaultConfig, ledger: Ledger) -> None:
        self._faults = faults
        self._ledger = ledger
        self._waited = 0.0

    def deliver(self, stage: int, direction: Direction, step: int, sent: Sent) -> Sent:
        """Wait for what the replicas of `stage` sent; return it with what is lost as `missing`.

        Nothing is expected of a rank whose data is lost, so nothing of it can be.

        Raises:
            FaultError: a message is lost, and nobody handles that.
        """
        if not (any(sent.missing) or any(sent.late)):
            return sent
        expected = [not self._ledger.lost(r) for r in range(len(sent.readable))]
        missing = sent.missing or [False] * len(expected)
        delays = sent.late or [0.0] * len(expected)
        lost = [gone and due for gone, due in zip(missing, expected, strict=True)]
        patience = self._faults.deadline or 0.0
        self._waited += max(
            patience if gone else late * due
            for gone, late, due in zip(lost, delays, expected, strict=True)
        )
        for replica, gone in enumerate(lost):
            if gone:
                self._lose(stage, replica, direction, step, delays[replica])
        return replace(sent, missing=lost)

    @property
    def survives(self) -> bool:
        """True if a run goes on after a message was lost."""
        return self._faults.on_crash == "ban"

    def take(self) -> float:
        """Return the simulated seconds of waiting since the last call: no clock has seen them."""
        waited, self._waited = self._waited, 0.0
        return waited

    def _lose(self, stage: int, replica: int, direction: Direction, step: int, late: float) -> None:
        if self._faults.on_crash == "ban":
            self._ledger.crash(stage, replica)
            return
        who = f"stage {stage}, replica {replica} sent"
        if late:
            raise FaultError(
                f"{who} its {direction} of step {step} {late:g} s late, past the deadline of "
                f"{self._faults.deadline:g} s (simulated): rerun with --on-crash ban to survive it"
            )
        raise FaultError(
            f"{who} no {direction} at step {step} (a simulated crash): rerun with --on-crash ban "
            "to survive it"
        )
