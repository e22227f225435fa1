"""What the processes of a run tell each other at the end of a step, for one record."""

from __future__ import annotations

import math
from typing import Any

from sentinel_bench.ledger import Ban, Ledger
from sentinel_bench.pipeline.inspect import Log, Tally
from sentinel_bench.pipeline.team import Team

_FORWARD_FIRST = {"activation": 0, "gradient": 1, "update": 2}

Row = tuple[str, dict[str, Any]]


class Minutes:
    """A log that keeps the rows of a step until all processes have told theirs.

    Every replica group comes to the same verdicts, so the rows of the first one are all there are.
    One process by itself writes through.

    Args:
        log: of the record; only that of rank 0 is written to.
        team: the processes.
        silent: True if nobody attacks and nobody looks: there is nothing to tell.
    """

    def __init__(self, log: Log, team: Team, *, silent: bool = False) -> None:
        self._log = log
        self._team = team
        self._silent = silent
        self._rows: list[tuple[int, Row]] = []
        self._part = 0

    def append(self, kind: str, /, **fields: Any) -> None:
        """Add one row."""
        if self._team.several:
            self._rows.append((self._part, (kind, fields)))
        else:
            self._log.append(kind, **fields)

    def begin_part(self) -> None:
        """Begin a part of the step that one process comes to when it is through with the last."""
        self._part += 1

    def close_step(
        self, bans: list[Ban], tally: Tally, waited: float, ledger: Ledger
    ) -> tuple[Tally, float]:
        """Write what happened in a step, and let the ledger know who was banned elsewhere.

        Args:
            bans, tally: of the stages that are here.
            waited: simulated seconds in which everybody waits for a late worker.
            ledger: gets the bans of the other stages.

        Returns:
            Tally and waits of the whole run.
        """
        if not self._team.several or self._silent:
            return tally, waited
        told = self._team.share((self._rows, bans, tally, waited))
        pipeline = told[: len(told) // self._team.column[1]]
        self._rows, self._part = [], 0
        rows = [row for rows, *_ in pipeline for row in rows]
        for _, (kind, fields) in sorted(rows, key=_place):
            self._log.append(kind, **fields)
        for _, elsewhere, *_ in pipeline:
            for ban in elsewhere:
                ledger.ban(ban.stage, ban.replica)
        tallies, waits = [t[2] for t in pipeline], [t[3] for t in pipeline]
        return _sum(tallies), math.fsum(waits)


def _place(row: tuple[int, Row]) -> tuple[int, int, int, int]:
    """Return where a row of a step stands in the order in which one process comes to it."""
    part, (kind, fields) = row
    where = fields.get("direction")
    if kind == "ban" or where not in _FORWARD_FIRST:
        return part, 3, 0, fields.get("stage", 0)
    stage = -fields["stage"] if where == "gradient" else fields["stage"]
    return part, _FORWARD_FIRST[where], fields.get("microbatch", 0), stage


def _sum(tallies: list[Tally]) -> Tally:
    both = Tally()
    for tally in tallies:
        both.checked = [a + b for a, b in zip(both.checked, tally.checked, strict=True)]
        both.flagged = [a + b for a, b in zip(both.flagged, tally.flagged, strict=True)]
        both.tampered += tally.tampered
    return both
